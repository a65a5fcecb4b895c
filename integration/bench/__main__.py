"""``python -m integration.bench``."""

from integration.bench.cli import main

main()
