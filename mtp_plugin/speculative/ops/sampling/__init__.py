"""Logits -> draws, by the options in the slots of their requests."""

from mtp_plugin.speculative.ops.sampling.contract import (
    CHOICE_COLUMNS,
    NUM_CUTS,
    STEP_COLUMN,
    DraftedBy,
    JudgedBy,
    Role,
)
from mtp_plugin.speculative.ops.sampling.door import draw
from mtp_plugin.speculative.ops.sampling.reference import DRAWN_OPTIONS

__all__ = [
    "CHOICE_COLUMNS",
    "DRAWN_OPTIONS",
    "NUM_CUTS",
    "STEP_COLUMN",
    "DraftedBy",
    "JudgedBy",
    "Role",
    "draw",
]
