"""``python -m mtp_plugin`` is the command ``mtp-plugin``."""

from mtp_plugin.cli import main

main()
