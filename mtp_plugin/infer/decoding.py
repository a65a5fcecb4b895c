"""Decoding of one prompt by the target alone: what speculative decoding has to reproduce."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from typing_extensions import TypeIs

from mtp_plugin.errors import RequestError
from mtp_plugin.infer.inferencer import BasicInferencer
from mtp_plugin.infer.kv_cache import DynamicKVCache
from mtp_plugin.infer.language_model import LanguageModel, TransformersLanguageModel
from mtp_plugin.infer.logprobs import Logprobs, logprobs_of
from mtp_plugin.infer.sample_strategy import RequestSampleStrategy
from mtp_plugin.infer.sampling_rule import NO_TOKEN, SamplingRule
from mtp_plugin.infer.thinking import Thinking
from mtp_plugin.requests.detokenizer import RequestText
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.seeds import ENGINE_SEED
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.requests.stopping import StopRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LogprobsMode: TypeAlias = Literal["raw", "processed"]


@dataclass(frozen=True)
class Decoded:
    """What one prompt was continued with."""

    token_ids: list[int]
    """Emitted tokens, without the prompt."""
    finish_reason: FinishReason
    text: str | None = None
    """None: no tokenizer was given."""
    logprobs: list[Logprobs] | None = None
    """Of every token chosen; None: not asked for."""
    prompt_logprobs: list[Logprobs | None] | None = None
    """Of every prompt token but the first, which has None; None: not asked for."""


class Continuation:
    """A prompt and what follows it so far: how tokens are chosen, when they end, what is told.

    Args:
        prompt_ids: at least one token.
        params: the options; of those of drafts only how many a step may have counts.
        number: of the request; decides its seed where it gives none.
        end_ids: of the model.
        thinking: its ids; asked for by a budget.
        max_seq_len: tokens at most, prompt included; None: as many as ``params`` ask for.
        tokenizer: decodes the text; asked for by stop strings.
        engine_seed: of requests without a seed.
        emitted: tokens of the output that stand already, as if they had been chosen here.
        logprobs_mode: log-probabilities of tokens are of the ``raw`` logits, or of what tokens were
            chosen from (``processed``); those of the prompt are raw.

    Raises:
        RequestError: an empty prompt, or options that are not given here.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        number: int = 0,
        end_ids: Collection[int] = (),
        thinking: Thinking | None = None,
        max_seq_len: int | None = None,
        tokenizer: Any = None,
        engine_seed: int = ENGINE_SEED,
        emitted: Sequence[int] = (),
        logprobs_mode: LogprobsMode = "raw",
    ) -> None:
        if not prompt_ids:
            raise RequestError("prompt_ids: expected at least one token, got none")
        if params.stop and tokenizer is None:
            raise RequestError(f"stop={params.stop!r}: expected a tokenizer, got none")
        if params.logprobs is not None and params.logprobs_mode not in (None, logprobs_mode):
            raise RequestError(
                f"logprobs_mode={params.logprobs_mode!r}: expected {logprobs_mode!r}, of which "
                f"log-probabilities are told here"
            )
        self.params = params
        self.rule = SamplingRule(
            params,
            prompt_ids,
            number=number,
            end_ids=end_ids,
            thinking=thinking,
            engine_seed=engine_seed,
        )
        self.prompt_len = len(prompt_ids)
        self._text = None
        if tokenizer is not None:
            self._text = RequestText(
                tokenizer,
                params.stop,
                params.min_tokens,
                include_stop=params.include_stop_str_in_output,
            )
        self._stop = StopRule.of(
            params,
            prompt_len=self.prompt_len,
            max_seq_len=sys.maxsize if max_seq_len is None else max_seq_len,
            end_ids=end_ids,
            watch=None if self._text is None else self._text.push,
        )
        self._logprobs_mode = logprobs_mode
        self._logprobs: list[Logprobs] = []
        self._prompt_logprobs: list[Logprobs | None] = [None]
        self.tokens = [*prompt_ids, *emitted]
        self.finish_reason = self._stop.judge(emitted, self.prompt_len, tokens=prompt_ids).reason
        if self.finish_reason is None and len(self.tokens) >= self._stop.max_length:
            self.finish_reason = FinishReason.LENGTH

    @property
    def output(self) -> list[int]:
        """The tokens behind the prompt."""
        return self.tokens[self.prompt_len :]

    def extend(self, run: Sequence[int], rows: torch.Tensor, num_drafts: int = 0) -> None:
        """Append chosen tokens up to the first that ends the text.

        Args:
            run: ``NO_TOKEN`` where a row had none to choose, which is an error and ends the text.
            rows: [len(run), V], the raw logits of each.
            num_drafts: so many of them were drafts.
        """
        usable = run[: run.index(NO_TOKEN)] if NO_TOKEN in run else run
        ending = self._stop.judge(
            usable, len(self.tokens), num_drafts=num_drafts, tokens=self.tokens
        )
        before = self.output
        self.tokens += usable[: ending.length]
        self.finish_reason = ending.reason
        if ending.reason is None and len(usable) < len(run):
            self.finish_reason = FinishReason.ERROR
        if self.params.logprobs is not None:
            for place, token in enumerate(usable[: ending.length]):
                row = rows[place]
                if self._logprobs_mode == "processed":
                    row = self.rule.scores(row, [*before, *usable[:place]])
                self._logprobs.append(logprobs_of(row, token, self.params.logprobs))

    def tell_prompt(self, rows: torch.Tensor) -> None:
        """Take the prompt's log-probabilities of its raw logits [P or more, V]."""
        if self.params.prompt_logprobs is not None:
            self._prompt_logprobs += [
                logprobs_of(row, token, self.params.prompt_logprobs)
                for token, row in zip(self.tokens[1 : self.prompt_len], rows, strict=False)
            ]

    def decoded(self) -> Decoded:
        """What came of it.

        Raises:
            RequestError: it has not ended.
        """
        if self.finish_reason is None:
            raise RequestError(f"the text has not ended behind {len(self.output)} tokens")
        return Decoded(
            self.output,
            self.finish_reason,
            None if self._text is None else self._text.full_text,
            None if self.params.logprobs is None else self._logprobs,
            None if self.params.prompt_logprobs is None else self._prompt_logprobs,
        )


