"""Target logits -> accepted tokens."""

from mtp_plugin.speculative.ops.acceptance.contract import RelaxedAccepted, RelaxedRule
from mtp_plugin.speculative.ops.acceptance.reference import accept_relaxed, accept_strict

__all__ = ["RelaxedAccepted", "RelaxedRule", "accept_relaxed", "accept_strict"]
