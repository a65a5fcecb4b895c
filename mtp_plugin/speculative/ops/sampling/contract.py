"""What a draw is for."""

from __future__ import annotations

from enum import IntEnum


class Role(IntEnum):
    """What a draw is for; draws of different roles are independent."""

    TARGET = 0  # and the drafts that are coupled to it
    PLAIN_DRAFT = 1
