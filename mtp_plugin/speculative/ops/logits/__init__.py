"""Target logits -> logits that acceptance may read."""

from mtp_plugin.speculative.ops.logits.contract import LogitRows
from mtp_plugin.speculative.ops.logits.reference import early_stops_masked, mask_early_stops

__all__ = ["LogitRows", "early_stops_masked", "mask_early_stops"]
