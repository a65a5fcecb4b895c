"""What the command line shows: prompts in, live text, tables, JSON and the doctor's findings."""

from mtp_plugin.extras import DISPLAY_PACKAGES, require

require("mtp_plugin.tools.terminal", *DISPLAY_PACKAGES)
