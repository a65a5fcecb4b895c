"""Target logits -> logits that tokens may be taken from."""

from mtp_plugin.speculative.ops.logits.contract import DrawnRows
from mtp_plugin.speculative.ops.logits.door import banned_masked
from mtp_plugin.speculative.ops.logits.reference import EDITED_OPTIONS, edited

__all__ = ["EDITED_OPTIONS", "DrawnRows", "banned_masked", "edited"]
