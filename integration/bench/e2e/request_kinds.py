"""What the requests of a batch ask for beside greedy decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from integration.bench.case import BenchmarkError
from mtp_plugin.errors import expect
from mtp_plugin.requests.options import OPTIONS, SamplingParams
from mtp_plugin.verifications import WAYS

GREEDY, SAMPLED = "greedy", "sampled"
_DRAWN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


@dataclass(frozen=True)
class Ask:
    """What every request of a batch asks for, or one of them."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    of_one: bool = False
    """The first request asks, all others are greedy."""
    speculates: bool = True
    """False: drafts of all requests count as absent."""

    @property
    def is_residual(self) -> bool:
        """Whether texts keep the target's distribution alone."""
        return not WAYS[self.options.get("verification", "coupled")].keeps_text

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens told beside each; None: nothing is told."""
        return self.options.get("logprobs")

    def fits(self, batch: int) -> bool:
        """Whether a batch of this size is another than those of the other names."""
        return batch > 1 or not self.of_one

    def params(self, batch: int, num_tokens: int, seed: int) -> list[SamplingParams]:
        """The options of every request, which draws by a seed of its own.

        Args:
            num_tokens: that each emits, end tokens or not.
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
    def without_drafting(self) -> Ask:
        """The same texts, asked of who makes no drafts."""
        kept = {name: value for name, value in self.options.items() if not OPTIONS[name].of_drafts}
        return replace(self, options=kept)

    @property
    def without_drafts(self) -> Ask:
        """The same of who makes drafts, which count as absent."""
        return replace(self, speculates=False)


def _ways(temperature: float) -> list[Ask]:
    """Every way to judge drafts of a temperature; greedy drafts are judged by the target's draw."""
    ways = {
        "coupled": {"verification": "coupled"},
        "rejection": {"verification": "rejection"},
        "block": {"verification": "block"},
        "greedy-drafts": {"verification": "coupled", "draft_sampling": "greedy"},
    }
    return [
        Ask(f"{name}-t{temperature}", {"temperature": temperature, **options})
        for name, options in ways.items()
    ]


ASKS: Mapping[str, Ask] = {
    ask.name: ask
    for ask in (
        Ask(GREEDY),
        Ask(SAMPLED, _DRAWN),
        Ask("sampled-logprob", {**_DRAWN, "logprobs": 0}),
        Ask("sampled-top5", {**_DRAWN, "logprobs": 5}),
        Ask("sampled-penalty", {**_DRAWN, "repetition_penalty": 1.1}),
        Ask("one-sampled", _DRAWN, of_one=True),
        *_ways(0.6),
        *_ways(1.0),
    )
}
"""By name."""


def check_asks(names: Sequence[str], *, is_synthetic: bool = False) -> None:
    """Refuse names that are none, and what synthetic acceptance cannot stand for.

    Raises:
        BenchmarkError: an unknown or repeated name, or nobody greedy.
    """
    odd = [name for name in names if name not in ASKS]
    expect(not odd, BenchmarkError, f"--ask: expected some of {', '.join(ASKS)}, got {odd[:1]}")
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
    judged = [name for name in names if "verification" in ASKS[name].options]
    expect(
        not (judged and is_synthetic),
        BenchmarkError,
        f"--ask: {judged[:1]} need real acceptance, and here draws accept",
    )


def verifications_of(names: Sequence[str]) -> list[str]:
    """What ``mtp.verification`` has to list for these names, ``coupled`` first."""
    asked = [ASKS[name].options.get("verification", "coupled") for name in names]
    return list(dict.fromkeys(["coupled", *asked]))


def asked_of(names: Sequence[str], batch: int) -> list[Ask]:
    """What is measured beside greedy decoding at a batch size."""
    return [ASKS[name] for name in names if name != GREEDY and ASKS[name].fits(batch)]
