"""Logits and tokens -> log-probabilities of the tokens, and of the most likely ones."""

from mtp_plugin.speculative.ops.logprobs.contract import LOGPROB_OPTIONS, LogProbs
from mtp_plugin.speculative.ops.logprobs.door import logprobs

__all__ = ["LOGPROB_OPTIONS", "LogProbs", "logprobs"]
