"""Budgets of thinking: drafts -> ids that rows must give, emitted tokens -> what is spent."""

from mtp_plugin.speculative.logit_rows import ThinkingRule
from mtp_plugin.speculative.ops.thinking.door import force_ends, note_thought

__all__ = ["ThinkingRule", "force_ends", "note_thought"]
