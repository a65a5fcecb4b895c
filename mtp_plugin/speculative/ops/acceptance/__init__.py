"""Verify draft tokens against target logits."""

from mtp_plugin.speculative.ops.acceptance.accept import accept
from mtp_plugin.speculative.ops.acceptance.types import STRICT, AcceptanceRules, RelaxedRule

__all__ = ["STRICT", "AcceptanceRules", "RelaxedRule", "accept"]
