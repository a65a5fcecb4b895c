"""Verify draft tokens against target logits."""

from mtp_plugin.ops.acceptance.accept import accept
from mtp_plugin.ops.acceptance.types import STRICT, AcceptanceRules, RelaxedRule

__all__ = ["STRICT", "AcceptanceRules", "RelaxedRule", "accept"]
