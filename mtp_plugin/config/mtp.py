"""``speculative_config.mtp``: how drafts are sampled, verified and gated."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from mtp_plugin.config.messages import join
from mtp_plugin.config.schema import ConfigModel, Problem
from mtp_plugin.config.values import (
    MAX_DRAFT_LEN,
    MAX_ENGINE_SEED,
    MAX_SEED,
    DraftVocab,
    PositiveInt,
    SyntheticAcceptance,
    Text,
    ThinkingEnd,
    Verification,
)
from mtp_plugin.errors import ConfigError, expect_int
from mtp_plugin.verifications import METHODS, VerificationMethod, codes, drafts_of


def _each(names: Iterable[str], text_of: Callable[[VerificationMethod], str]) -> str:
    return "; ".join(f"{name}: {text_of(METHODS[name])}" for name in names)


_RELAXED_REMOVED = (
    "it was removed; leave it out, and limit relaxed acceptance with relaxed_topk and relaxed_delta"
)


class MTPPluginOptions(ConfigModel):
    """``speculative_config.mtp``: options that TensorRT-LLM does not have."""

    renamed: ClassVar[Mapping[str, str]] = {
        "mtp": "write the options themselves, without mtp around them",
        "relaxed_run_limit": _RELAXED_REMOVED,
        "relaxed_entropy_scale": _RELAXED_REMOVED,
    }

    verification: Verification = Field(
        default="coupled",
        description=f"how drafts are verified; {_each(METHODS, lambda each: each.description)}; or "
        "the name of a registered method; a list: methods that requests may choose (not synthetic)"
        ", the first is the default",
    )
    synthetic_acceptance: SyntheticAcceptance | None = Field(
        default=None,
        description="synthetic: list: share of steps that accept drafts 1..i; number: rate of each",
    )
    synthetic_seed: int = Field(
        default=0, ge=0, le=MAX_SEED, description="synthetic: seed of the random numbers"
    )
    draft_sampling: Literal["coupled", "plain", "greedy"] | None = Field(
        default=None,
        description="how drafts of sampled requests are sampled; null: the default of their "
        f"verification method ({_each(codes(), lambda each: each.drafts[0])}); greedy: for all "
        "requests",
    )
    seed: int = Field(
        default=0,
        ge=0,
        le=MAX_ENGINE_SEED,
        description="combined with the request number into the seed of requests without one",
    )
    logprobs_mode: Literal["raw", "processed"] = Field(
        default="raw",
        description="logits from which log-probabilities of output tokens are computed; raw: the "
        "target's logits; processed: after bias, masks, penalties, temperature and truncation, for "
        "greedy requests at temperature 1 without truncation; prompts always use raw",
    )
    draft_window: Literal["exact", "trtllm"] = Field(
        default="exact",
        description="rows a generation feeds to vanilla layers: K+1 (exact) or K (trtllm)",
    )
    chain: Literal["output", "target_shift", "none"] | None = Field(
        default=None,
        description="states that depth d >= 2 of vanilla reads; null: from the model family",
    )
    draft_vocab: DraftVocab | None = Field(
        default=None,
        description="token ids that may be drafted; N: 0..N-1, in the order of byte-pair merges "
        "roughly the most frequent; path: of a file of ids (JSON, an id or a range a line, .npy "
        "or SGLang's .pt), relative: from the YAML file's folder; null: all",
    )
    keep_warm: bool = Field(
        default=True,
        description="keep filling the draft KV while fewer than max_draft_len are drafted",
    )
    adaptive_draft_len: bool = Field(
        default=False,
        description="draft 0 to max_draft_len tokens per step, whichever gives most tokens per "
        "second by measured step times and live acceptance; needs keep_warm",
    )
    gate_margin: float = Field(
        default=0.1,
        ge=0,
        le=MAX_DRAFT_LEN,
        description="margin above the threshold from which the gate drafts more again",
    )
    gate_probe_interval: PositiveInt = Field(
        default=256,
        description="steps until the gate tries to draft more again; each failed try doubles them",
    )
    gate_max_probe_interval: PositiveInt = Field(
        default=4096, description="maximum number of steps between two tries of the gate"
    )
    kernels: Literal["auto", "triton", "reference"] = Field(
        default="auto",
        description="implementation of the ops; auto: Triton where the device has it",
    )
    check_metadata: bool = Field(
        default=False, description="debug: rebuild the attention metadata every step and compare"
    )
    begin_thinking_phase: Text | None = Field(
        default=None, description="text of the token that begins the thinking phase"
    )
    end_thinking_phase: Text | None = Field(
        default=None, description="text of the token that ends the thinking phase"
    )
    thinking_end: ThinkingEnd | None = Field(
        default=None,
        description="token ids that end the thinking phase when the budget is spent; null: those "
        "of end_thinking_phase",
    )

    @override
    def _problems(self) -> Iterator[Problem]:
        yield from self._verification_problems()
        yield from self._synthetic_problems()
        if self.begin_thinking_phase and self.begin_thinking_phase == self.end_thinking_phase:
            yield (
                "end_thinking_phase",
                f"must differ from begin_thinking_phase, both are {self.end_thinking_phase!r}",
            )
        if self.adaptive_draft_len and not self.keep_warm:
            yield (
                "adaptive_draft_len",
                "drafts again after steps without drafts; expected keep_warm: true with it",
            )
        if self.gate_max_probe_interval < self.gate_probe_interval:
            yield (
                "gate_max_probe_interval",
                f"expected at least gate_probe_interval ({self.gate_probe_interval}), got "
                f"{self.gate_max_probe_interval}",
            )

    def _verification_problems(self) -> Iterator[Problem]:
        methods = self.verifications
        for method in sorted(method for method, count in Counter(methods).items() if count > 1):
            yield "verification", f"expected each at most once, got {method!r} twice"
        kinds = (kind for method in methods for kind in drafts_of(method))
        allowed = list(dict.fromkeys(kinds))
        if self.draft_sampling not in (None, *allowed):
            yield (
                "draft_sampling",
                f"{self.draft_sampling!r} cannot be verified by {join(methods)} "
                f"verification; expected one of {', '.join(allowed)}",
            )

    def _synthetic_problems(self) -> Iterator[Problem]:
        rates = self.synthetic_acceptance
        if not self.is_synthetic:
            yield from self.ignored(
                "synthetic_acceptance", "synthetic_seed", needs="verification: synthetic"
            )
        elif rates is None:
            yield (
                "synthetic_acceptance",
                "expected a rate or a list of rates with verification: synthetic, got null",
            )
        elif isinstance(rates, tuple):
            for i, (before, rate) in enumerate(itertools.pairwise(rates), 1):
                if rate > before:
                    yield (
                        f"synthetic_acceptance.{i}",
                        f"expected at most the rate before it ({before}), got {rate}",
                    )

    @property
    def verifications(self) -> tuple[str, ...]:
        """The methods that requests may choose; the first is the default."""
        listed = self.verification
        return (listed,) if isinstance(listed, str) else listed

    def drafts_of(self, verification: str) -> str:
        """The default of a request's ``draft_sampling`` with one of `verifications`."""
        allowed = drafts_of(verification)
        return self.draft_sampling if self.draft_sampling in allowed else allowed[0]

    @property
    def is_synthetic(self) -> bool:
        """Whether random numbers accept the drafts, so that the output is not the model's."""
        return self.verification == "synthetic"

    def acceptance_shares(self, draft_len: int) -> tuple[float, ...]:
        """Synthetic verification: the share of steps that accept drafts 1..i, for i = 1..K.

        Raises:
            ConfigError: no rates, or not one per draft.
        """
        draft_len = expect_int("draft_len", draft_len, 0, error=ConfigError)
        rates = self.synthetic_acceptance
        if isinstance(rates, tuple) and len(rates) == draft_len:
            return rates
        if rates is None or isinstance(rates, tuple):
            raise ConfigError(f"synthetic_acceptance: {rates_problem(draft_len, rates)}")
        return tuple(rates**i for i in range(1, draft_len + 1))


def rates_problem(draft_len: int, rates: tuple[float, ...] | None) -> str:
    """What is wrong with rates that are not one per draft."""
    return (
        f"expected {draft_len} {'rate' if draft_len == 1 else 'rates'}, one per draft "
        f"(max_draft_len), got {'null' if rates is None else len(rates)}"
    )
