"""The limit of prompt tokens in steps that also have generation requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mtp_plugin.hosts.embedded.models import LoadedModel

LEAST_CHUNK = 64
"""Tokens of a prompt that a step processes whatever their cost."""
SHORT_PREFIX = 4096
"""Positions up to which every prompt token costs the same, so that a short prompt divides into
chunks of ``max_cost`` tokens, for which steps are captured."""


@dataclass(frozen=True)
class MixedPromptLimit:
    """Limits the prompt chunks of a mixed step, so that its generation requests do not stall.

    A prompt token at position p costs 1 up to ``short_prefix``, then 1 + (p - ``short_prefix``) /
    ``equal_prefix``: the linear layers cost the same for every token, attention grows with the
    prefix.
    """

    max_cost: int
    """Maximum cost of all prompt tokens of a step."""
    equal_prefix: float = math.inf
    """Prefix length at which attention costs as much as the linear layers."""
    short_prefix: int = 0

    def cost(self, start: int, length: int) -> float:
        """Return the cost of ``length`` tokens from position ``start``."""
        short = min(length, max(self.short_prefix - start, 0))
        start, rest = max(start - self.short_prefix, 0), length - short
        return short + rest + rest * (start + rest / 2) / self.equal_prefix

    def longest(self, start: int, used: float) -> int:
        """Return how many tokens from position ``start`` fit if others already cost ``used``.

        The first chunk of a step has at least `LEAST_CHUNK` tokens (fewer with a smaller limit), so
        that every prompt advances.
        """
        room = self.max_cost - used
        short = min(max(self.short_prefix - start, 0), max(int(room), 0))
        # positive root of the rest's cost, in the form that does not cancel
        rest, first = room - short, 1 + max(start - self.short_prefix, 0) / self.equal_prefix
        root = math.sqrt(first * first + 2 * max(rest, 0) / self.equal_prefix)
        length = short + int(2 * rest / (first + root))
        return length if used else max(length, min(LEAST_CHUNK, self.max_cost))


def equal_prefix_of(model: LoadedModel) -> float:
    """Return the prefix length at which a token's attention costs as much as its linear layers.

    This is 2 * (parameters active per token) / (4 * layers * query heads * head width). Sliding
    windows are counted as full attention.
    """
    config: Any = model.target.config
    decoder: Any = model.target.get_decoder()
    embedding = {id(weight) for weight in model.embed_tokens.parameters()}
    per_token = getattr(config, "num_experts_per_tok", None)
    active = 0.0
    for name, weight in decoder.named_parameters():
        if id(weight) in embedding:
            continue
        # the routed experts of a layer are one tensor
        is_routed = per_token is not None and ".experts." in name
        active += weight.numel() * (per_token / weight.shape[0] if is_routed else 1)
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    if getattr(config, "kv_lora_rank", None):
        widths = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    else:
        widths = 2 * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return float(active / (layers * heads * widths))
