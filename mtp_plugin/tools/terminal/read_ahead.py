"""Read weights from disk while Python still imports modules."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from threading import Thread


def read_ahead(checkpoint: str | Path) -> Thread | None:
    """Start reading a checkpoint's weights into the page cache in the background.

    Returns:
        The thread, which need not be joined; None if the system does not support it.
    """
    if not hasattr(os, "posix_fadvise"):
        return None
    thread = Thread(target=_prefetch, args=(Path(checkpoint),), daemon=True, name="read ahead")
    thread.start()
    return thread


def _prefetch(checkpoint: Path) -> None:
    # loading reports errors
    with suppress(OSError, ValueError):
        for file in sorted(checkpoint.glob("*.safetensors")):
            if not file.is_file():
                continue
            with file.open("rb") as weights:
                os.posix_fadvise(weights.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
