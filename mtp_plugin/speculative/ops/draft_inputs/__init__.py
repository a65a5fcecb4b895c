"""History and accepted tokens -> rows of the first draft pass."""

from mtp_plugin.speculative.ops.draft_inputs.reference import (
    accepted_rows,
    concatenate,
    context_rows,
    context_rows_with_history,
    generation_window,
)

__all__ = [
    "accepted_rows",
    "concatenate",
    "context_rows",
    "context_rows_with_history",
    "generation_window",
]
