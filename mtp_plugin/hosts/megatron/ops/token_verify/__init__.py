"""Sampled tokens -> which drafts stand."""

from mtp_plugin.hosts.megatron.ops.token_verify.contract import VerifiedTokens
from mtp_plugin.hosts.megatron.ops.token_verify.door import (
    required_logit_indices,
    verify_speculative_tokens,
)

__all__ = ["VerifiedTokens", "required_logit_indices", "verify_speculative_tokens"]
