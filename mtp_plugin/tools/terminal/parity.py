"""``parity``: compare the executor's output with non-speculative decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mtp_plugin.config import LLMConfig, MTPDecodingConfig
from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.hosts.embedded.models import LoadedModel
from mtp_plugin.requests.detokenizer import Tokenizer
from mtp_plugin.requests.tokenizer import encode
from mtp_plugin.speculative.host import DecodingOptions
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats
from mtp_plugin.speculative.verification import label_of
from mtp_plugin.tools.parity import (
    Comparison,
    Divergence,
    Drafting,
    LogprobComparison,
    LogprobMismatch,
    Oracle,
    TieRule,
    transformers_attention,
)
from mtp_plugin.tools.terminal.console import DIFFERENT, OK
from mtp_plugin.tools.terminal.decoding import BatchRun, PromptResult, merged, run_batch
from mtp_plugin.tools.terminal.parity_options import EAGLE, VANILLA, combinations
from mtp_plugin.tools.terminal.plain_decoding import (
    KnownTexts,
    PlainDecoding,
    logprobs_mode_of,
    resampling_method,
    thinking_of,
)

NO_DRAFTS = "none"
RANDOM_PROMPTS = 8
LONGEST_RANDOM_PROMPT = 48


@dataclass(frozen=True)
class Variant:
    """One configuration of the executor."""

    worker: str
    k: int
    batch_size: int

    @property
    def drafts(self) -> str:
        """Name of worker and draft length."""
        return self.worker if self.worker == NO_DRAFTS else f"{self.worker} K={self.k}"

    @property
    def label(self) -> str:
        """Name of worker, draft length and batch size."""
        return f"{self.drafts} batch {self.batch_size}"


@dataclass(frozen=True)
class Outcome:
    """A variant's outputs compared with non-speculative decoding."""

    variant: Variant
    results: list[PromptResult]
    verdicts: list[Comparison]
    plain: Outcome | None = None
    """The first prompts, decoded again with such drafts but without the executor; None: the drafts
    depend on more than the request."""
    logprobs: list[LogprobComparison] | None = None
    """Comparison per prompt with the target's; None: not requested."""

    @property
    def num_tokens(self) -> int:
        """Number of output tokens."""
        return sum(len(result.token_ids) for result in self.results)

    @property
    def num_equal(self) -> int:
        """Number of tokens before the first difference of their prompt, including ties."""
        return sum(verdict.num_equal for verdict in self.verdicts)

    @property
    def num_ties(self) -> int:
        """Number of differences that rounding explains."""
        return sum(len(verdict.ties) for verdict in self.verdicts)

    @property
    def differences(self) -> list[tuple[int, Divergence]]:
        """(Prompt number from 1, its first difference that is not a tie)."""
        verdicts = enumerate(self.verdicts, 1)
        return [(n, v.difference) for n, v in verdicts if v.difference is not None]

    @property
    def mismatches(self) -> list[tuple[int, LogprobMismatch]]:
        """(Prompt number from 1, log-probability that differs from the target's)."""
        return [
            (n, one) for n, found in enumerate(self.logprobs or (), 1) for one in found.mismatches
        ]

    @property
    def ties(self) -> list[tuple[int, Divergence]]:
        """(Prompt number from 1, tie)."""
        return [(n, tie) for n, verdict in enumerate(self.verdicts, 1) for tie in verdict.ties]

    @property
    def acceptance(self) -> AcceptanceStats:
        """Acceptance statistics of all prompts."""
        return merged(self.results)


@dataclass(frozen=True)
class ParityReport:
    """Results of ``parity``."""

    config: LLMConfig
    params: SamplingParams
    device: str
    dtype: str
    tie_ulps: float
    outcomes: list[Outcome]
    tokenizer: Tokenizer | None

    @property
    def exit_code(self) -> int:
        """`DIFFERENT` if an output differs from non-speculative decoding."""
        found = (*self.outcomes, *self.plain)
        return DIFFERENT if any(one.differences or one.mismatches for one in found) else OK

    @property
    def plain(self) -> list[Outcome]:
        """The distinct outcomes with drafts but without the executor."""
        return list({id(o.plain): o.plain for o in self.outcomes if o.plain is not None}.values())


# --- what runs ---


def variants_of(
    settings: LLMConfig,
    num_mtp_layers: int,
    *,
    workers: Sequence[str] = (),
    ks: Sequence[int] = (),
    batch_sizes: Sequence[int] = (),
) -> list[tuple[Variant, LLMConfig]]:
    """Return every combination with its config; ``settings`` has the defaults.

    Raises:
        ConfigError: the checkpoint cannot run a combination.
    """
    configs = combinations(
        settings, num_mtp_layers, workers=workers, ks=ks, batch_sizes=batch_sizes
    )
    return [(_variant(config), config) for config in configs]


def _variant(config: LLMConfig) -> Variant:
    speculative = config.speculative_config
    if speculative is None:
        return Variant(NO_DRAFTS, 0, config.max_batch_size)
    if not isinstance(speculative, MTPDecodingConfig):
        return Variant(speculative.decoding_type, 0, config.max_batch_size)
    worker = VANILLA if speculative.use_mtp_vanilla else EAGLE
    return Variant(worker, speculative.draft_len, config.max_batch_size)


