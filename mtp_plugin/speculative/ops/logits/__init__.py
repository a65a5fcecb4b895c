"""Target logits -> logits that acceptance may read."""

from mtp_plugin.speculative.ops.logits.contract import StepRows
from mtp_plugin.speculative.ops.logits.reference import early_stops_masked, mask_early_stops

__all__ = ["StepRows", "early_stops_masked", "mask_early_stops"]
