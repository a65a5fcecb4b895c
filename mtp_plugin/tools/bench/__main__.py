"""``python -m mtp_plugin.tools.bench``: the same as ``mtp-plugin bench``."""

from mtp_plugin.extras import COMMAND_LINE_PACKAGES, require_or_exit

require_or_exit("mtp_plugin.tools.bench", *COMMAND_LINE_PACKAGES)

from mtp_plugin.tools.bench.cli import main  # noqa: E402 - what is missing is told before

main()
