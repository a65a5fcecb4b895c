"""Input and output of the commands: prompts, streamed output, tables, JSON and `doctor`."""

from mtp_plugin.extras import DISPLAY_PACKAGES, require

require("mtp_plugin.tools.terminal", *DISPLAY_PACKAGES)
