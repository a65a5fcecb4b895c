"""Target logits -> logits that acceptance may read."""

from mtp_plugin.ops.sampling.contract import StepRows
from mtp_plugin.ops.sampling.reference import early_stops_masked, mask_early_stops

__all__ = ["StepRows", "early_stops_masked", "mask_early_stops"]
