"""Advance the history of requests, and build the inputs of the first draft pass."""

from mtp_plugin.ops.draft_inputs.draft_inputs import (
    advance_and_build_inputs,
    advance_history,
    build_reused_inputs,
)
from mtp_plugin.ops.draft_inputs.rows import (
    accepted_rows,
    concatenate,
    context_rows,
    context_rows_with_history,
    generation_window,
)
from mtp_plugin.ops.draft_inputs.types import (
    DraftKVLengths,
    DraftWindows,
    History,
    TargetRows,
)

__all__ = [
    "DraftKVLengths",
    "DraftWindows",
    "History",
    "TargetRows",
    "accepted_rows",
    "advance_and_build_inputs",
    "advance_history",
    "build_reused_inputs",
    "concatenate",
    "context_rows",
    "context_rows_with_history",
    "generation_window",
]
