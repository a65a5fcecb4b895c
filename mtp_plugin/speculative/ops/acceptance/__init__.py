"""Target logits -> accepted tokens."""

from mtp_plugin.speculative.ops.acceptance.contract import (
    STRICT,
    AcceptanceRules,
    RelaxedRule,
)
from mtp_plugin.speculative.ops.acceptance.door import accept

__all__ = ["STRICT", "AcceptanceRules", "RelaxedRule", "accept"]
