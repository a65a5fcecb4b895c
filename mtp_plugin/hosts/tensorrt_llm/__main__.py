"""``python -m mtp_plugin.hosts.tensorrt_llm`` runs ``mtp-plugin doctor --host tensorrt_llm``."""

import sys

from mtp_plugin.hosts.tensorrt_llm.checks import main

if __name__ == "__main__":
    sys.exit(main())
