"""``python -m mtp_plugin.tools.bench``: the same as ``mtp-plugin bench``."""

from mtp_plugin.tools.bench.cli import main

main()
