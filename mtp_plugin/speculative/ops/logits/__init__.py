"""Target logits -> logits that acceptance may read."""

from mtp_plugin.speculative.ops.logits.door import early_stops_masked
from mtp_plugin.speculative.ops.logits.reference import EDITED_OPTIONS

__all__ = ["EDITED_OPTIONS", "early_stops_masked"]
