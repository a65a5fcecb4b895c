"""Prefill and decode with a language model and a cache."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

import torch

from mtp_plugin.errors import ConfigError, TensorContractError
from mtp_plugin.infer.kv_cache import KVCache
from mtp_plugin.infer.language_model import LanguageModel
from mtp_plugin.infer.sample_strategy import SampleStrategy


class PrefillOutput(NamedTuple):
    """Result of `Inferencer.prefill`."""

    token_ids: torch.Tensor
    """[B, 1], the token after the prompt."""
    token_logits: torch.Tensor
    """[B, Q, V], logits of every prompt token."""


class DecodeOutput(NamedTuple):
    """Result of `Inferencer.decode`."""

    token_ids: torch.Tensor
    """[B, N], the tokens after the query."""
    token_logits: torch.Tensor
    """[B, N, V], the logits from which each token was chosen."""


class Inferencer(Protocol):
    """Non-speculative decoding in two phases; the cache grows by exactly the query tokens."""

    def prefill(
        self, query_token_ids: torch.Tensor, kv_cache: KVCache, sample_strategy: SampleStrategy
    ) -> PrefillOutput:
        """Run the model on a prompt [B, Q] and choose the token after it."""
        ...

    def decode(
        self,
        query_token_ids: torch.Tensor,
        kv_cache: KVCache,
        max_new_tokens: int,
        sample_strategy: SampleStrategy,
    ) -> DecodeOutput:
        """Decode token by token after a query [B, 1].

        Ends after `max_new_tokens` (N <= `max_new_tokens`) or when every row has reached an end
        token, which is part of the output; a row that ended earlier repeats its end token and the
        logits of that token. The model does not run on the last token, so the cache grows by N.
        """
        ...


class BasicInferencer(Inferencer):
    """An `Inferencer` that runs the model on the whole prompt at once."""

    def __init__(
        self, language_model: LanguageModel, eos_token_ids: Collection[int] | None = None
    ) -> None:
        """Create an inferencer for a model.

        Args:
            language_model: computes the logits.
            eos_token_ids: EOS token ids; None: those of the model; empty: no token ends a decode.
        """
        self.language_model = language_model
        self._eos_token_ids = eos_token_ids

    def prefill(
        self, query_token_ids: torch.Tensor, kv_cache: KVCache, sample_strategy: SampleStrategy
    ) -> PrefillOutput:
        """See `Inferencer.prefill`.

        Raises:
            TensorContractError: the prompt is not [B, Q] with at least one token.
        """
        if query_token_ids.dim() != 2 or query_token_ids.numel() == 0:
            raise TensorContractError(
                "query_token_ids: expected [B, Q] with at least one token, "
                f"got {list(query_token_ids.shape)}"
            )
        logits = self.language_model.forward(query_token_ids, kv_cache)
        token_ids = sample_strategy.sample(logits[:, -1])
        return PrefillOutput(token_ids.unsqueeze(1), logits)

    def decode(
        self,
        query_token_ids: torch.Tensor,
        kv_cache: KVCache,
        max_new_tokens: int,
        sample_strategy: SampleStrategy,
    ) -> DecodeOutput:
        """See `Inferencer.decode`.

        Raises:
            TensorContractError: the query is not [B, 1].
            ConfigError: ``max_new_tokens`` is below 1.
            CheckpointError: (a ValueError) no EOS tokens were given and the model has none.
        """
        if query_token_ids.dim() != 2 or query_token_ids.shape[1] != 1 or not len(query_token_ids):
            raise TensorContractError(
                f"query_token_ids: expected [B, 1], got {list(query_token_ids.shape)}"
            )
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
        ends = torch.tensor(self._end_token_ids(), dtype=torch.int64, device=query_token_ids.device)
        ended = torch.zeros(len(query_token_ids), dtype=torch.bool, device=query_token_ids.device)
        tokens: list[torch.Tensor] = []
        rows: list[torch.Tensor] = []
        last = query_token_ids.squeeze(1)
        while len(tokens) < max_new_tokens and not bool(ended.all()):
            logits = self.language_model.forward(last.unsqueeze(1), kv_cache)[:, -1]
            if rows:
                logits = torch.where(ended.unsqueeze(1), rows[-1], logits)
            last = torch.where(ended, last, sample_strategy.sample(logits))
            ended |= torch.isin(last, ends)
            tokens.append(last)
            rows.append(logits)
        return DecodeOutput(torch.stack(tokens, dim=1), torch.stack(rows, dim=1))

    def _end_token_ids(self) -> list[int]:
        if self._eos_token_ids is not None:
            return list(self._eos_token_ids)
        several = getattr(self.language_model, "eos_token_ids", None)
        return list(several) if several else [self.language_model.eos_token_id]
