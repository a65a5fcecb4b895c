"""Logits -> draws, by the options in the slots of their requests."""

from mtp_plugin.speculative.ops.sampling.contract import Role
from mtp_plugin.speculative.ops.sampling.door import draw
from mtp_plugin.speculative.ops.sampling.reference import DRAWN_OPTIONS

__all__ = ["DRAWN_OPTIONS", "Role", "draw"]
