"""``python -m mtp_plugin.bench``: the same as ``mtp-plugin bench``."""

from mtp_plugin.bench.cli import main

main()
