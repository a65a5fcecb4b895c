"""Target logits -> accepted tokens."""

from mtp_plugin.speculative.ops.acceptance.contract import (
    RUN_COLUMN,
    STRICT,
    AcceptanceRules,
    RelaxedRule,
)
from mtp_plugin.speculative.ops.acceptance.door import accept

__all__ = ["RUN_COLUMN", "STRICT", "AcceptanceRules", "RelaxedRule", "accept"]
