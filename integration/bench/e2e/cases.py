"""Cases of the benchmark of whole steps, and the kinds of requests that a case compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from integration.bench.case import BenchmarkError
from mtp_plugin.errors import expect
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.verifications import METHODS

EAGLE, VANILLA, OFF = "eagle", "vanilla", "off"
GREEDY, SAMPLED = "greedy", "sampled"


@dataclass(frozen=True)
class Synthetic:
    """Configuration of synthetic acceptance."""

    rates: tuple[float, ...]
    """Entry i: share of steps that accept drafts 1..i+1; a single rate applies to every draft."""
    seed: int

    def shares(self, k: int) -> tuple[float, ...]:
        """Return the share of steps that accept drafts 1..i, for i = 1..k.

        Raises:
            BenchmarkError: there are fewer shares than drafts.
        """
        if len(self.rates) == 1:
            return tuple(self.rates[0] ** i for i in range(1, k + 1))
        expect(
            len(self.rates) >= k,
            BenchmarkError,
            f"--acceptance: expected one rate, or {k} of them, got {len(self.rates)}",
        )
        return self.rates[:k]


@dataclass(frozen=True)
class E2ECase:
    """One configuration of a batch."""

    batch: int
    worker: str = OFF
    k: int = 0

    @property
    def is_off(self) -> bool:
        """Whether MTP is off."""
        return self.worker == OFF

    @property
    def label(self) -> str:
        way = OFF if self.is_off else f"{self.worker}-k{self.k}"
        return f"{way}/b{self.batch}"


@dataclass(frozen=True)
class RequestKind:
    """Options of every request of a batch, or of one of them."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    of_one: bool = False
    """The options apply to the first request; all others are greedy."""

    @property
    def verification(self) -> str:
        return str(self.options.get("verification", "coupled"))

    @property
    def keeps_output(self) -> bool:
        """Whether outputs are those of the same seeds without drafts."""
        return METHODS[self.verification].keeps_output

    def params(self, batch: int, num_tokens: int, seed: int = 0) -> list[SamplingParams]:
        """Return the options of every request, each with its own seed."""
        always: dict[str, Any] = {"max_new_tokens": num_tokens, "ignore_eos": True}
        count = (1 if self.of_one else batch) if self.options else 0
        others = [SamplingParams(**always)] * (batch - count)
        return [SamplingParams(**always, seed=seed + n, **self.options) for n in range(count)] + (
            others
        )


_SAMPLED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
_METHODS = {
    "coupled": {"verification": "coupled"},
    "rejection": {"verification": "rejection"},
    "block": {"verification": "block"},
    "greedy-drafts": {"verification": "coupled", "draft_sampling": "greedy"},
}
KINDS: Mapping[str, RequestKind] = {
    kind.name: kind
    for kind in (
        RequestKind(GREEDY),
        RequestKind(SAMPLED, _SAMPLED),
        RequestKind("sampled-logprob", {**_SAMPLED, "logprobs": 0}),
        RequestKind("sampled-top5", {**_SAMPLED, "logprobs": 5}),
        RequestKind("sampled-penalty", {**_SAMPLED, "repetition_penalty": 1.1}),
        RequestKind("one-sampled", _SAMPLED, of_one=True),
        *(
            RequestKind(f"{name}-t{temperature}", {"temperature": temperature, **options})
            for temperature in (0.6, 1.0)
            for name, options in _METHODS.items()
        ),
    )
}
"""By name."""


def check_kinds(names: Sequence[str], *, only_with_output: bool = False) -> None:
    """Refuse unknown names.

    Args:
        only_with_output: also refuse kinds whose outputs depend on the drafts or on other requests.

    Raises:
        BenchmarkError: there is one.
    """
    able = [
        name
        for name, kind in KINDS.items()
        if not only_with_output or (kind.keeps_output and not kind.of_one)
    ]
    odd = [name for name in names if name not in able]
    expect(not odd, BenchmarkError, f"--ask: expected some of {', '.join(able)}, got {odd[:1]}")


@dataclass(frozen=True)
class E2EOptions:
    """Options of the command line."""

    batches: tuple[int, ...] = (1, 8, 32, 128)
    ks: tuple[int, ...] = (1, 3)
    workers: tuple[str, ...] = (EAGLE, VANILLA)
    isl: int = 128
    """Tokens of each prompt."""
    osl: int = 256
    """Output tokens of each request."""
    seed: int = 0
    acceptance: tuple[float, ...] | None = None
    """Synthetic acceptance; None: real with trained weights, else 0.8 for each draft."""
    draft_vocab: int | None = None
    """Size of the draft vocabulary; None: all tokens."""
    graphs: bool = True
    kinds: tuple[str, ...] = (GREEDY,)
    """Kinds of requests, names of `KINDS`; the first one is the reference of step times."""

    def synthetic(self, *, is_trained: bool) -> Synthetic | None:
        """Return the synthetic acceptance; None: it is real."""
        if self.acceptance is None and is_trained:
            return None
        return Synthetic(self.acceptance or (0.8,), self.seed)

    def cases(self, num_mtp_layers: int) -> list[E2ECase]:
        """Return the cases that the checkpoint can run, each batch size without MTP first."""
        ways = [(worker, k) for worker in self.workers for k in self.ks]
        able = [(worker, k) for worker, k in ways if worker != VANILLA or k <= num_mtp_layers]
        return [
            case
            for batch in self.batches
            for case in (E2ECase(batch), *(E2ECase(batch, *way) for way in able))
        ]

    def kinds_of(self, case: E2ECase) -> list[RequestKind]:
        """Return the kinds to run; without MTP, greedy requests alone."""
        kinds = [KINDS[name] for name in self.kinds]
        if case.is_off:
            kinds = kinds[:1]
        return [kind for kind in kinds if case.batch > 1 or not kind.of_one]
