"""Logits -> the scores that tokens are chosen from: what processed log-probabilities are of."""

from mtp_plugin.speculative.ops.sampling.processed.door import processed_scores

__all__ = ["processed_scores"]
