"""Target-only decoding of a loaded model, one request at a time, through none of the executor."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mtp_plugin.executor.models import LoadedModel
from mtp_plugin.infer import Thinking, decode
from mtp_plugin.requests.detokenizer import Tokenizer
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.seeds import ENGINE_SEED

WITHOUT_END = SamplingParams(max_new_tokens=sys.maxsize, ignore_eos=True)
"""Greedy, and as long as there is room."""

TRANSFORMERS_ATTENTION = "sdpa"
"""An attention of transformers' own."""


@contextmanager
def transformers_attention(model: LoadedModel) -> Iterator[None]:
    """Run the model with an attention of transformers' own, then with its former one again."""
    former: Any = model.target.config._attn_implementation
    model.set_attn_implementation(TRANSFORMERS_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(former)


class Oracle:
    """What the target alone says; the model must run under :func:`transformers_attention`."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self.device: torch.device = next(model.lm_head.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, hence of the logits."""
        return next(self._model.lm_head.parameters()).dtype

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end the model's texts."""
        return self._model.facts.eos_token_ids

    def continuation(
        self,
        prompt_ids: Sequence[int],
        emitted: Sequence[int],
        limit: int,
        params: SamplingParams = WITHOUT_END,
        *,
        number: int = 0,
        engine_seed: int = ENGINE_SEED,
        tokenizer: Tokenizer | None = None,
        thinking: Thinking | None = None,
    ) -> list[int]:
        """``emitted`` and what target-only decoding adds to it.

        Args:
            limit: tokens at most, emitted ones included.
            params: options of the request; unset: greedy, and nothing but the limit ends it.
            number: of the request.
            engine_seed: of requests without a seed.
            tokenizer: decodes the text that stop strings end.
            thinking: its ids, which a budget goes by.
        """
        return decode(
            self._model.target,
            prompt_ids,
            params,
            number=number,
            end_ids=self.end_ids,
            max_seq_len=len(prompt_ids) + limit,
            tokenizer=tokenizer,
            engine_seed=engine_seed,
            emitted=emitted,
            thinking=thinking,
        ).token_ids

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], num_rows: int) -> torch.Tensor:
        """Logits [num_rows, V] float32 after the last ``num_rows`` of the given tokens."""
        ids = torch.tensor([list(token_ids)], device=self.device)
        decoder: Any = self._model.target.get_decoder()
        states = decoder(input_ids=ids, use_cache=False).last_hidden_state[0, -num_rows:]
        # the target's own, as in decoding: the model may run a fused one in its place
        head: Any = self._model.target.get_output_embeddings()
        logits: torch.Tensor = head(states)
        return logits.float()
