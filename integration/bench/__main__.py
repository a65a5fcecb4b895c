"""``python -m integration.bench``."""

from mtp_plugin.extras import COMMAND_LINE_PACKAGES, require_or_exit

require_or_exit("integration.bench", *COMMAND_LINE_PACKAGES)

from integration.bench.cli import main  # noqa: E402 - a missing package is reported first

main()
