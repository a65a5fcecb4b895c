"""Non-speculative decoding of one prompt: the reference for speculative decoding."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from typing_extensions import TypeIs

from mtp_plugin.errors import RequestError
from mtp_plugin.infer.inferencer import BasicInferencer
from mtp_plugin.infer.kv_cache import DynamicKVCache
from mtp_plugin.infer.language_model import LanguageModel, TransformersLanguageModel
from mtp_plugin.infer.logprobs import ReferenceLogprobs, logprobs_of
from mtp_plugin.infer.sample_strategy import RequestSampleStrategy
from mtp_plugin.infer.sampling_rule import NO_TOKEN, SamplingRule
from mtp_plugin.infer.thinking import Thinking
from mtp_plugin.requests.detokenizer import RequestText
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.seeds import ENGINE_SEED
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.requests.stopping import StopRule
from mtp_plugin.requests.tokenizer import stop_token

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LogprobsMode: TypeAlias = Literal["raw", "processed"]


@dataclass(frozen=True)
class Decoded:
    """Result of decoding one prompt."""

    token_ids: list[int]
    """Output tokens, without the prompt."""
    finish_reason: FinishReason
    text: str | None = None
    """Output text; None without a tokenizer."""
    logprobs: list[ReferenceLogprobs] | None = None
    """Of every output token; None: not requested."""
    prompt_logprobs: list[ReferenceLogprobs | None] | None = None
    """Of every prompt token (None for the first); None: not requested."""


class Continuation:
    """State of one request: sampling rule, stop rule, output so far and its log-probabilities.

    Args:
        prompt_ids: at least one token.
        params: the request options; of the draft options only the draft length is used.
        number: request number; determines the seed if ``params`` has none.
        end_ids: EOS token ids of the model.
        thinking: the thinking tags; required for a thinking budget.
        max_seq_len: maximum number of tokens with the prompt; None: limited by ``params`` alone.
        tokenizer: decodes the output; required for stop strings. Those that are special tokens are
            found with its ``encode``.
        engine_seed: seed for requests without one.
        emitted: output tokens generated earlier, treated as if they were chosen here.
        logprobs_mode: compute log-probabilities of output tokens from ``raw`` or ``processed``
            logits; those of the prompt are always raw.

    Raises:
        RequestError: the prompt is empty, or an option is not supported.
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
                f"logprobs_mode={params.logprobs_mode!r}: expected {logprobs_mode!r}, the "
                f"mode of this decoder"
            )
        stop_tokens: dict[int, str] = {}
        for word in params.stop if hasattr(tokenizer, "encode") else ():
            skips = params.skip_special_tokens
            token = stop_token(tokenizer, word, skip_special_tokens=skips)
            if token is not None:
                stop_tokens.setdefault(token, word)
        if stop_tokens:
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *stop_tokens))
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
                skip_special_tokens=params.skip_special_tokens,
                stop_tokens=stop_tokens,
            )
        self._stop = StopRule.of(
            params,
            prompt_len=self.prompt_len,
            max_seq_len=sys.maxsize if max_seq_len is None else max_seq_len,
            end_ids=end_ids,
            watch=None if self._text is None else self._text.push,
        )
        self._logprobs_mode = logprobs_mode
        self._logprobs: list[ReferenceLogprobs] = []
        self._prompt_logprobs: list[ReferenceLogprobs | None] = [None]
        self.tokens = [*prompt_ids, *emitted]
        self.finish_reason = self._stop.check(emitted, self.prompt_len, tokens=prompt_ids).reason
        if self.finish_reason is None and len(self.tokens) >= self._stop.max_length:
            self.finish_reason = FinishReason.LENGTH

    @property
    def output(self) -> list[int]:
        """The output tokens."""
        return self.tokens[self.prompt_len :]

    def extend(self, run: Sequence[int], rows: torch.Tensor, num_drafts: int = 0) -> None:
        """Append chosen tokens up to the first that stops the request.

        Args:
            run: token ids; ``NO_TOKEN`` for a row without a usable value, which is an error.
            rows: [len(run), V], the raw logits of each token.
            num_drafts: number of leading tokens that are accepted drafts.
        """
        usable = run[: run.index(NO_TOKEN)] if NO_TOKEN in run else run
        ending = self._stop.check(
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

    def add_prompt_logprobs(self, rows: torch.Tensor) -> None:
        """Add the prompt's log-probabilities from its raw logits [P or more, V], if requested."""
        if self.params.prompt_logprobs is not None:
            self._prompt_logprobs += [
                logprobs_of(row, token, self.params.prompt_logprobs)
                for token, row in zip(self.tokens[1 : self.prompt_len], rows, strict=False)
            ]

    def decoded(self) -> Decoded:
        """Return the result.

        Raises:
            RequestError: the request has not finished.
        """
        if self.finish_reason is None:
            raise RequestError(f"the request has not finished after {len(self.output)} tokens")
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
    on_token: Callable[[int], None] = lambda _: None,
) -> Decoded:
    """Decode a prompt without speculation; arguments and errors as for `Continuation`.

    Args:
        model: a language model, or a transformers causal language model.
        on_token: called with the number of output tokens after each of them.
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
    text.add_prompt_logprobs(rows[0])
    while text.finish_reason is None:
        text.extend([int(chosen)], rows[0, -1:])
        on_token(len(text.output))
        if text.finish_reason is None:
            chosen, rows = inferencer.decode(chosen, cache, 1, strategy)
    return text.decoded()


def as_language_model(model: LanguageModel | PreTrainedModel) -> LanguageModel:
    """Wrap a transformers model; return other models unchanged."""
    return TransformersLanguageModel(model) if _is_of_transformers(model) else model


def device_of(model: LanguageModel | PreTrainedModel) -> torch.device | None:
    """Return the device of the model's query tokens; None: the CPU."""
    return model.device if _is_of_transformers(model) else None


def _is_of_transformers(model: LanguageModel | PreTrainedModel) -> TypeIs[PreTrainedModel]:
    """Check without importing transformers."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)
