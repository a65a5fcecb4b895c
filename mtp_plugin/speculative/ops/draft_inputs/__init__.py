"""History and accepted tokens -> history moved on, and the rows of the first draft pass."""

from mtp_plugin.speculative.ops.draft_inputs.contract import DraftKVLengths, History, TargetRows
from mtp_plugin.speculative.ops.draft_inputs.door import (
    advance_and_build_inputs,
    advance_history,
    build_reused_inputs,
)
from mtp_plugin.speculative.ops.draft_inputs.rows import (
    accepted_rows,
    concatenate,
    context_rows,
    context_rows_with_history,
    generation_window,
)

__all__ = [
    "DraftKVLengths",
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
