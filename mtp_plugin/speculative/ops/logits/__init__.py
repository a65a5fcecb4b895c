"""Target logits -> logits without the ids that must not come next."""

from mtp_plugin.speculative.ops.logits.door import banned_masked

__all__ = ["banned_masked"]
