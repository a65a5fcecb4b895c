"""Target logits -> logits that acceptance may read."""

from mtp_plugin.speculative.ops.logits.door import early_stops_masked

__all__ = ["early_stops_masked"]
