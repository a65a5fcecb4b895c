"""``python -m mtp_plugin.hosts.vllm`` runs ``mtp-plugin doctor --host vllm``."""

import sys

from mtp_plugin.hosts.vllm.checks import main

if __name__ == "__main__":
    sys.exit(main())