def decode(
    model: LanguageModel | PreTrainedModel,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    number: int = 0,
    end_ids: Collection[int] = (),
    thinking: Thinking | None = None,
    max_seq_len: int | None = None,
    tokenizer: Any = None,
    engine_seed: int = ENGINE_SEED,
    emitted: Sequence[int] = (),
    logprobs_mode: LogprobsMode = "raw",
) -> Decoded:
    """The continuation of a prompt by the target alone; arguments and errors as `Continuation`.

    Args:
        model: a language model, or a transformers causal language model as it is.
    """
    text = Continuation(
        prompt_ids,
        params,
        number=number,
        end_ids=end_ids,
        thinking=thinking,
        max_seq_len=max_seq_len,
        tokenizer=tokenizer,
        engine_seed=engine_seed,
        emitted=emitted,
        logprobs_mode=logprobs_mode,
    )
    if text.finish_reason is not None and params.prompt_logprobs is None:
        return text.decoded()
    inferencer, cache = BasicInferencer(as_language_model(model), ()), DynamicKVCache()
    strategy = RequestSampleStrategy(text.rule, text.output)
    query = torch.tensor([text.tokens], device=device_of(model))
    chosen, rows = inferencer.prefill(query, cache, strategy)
    text.tell_prompt(rows[0])
    while text.finish_reason is None:
        text.extend([int(chosen)], rows[0, -1:])
        if text.finish_reason is None:
            chosen, rows = inferencer.decode(chosen, cache, 1, strategy)
    return text.decoded()


def as_language_model(model: LanguageModel | PreTrainedModel) -> LanguageModel:
    """The model, wrapped where it is of transformers."""
    return TransformersLanguageModel(model) if _is_of_transformers(model) else model


def device_of(model: LanguageModel | PreTrainedModel) -> torch.device | None:
    """Where the model's queries lie; None: on the CPU."""
    return model.device if _is_of_transformers(model) else None


def _is_of_transformers(model: LanguageModel | PreTrainedModel) -> TypeIs[PreTrainedModel]:
    """Where the package is not loaded, no model is of its classes."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)
