"""Target logits -> logits that acceptance may read."""

from mtp_plugin.ops.sampling.reference import mask_early_stops

__all__ = ["mask_early_stops"]
