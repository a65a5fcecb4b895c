"""What the command line shows: prompts in, live text, tables, JSON and the doctor's findings."""

from mtp_plugin.extras import COMMAND_LINE_PACKAGES, require

require("mtp_plugin.tools.terminal", *COMMAND_LINE_PACKAGES)
