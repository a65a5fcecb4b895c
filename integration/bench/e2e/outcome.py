"""Outcome of a case: results, or the reason why there are none."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from integration.bench.e2e.cases import E2ECase, Synthetic
from integration.bench.e2e.gate import Match
from integration.bench.e2e.request_kinds import GREEDY, SAMPLED
from integration.bench.targets import STEP_TARGETS, StepRatio
from integration.bench.timing import Times
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats


@dataclass(frozen=True)
class Phases:
    """Medians over steps, milliseconds."""

    spent: dict[str, float]
    """Time by phase; the sum is the time that the device is busy."""
    host_gap: float
    """Time between two steps on the device: the sampler, copies, waiting for the host. With graphs
    it is measured between replays in a separate run; else it is the rest of a step."""
    samples: int
    gap_samples: int
    """Number of measured gaps."""

    def as_dict(self) -> dict[str, Any]:
        counts = {"samples": self.samples, "gap_samples": self.gap_samples}
        return {**self.spent, "host_gap": self.host_gap, **counts}


@dataclass(frozen=True)
class StepFigures:
    """Results of a case whose tokens match."""

    seconds: float
    num_tokens: int
    first_tokens_seconds: float
    step_ms: Times
    """Time from one step in which every request generates to the next."""
    steady_tokens_per_second: float
    """Throughput of those steps."""
    acceptance: AcceptanceStats
    """Acceptance in those steps."""
    share_of_repeated_8_grams: float
    phases: Phases | None
    host_bound: bool
    """Whether the host limits the step: see `is_host_bound`."""

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the whole batch, including prompts."""
        return self.num_tokens / self.seconds

    def as_dict(self, batch: int) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "tokens": self.num_tokens,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_request": self.tokens_per_second / batch,
            "first_tokens_seconds": self.first_tokens_seconds,
            "host_bound": self.host_bound,
            "step_ms": asdict(self.step_ms),
            "steady_tokens_per_second": self.steady_tokens_per_second,
            "steady_tokens_per_second_per_request": self.steady_tokens_per_second / batch,
            "acceptance_length": self.acceptance.acceptance_length,
            "acceptance_per_position": self.acceptance.per_position,
            "share_of_repeated_8_grams": self.share_of_repeated_8_grams,
            "phases_ms": None if self.phases is None else self.phases.as_dict(),
        }


@dataclass(frozen=True)
class KindOutcome:
    """Results of a kind of requests in the executor of a case, or why there are none."""

    request_kind: str
    match: Match | None = None
    figures: StepFigures | None = None
    """None if only outputs were compared: without MTP."""
    error: str | None = None
    host_gap_ms: float | None = None
    """Median between replays; None: eager steps."""

    @property
    def matched(self) -> bool:
        """Whether the outputs match."""
        return self.error is None and self.match is not None and self.match.holds

    @property
    def problem(self) -> str | None:
        """Why there are no results; None if the outputs match."""
        if self.matched:
            return None
        return self.error or f"no match: {'; '.join(self.match.mismatches if self.match else [])}"