def run_parity(
    variants: Sequence[tuple[Variant, LLMConfig]],
    texts: Sequence[str],
    params: SamplingParams,
    *,
    num_prompts: int | None,
    seed: int,
    tie_ulps: float,
    on_progress: Callable[[str], None],
) -> ParityReport:
    """Run the variants over the same prompts with one model, and compare each.

    Raises:
        MTPPluginError: the checkpoint, config, a prompt or the tolerance is invalid.
    """
    TieRule(torch.float32, tie_ulps)  # validates the tolerance before weights are loaded
    for _, config in variants:
        expect_same_text("parity", config, params)
    model: LoadedModel | None = None
    tokenizer: Any = None
    prompts: list[list[int]] = []
    decoded: dict[int, tuple[BatchRun, int]] = {}
    # the variant with the most draft layers loads the model for all
    for index in sorted(range(len(variants)), key=lambda i: -_num_draft_layers(variants[i][0])):
        variant, config = variants[index]
        progress = on_progress if model is None else None
        with LLM(config, model=model, tokenizer=tokenizer, on_progress=progress) as llm:
            model, tokenizer = llm.model, llm.tokenizer
            _expect_comparable(config, params, Oracle(model).dtype)
            if not prompts:
                vocab = model.facts.vocab_size
                prompts = make_prompts(texts, tokenizer, vocab, num_prompts, seed)
            on_progress(f"{variant.label}: {len(prompts)} prompts")
            decoded[index] = run_batch(llm, prompts, params), llm.max_seq_len
        # free its KV cache before the next one is allocated
        del llm
    if model is None:
        raise ConfigError("parity: expected at least one variant to run")
    has_logprobs = not (params.logprobs is None and params.prompt_logprobs is None)
    outcomes = []
    known: dict[int, KnownTexts] = {}
    alike: dict[tuple[str, int], Outcome] = {}
    with transformers_attention(model):
        for index, (variant, config) in enumerate(variants):
            on_progress(f"{variant.label}: target-only decoding")
            run, max_seq_len = decoded[index]
            results = run.results
            seed_of_engine = config.engine_seed
            plain = PlainDecoding(
                model,
                run.params,
                max_seq_len,
                tokenizer,
                engine_seed=seed_of_engine,
                thinking=thinking_of(config, tokenizer),
                known=known.setdefault(seed_of_engine, {}),
            )
            verdicts = plain.verdicts(results, tie_ulps, on_progress)
            drafting = Drafting.of(config, model, params, plain.thinking)
            key = (variant.worker, variant.k)
            if isinstance(drafting, Drafting) and key not in alike:
                on_progress(f"{variant.drafts}: the same without the executor")
                again = plain.with_drafts(results, drafting)
                alike[key] = Outcome(variant, again, plain.verdicts(again, tie_ulps))
            logprobs = None
            if has_logprobs:
                logprobs = plain.logprobs(results, logprobs_mode_of(config), tie_ulps)
            outcomes.append(Outcome(variant, results, verdicts, alike.get(key), logprobs))
    weight = next(model.lm_head.parameters())
    return ParityReport(
        config=variants[0][1],
        params=params,
        device=str(weight.device),
        dtype=str(weight.dtype).removeprefix("torch."),
        tie_ulps=tie_ulps,
        outcomes=outcomes,
        tokenizer=tokenizer,
    )


def expect_same_text(command: str, config: LLMConfig, params: SamplingParams) -> None:
    """Refuse a config or request whose output differs from non-speculative decoding by design.

    Args:
        command: name of the command for the message.

    Raises:
        ConfigError: the output would differ.
    """
    method = resampling_method(config, params)
    if method is not None:
        raise ConfigError(
            f"{command}: {method} verification samples other outputs by design; expected a "
            "config that verifies sampled tokens by coupled first, or greedy decoding"
        )
    speculative = config.speculative_config
    if not isinstance(speculative, MTPDecodingConfig):
        return
    label = label_of(
        DecodingOptions.read(speculative, defer_thinking_end=True), params.requested_options()
    )
    if label is not None:
        raise ConfigError(
            f"{command}: {label.name} acceptance changes the text by design; expected a config or "
            "a request with strict acceptance"
        )


def _expect_comparable(config: LLMConfig, params: SamplingParams, dtype: torch.dtype) -> None:
    """Check that rounding cannot change the truncation of processed log-probabilities.

    Raises:
        ConfigError: it may: the options truncate, and the dtype is not float32.
    """
    cuts = [name for name in ("top_k", "top_p", "min_p") if name in params.requested_options()]
    is_processed = params.logprobs is not None and logprobs_mode_of(config) == "processed"
    if is_processed and cuts and dtype is not torch.float32:
        raise ConfigError(
            f"parity: logprobs={params.logprobs} of what {cuts[0]} leaves: expected float32, got "
            f"{str(dtype).removeprefix('torch.')}, whose rounding may move the cut"
        )


def _num_draft_layers(variant: Variant) -> int:
    return variant.k if variant.worker == VANILLA else min(variant.k, 1)


def make_prompts(
    texts: Sequence[str], tokenizer: Any, vocab_size: int, count: int | None, seed: int
) -> list[list[int]]:
    """Return prompts as token ids: the texts and random parts of them, or random ids."""
    rng = random.Random(seed)
    if tokenizer is None or not texts:
        return [
            [rng.randrange(vocab_size) for _ in range(rng.randint(1, LONGEST_RANDOM_PROMPT))]
            for _ in range(count or RANDOM_PROMPTS)
        ]
    whole = [encode(tokenizer, text) for text in texts]
    prompts = whole[:count]
    while count is not None and len(prompts) < count:
        ids = rng.choice(whole)
        end = rng.randint(1, len(ids))
        prompts.append(ids[rng.randrange(end) : end])
    return prompts
