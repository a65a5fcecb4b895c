"""Kinds of requests of a batch: greedy, sampled, with logprobs, penalties, verification methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from integration.bench.case import BenchmarkError
from mtp_plugin.errors import expect
from mtp_plugin.requests.options import OPTIONS, SamplingParams
from mtp_plugin.verifications import METHODS

GREEDY, SAMPLED = "greedy", "sampled"
_SAMPLED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


@dataclass(frozen=True)
class RequestKind:
    """Options of every request of a batch, or of one of them."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    of_one: bool = False
    """The options apply to the first request; all others are greedy."""
    speculates: bool = True
    """False: drafts of all requests count as absent."""

    @property
    def is_residual(self) -> bool:
        """Whether outputs keep only the target's distribution, not its tokens for a seed."""
        return not METHODS[self.options.get("verification", "coupled")].keeps_output

    @property
    def num_logprobs(self) -> int | None:
        """Number of top-k logprobs; None: no logprobs."""
        return self.options.get("logprobs")

    def fits(self, batch: int) -> bool:
        """Whether the kind differs from the others at this batch size."""
        return batch > 1 or not self.of_one

    def params(self, batch: int, num_tokens: int, seed: int) -> list[SamplingParams]:
        """Return the options of every request, each with its own seed.

        Args:
            num_tokens: output tokens of each; end tokens are ignored.
        """
        always: dict[str, Any] = {
            "max_new_tokens": num_tokens,
            "ignore_eos": True,
            "speculate": self.speculates,
        }
        asking = batch if self.options else 0
        if self.of_one:
            asking = min(asking, 1)
        drawing = [
            SamplingParams(**always, seed=seed + number, **self.options) for number in range(asking)
        ]
        return drawing + [SamplingParams(**always)] * (batch - asking)

    @property
    def without_drafting(self) -> RequestKind:
        """The same kind for an executor without drafts."""
        kept = {name: value for name, value in self.options.items() if not OPTIONS[name].of_drafts}
        return replace(self, options=kept)

    @property
    def without_drafts(self) -> RequestKind:
        """The same kind with drafts that count as absent."""
        return replace(self, speculates=False)


def _methods(temperature: float) -> list[RequestKind]:
    """Every verification method at a temperature, and greedy drafts verified by ``coupled``."""
    methods = {
        "coupled": {"verification": "coupled"},
        "rejection": {"verification": "rejection"},
        "block": {"verification": "block"},
        "greedy-drafts": {"verification": "coupled", "draft_sampling": "greedy"},
    }
    return [
        RequestKind(f"{name}-t{temperature}", {"temperature": temperature, **options})
        for name, options in methods.items()
    ]


REQUEST_KINDS: Mapping[str, RequestKind] = {
    request_kind.name: request_kind
    for request_kind in (
        RequestKind(GREEDY),
        RequestKind(SAMPLED, _SAMPLED),
        RequestKind("sampled-logprob", {**_SAMPLED, "logprobs": 0}),
        RequestKind("sampled-top5", {**_SAMPLED, "logprobs": 5}),
        RequestKind("sampled-penalty", {**_SAMPLED, "repetition_penalty": 1.1}),
        RequestKind("one-sampled", _SAMPLED, of_one=True),
        *_methods(0.6),
        *_methods(1.0),
    )
}
"""By name."""


def check_kinds(names: Sequence[str], *, is_synthetic: bool = False) -> None:
    """Refuse unknown names, and kinds that cannot be combined with synthetic acceptance.

    Raises:
        BenchmarkError: an unknown or repeated name, or no greedy kind.
    """
    odd = [name for name in names if name not in REQUEST_KINDS]
    expect(
        not odd,
        BenchmarkError,
        f"--ask: expected some of {', '.join(REQUEST_KINDS)}, got {odd[:1]}",
    )
    expect(
        len(set(names)) == len(names),
        BenchmarkError,
        f"--ask: expected every name once, got {','.join(names)}",
    )
    expect(
        GREEDY in names,
        BenchmarkError,
        f"--ask: expected greedy among them, which others are compared with, got {','.join(names)}",
    )
    with_method = [name for name in names if "verification" in REQUEST_KINDS[name].options]
    expect(
        not (with_method and is_synthetic),
        BenchmarkError,
        f"--ask: {with_method[:1]} need real acceptance, got synthetic acceptance",
    )


def verifications_of(names: Sequence[str]) -> list[str]:
    """Return the ``mtp.verification`` that these kinds need, ``coupled`` first."""
    requested = [REQUEST_KINDS[name].options.get("verification", "coupled") for name in names]
    return list(dict.fromkeys(["coupled", *requested]))


def kinds_of(names: Sequence[str], batch: int) -> list[RequestKind]:
    """Return the kinds to measure in addition to greedy at a batch size."""
    return [
        REQUEST_KINDS[name] for name in names if name != GREEDY and REQUEST_KINDS[name].fits(batch)
    ]
