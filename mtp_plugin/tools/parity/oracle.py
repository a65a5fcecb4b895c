"""Non-speculative decoding of a loaded model, one request at a time, without the executor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mtp_plugin.hosts.embedded.models import LoadedModel
from mtp_plugin.infer import Thinking, decode
from mtp_plugin.requests.detokenizer import Tokenizer
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.seeds import ENGINE_SEED

WITHOUT_END = SamplingParams(max_new_tokens=sys.maxsize, ignore_eos=True)
"""Greedy decoding up to the maximum length."""

TRANSFORMERS_ATTENTION = "sdpa"
"""The attention implementation of transformers that the reference uses."""


@contextmanager
def transformers_attention(model: LoadedModel) -> Iterator[None]:
    """Run the model with `TRANSFORMERS_ATTENTION`, and restore its own attention on exit."""
    former: Any = model.target.config._attn_implementation
    model.set_attn_implementation(TRANSFORMERS_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(former)


class Oracle:
    """The target model as the reference; it must run under :func:`transformers_attention`."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self.device: torch.device = next(model.lm_head.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and logits."""
        return next(self._model.lm_head.parameters()).dtype

    @property
    def end_ids(self) -> tuple[int, ...]:
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
        on_token: Callable[[int], None] = lambda _: None,
    ) -> list[int]:
        """Return ``emitted`` continued by non-speculative decoding.

        Args:
            limit: maximum number of output tokens, including ``emitted``.
            params: request options; default: greedy, up to the limit.
            number: request number; determines the seed if ``params`` has none.
            engine_seed: seed for requests without one.
            tokenizer: decodes the output; required for stop strings.
            thinking: the thinking tags; required for a thinking budget.
            on_token: called with the number of output tokens after each of them.
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
            on_token=on_token,
        ).token_ids

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], num_rows: int) -> torch.Tensor:
        """Return the logits [num_rows, V] float32 of the last ``num_rows`` tokens."""
        ids = torch.tensor([list(token_ids)], device=self.device)
        decoder: Any = self._model.target.get_decoder()
        states = decoder(input_ids=ids, use_cache=False).last_hidden_state[0, -num_rows:]
        # the unfused head, as in decoding
        head: Any = self._model.target.get_output_embeddings()
        logits: torch.Tensor = head(states)
        return logits.float()