@dataclass(frozen=True)
class E2EOutcome:
    """Results of a case, or the reason why there are none."""

    case: E2ECase
    synthetic: Synthetic | None = None
    """Synthetic acceptance; None: it was real, or there were no drafts."""
    figures: StepFigures | None = None
    match: Match | None = None
    error: str | None = None
    off: StepFigures | None = field(default=None, compare=False)
    """The same batch without MTP."""
    ran: dict[str, Any] = field(default_factory=dict)
    """Attention backend, and how many steps of the timed executor (including warm-up) were graph
    replays."""
    seconds: float = 0.0
    kind_outcomes: tuple[KindOutcome, ...] = ()
    """Other kinds of requests, in the same executor."""
    has_targets: bool = False
    """Whether `STEP_TARGETS` apply."""

    @property
    def matched(self) -> bool:
        """Whether there are results."""
        return self.figures is not None

    @property
    def all_matched(self) -> bool:
        """Whether the outputs of all kinds of requests match."""
        return self.matched and all(each.matched for each in self.kind_outcomes)

    @property
    def problems(self) -> list[str]:
        """Why there are no results, per kind of requests without any."""
        document = [] if self.problem is None else [f"{self.case.label}: {self.problem}"]
        return document + [
            f"{self.case.label} {each.request_kind}: {each.problem}"
            for each in self.kind_outcomes
            if each.problem is not None
        ]

    def step_over(self, request_kind: str, over: str) -> float | None:
        """Return the ratio of the median steps of two kinds of requests; None if one has no
        results."""
        figures = {each.request_kind: each.figures for each in self.kind_outcomes} | {
            GREEDY: self.figures
        }
        one, other = figures.get(request_kind), figures.get(over)
        return None if one is None or other is None else one.step_ms.median / other.step_ms.median

    def target_of(self, request_kind: str) -> StepRatio | None:
        """Return the target for steps of a kind of requests, or None."""
        target = STEP_TARGETS.get(request_kind) if self.has_targets else None
        return None if target is None or self.case.batch not in target.at_most else target

    def _described(self, outcome: KindOutcome) -> dict[str, Any]:
        document: dict[str, Any] = {
            "ask": outcome.request_kind,
            "matched": outcome.matched,
            "match": None if outcome.match is None else outcome.match.as_dict(),
        }
        if outcome.figures is None:
            return document | {"error": outcome.error}
        document |= outcome.figures.as_dict(self.case.batch)
        document.pop("phases_ms")
        document["host_gap_ms"] = outcome.host_gap_ms
        document["median_step_over"] = {
            over: ratio
            for over in (GREEDY, SAMPLED)
            if over != outcome.request_kind
            and (ratio := self.step_over(outcome.request_kind, over)) is not None
        }
        target = self.target_of(outcome.request_kind)
        if target is not None:
            ratio, bound = (
                self.step_over(outcome.request_kind, target.over),
                target.at_most[self.case.batch],
            )
            met = None if ratio is None else ratio <= bound
            document["target"] = {"over": target.over, "at_most": bound, "met": met}
        return document

    @property
    def problem(self) -> str | None:
        """Why there are no results."""
        if self.matched:
            return None
        found = [] if self.match is None else self.match.mismatches
        return self.error or f"no match: {'; '.join(found)}"

    @property
    def speed_up(self) -> float | None:
        """Tokens per second of generating steps over those without MTP: by their means."""
        if self.figures is None or self.off is None or self.case.is_off:
            return None
        return self.figures.steady_tokens_per_second / self.off.steady_tokens_per_second

    @property
    def speed_up_as_configured(self) -> float | None:
        """Speed-up at the configured tokens per step; None: acceptance is real."""
        if self.synthetic is None or self.figures is None or self.off is None:
            return None
        tokens = 1 + sum(self.synthetic.shares(self.case.k))
        return tokens * self.off.step_ms.mean / self.figures.step_ms.mean

    @property
    def total_speed_up(self) -> float | None:
        """The same from start to end, prompts included."""
        if self.figures is None or self.off is None or self.case.is_off:
            return None
        return self.figures.tokens_per_second / self.off.tokens_per_second

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON entry, without results unless the tokens match."""
        case = self.case
        described: dict[str, Any] = {
            "case": case.label,
            "batch": case.batch,
            "worker": case.worker,
            "max_draft_len": case.k,
            "acceptance": None
            if case.is_off
            else "real"
            if self.synthetic is None
            else "synthetic",
            "matched": self.matched,
            "match": None if self.match is None else self.match.as_dict(),
            "ran": self.ran,
            "seconds_to_measure": round(self.seconds, 2),
        }
        if self.synthetic is not None:
            described["synthetic_acceptance"] = {
                "expected_per_position": list(self.synthetic.shares(case.k)),
                "seed": self.synthetic.seed,
            }
        if self.kind_outcomes:
            described["asks"] = [self._described(each) for each in self.kind_outcomes]
        if self.figures is None:
            return described | {"error": self.error}
        described |= self.figures.as_dict(case.batch)
        if not case.is_off:
            described["speed_up"] = {"steady": self.speed_up, "total": self.total_speed_up}
            if self.synthetic is not None:
                described["speed_up"]["as_asked"] = self.speed_up_as_configured
        return described
