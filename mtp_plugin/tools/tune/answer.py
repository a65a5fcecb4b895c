"""From measured settings to an answer: K, method and draft vocabulary, or no drafts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mtp_plugin.hosts.vllm.options import drafter_config

METHODS = ("coupled", "rejection", "block")
BY_PROBABILITY = METHODS[1:]
"""They need ``draft_sample_method: probabilistic``; sampled outputs are not those of K = 0."""
TOLERANCE = 0.02
"""Of settings that are no more than this share slower than the best one, the simplest is taken."""
STEP_TOLERANCE = 0.05
"""Steps with drafts may be faster than those without by this share, which is noise."""


@dataclass(frozen=True)
class Setting:
    """What is tried; K = 0: no drafts."""

    num_drafts: int
    method: str = METHODS[0]
    draft_vocab: int | str | None = None
    drafter: str = "mtp"
    """``NAME[,MODEL]``."""
    has_plugin: bool = True
    """False: vLLM alone, to compare speeds."""

    @property
    def engine(self) -> Setting:
        """The setting for which an engine is started: it also serves others that share it."""
        return replace(self, method="rejection") if self.method in BY_PROBABILITY else self

    def without_plugin(self) -> Setting:
        """Return the setting of vLLM alone with the same ``--speculative-config``."""
        return replace(self.engine, draft_vocab=None, has_plugin=False)

    def __str__(self) -> str:
        if not self.num_drafts:
            return "K = 0"
        vocab = "" if self.draft_vocab is None else f", draft vocabulary {self.draft_vocab}"
        drafter = "" if self.drafter == "mtp" else f", {self.drafter}"
        method = self.method if self.has_plugin else "vLLM without the plugin"
        return f"K = {self.num_drafts}, {method}{vocab}{drafter}"

    def speculative_config(self) -> dict[str, Any] | None:
        """Return vLLM's ``--speculative-config``."""
        if not self.num_drafts:
            return None
        config: dict[str, Any] = {
            **drafter_config(self.drafter),
            "num_speculative_tokens": self.num_drafts,
        }
        if self.method in BY_PROBABILITY:
            config["draft_sample_method"] = "probabilistic"
        return config

    def plugin_options(self) -> dict[str, Any]:
        """Return the plugin's options, in vLLM's ``--additional-config``."""
        options: dict[str, Any] = {}
        if self.num_drafts and self.method != METHODS[0]:
            options["verification"] = self.method
        if self.num_drafts and self.draft_vocab is not None:
            options["draft_vocab"] = self.draft_vocab
        return options


@dataclass(frozen=True)
class Measurement:
    """What was measured of a setting."""

    setting: Setting
    problem: str | None = None
    """Why there are no numbers: the engine failed, or outputs differ."""
    step_ms: Mapping[int, float] = field(default_factory=dict)
    """Median time of a step by batch size."""
    acceptance: tuple[float, ...] = ()
    """Share of steps that accept at least i + 1 drafts."""
    num_outputs: int = 0
    """Outputs that were compared with those of K = 0 ..."""
    num_equal: int = 0
    ties: tuple[str, ...] = ()
    """... and those that differ by a near tie."""

    @property
    def acceptance_length(self) -> float:
        """Output tokens per step of a request."""
        return 1 + sum(self.acceptance)

    def tokens_per_second(self, batch_size: int) -> float:
        """Return the output tokens per second of steps with so many requests."""
        return 1000 * batch_size * self.acceptance_length / self.step_ms[batch_size]


@dataclass(frozen=True)
class Answer:
    """The setting to use at each batch size; they differ in K alone."""

    by_batch_size: Mapping[int, Setting]
    speed_up: Mapping[int, float]
    """Tokens per second over those of K = 0, by batch size."""

    @property
    def setting(self) -> Setting:
        """The setting with the most drafts; K = 0: leave drafts off."""
        return max(self.by_batch_size.values(), key=lambda setting: setting.num_drafts)

    def speculative_config(self) -> dict[str, Any] | None:
        """Return vLLM's ``--speculative-config``, with a schedule if K depends on the batch."""
        config = self.setting.speculative_config()
        schedule = make_schedule({b: s.num_drafts for b, s in self.by_batch_size.items()})
        if config is not None and len(schedule) > 1:
            config["num_speculative_tokens_per_batch_size"] = schedule
        return config

    def options(self) -> dict[str, Any]:
        """Return the options of ``vllm serve``."""
        config = self.speculative_config()
        drafting = {} if config is None else {"--speculative-config": config}
        plugin = {"mtp_plugin": self.setting.plugin_options()}
        return {**drafting, "--additional-config": plugin}


def find_off(measurements: Sequence[Measurement]) -> Measurement | None:
    """Return the measurement of K = 0, if it has numbers."""
    valid = (found for found in measurements if found.problem is None)
    return next((found for found in valid if not found.setting.num_drafts), None)


def unexplained_gains(found: Measurement, off: Measurement) -> dict[int, float]:
    """Return tokens per second over those of K = 0, by batch size where they exceed the tokens per
    step. These are the bound: a step with drafts computes all that one without them computes."""
    return {
        size: found.tokens_per_second(size) / off.tokens_per_second(size)
        for size, step_ms in found.step_ms.items()
        if step_ms < (1 - STEP_TOLERANCE) * off.step_ms[size]
    }


def find_answer(measurements: Sequence[Measurement]) -> Answer | None:
    """Return the best setting over all batch sizes, which count the same; K may depend on them.

    No gain exceeds the tokens per step; a setting with unexplained gains is left out.

    Returns:
        None: there is no number for K = 0.
    """
    off = find_off(measurements)
    if off is None:
        return None
    valid = [
        replace(found, step_ms={n: max(ms, off.step_ms[n]) for n, ms in found.step_ms.items()})
        for found in measurements
        if found.problem is None and found.setting.has_plugin and not unexplained_gains(found, off)
    ]
    sizes = sorted(off.step_ms)
    best = {size: max(found.tokens_per_second(size) for found in valid) for size in sizes}
    candidates = [dict.fromkeys(sizes, found) for found in valid]
    groups: dict[Setting, list[Measurement]] = {}
    for found in valid:
        if found.setting.num_drafts:
            groups.setdefault(replace(found.setting, num_drafts=0), [off]).append(found)
    candidates += [{size: _best_at(size, group) for size in sizes} for group in groups.values()]

    def share(candidate: Mapping[int, Measurement]) -> float:
        return statistics.geometric_mean(
            candidate[size].tokens_per_second(size) / best[size] for size in sizes
        )

    least = max(map(share, candidates)) * (1 - TOLERANCE)
    near = [candidate for candidate in candidates if share(candidate) >= least]
    chosen = min(near, key=_complexity)
    return Answer(
        {size: chosen[size].setting for size in sizes},
        {
            size: chosen[size].tokens_per_second(size) / off.tokens_per_second(size)
            for size in sizes
        },
    )


def losing_length(measurements: Sequence[Measurement], setting: Setting) -> int | None:
    """Return the largest K below a setting's, if at every batch size it is slower than fewer drafts
    of settings that differ in K alone. K = 0 does not count: drafts have a cost of their own."""
    fewer = {
        found.setting.num_drafts: found
        for found in measurements
        if found.problem is None
        and 0 < found.setting.num_drafts < setting.num_drafts
        and replace(found.setting, num_drafts=setting.num_drafts) == setting
    }
    if len(fewer) < 2:
        return None
    most = max(fewer)
    last = fewer.pop(most)
    is_slower = all(
        last.tokens_per_second(size)
        < (1 - TOLERANCE) * max(found.tokens_per_second(size) for found in fewer.values())
        for size in last.step_ms
    )
    return most if is_slower else None


def plugin_gain(answer: Answer, measurements: Sequence[Measurement]) -> dict[int, float]:
    """Return tokens per second over those of vLLM alone, by batch size of the answer's K.

    Returns:
        Nothing if vLLM alone has no numbers, as where drafts should be off.
    """
    valid = {found.setting: found for found in measurements if found.problem is None}
    ours, alone = valid[answer.setting], valid.get(answer.setting.without_plugin())
    if alone is None:
        return {}
    sizes = [size for size, setting in answer.by_batch_size.items() if setting == answer.setting]
    return {size: ours.tokens_per_second(size) / alone.tokens_per_second(size) for size in sizes}


def make_schedule(num_drafts: Mapping[int, int]) -> list[list[int]]:
    """Return vLLM's ranges ``[first batch size, last, K]`` of K by measured batch size.

    Between two measured sizes the border is their geometric mean. vLLM keeps the last K for larger
    batches.
    """
    sizes = sorted(num_drafts)
    ranges: list[list[int]] = []
    first = 1
    for size, following in zip(sizes, [*sizes[1:], sizes[-1]], strict=True):
        last = math.isqrt(size * following)
        if ranges and ranges[-1][2] == num_drafts[size]:
            ranges[-1][1] = last
        else:
            ranges.append([first, last, num_drafts[size]])
        first = last + 1
    return ranges


def _best_at(size: int, group: Sequence[Measurement]) -> Measurement:
    """Return the measurement with the fewest drafts that is nearly the best one."""
    least = max(found.tokens_per_second(size) for found in group) * (1 - TOLERANCE)
    near = [found for found in group if found.tokens_per_second(size) >= least]
    return min(near, key=lambda found: found.setting.num_drafts)


def _complexity(candidate: Mapping[int, Measurement]) -> tuple[int, ...]:
    settings = [found.setting for found in candidate.values()]
    most = max(settings, key=lambda setting: setting.num_drafts)
    return (
        len({setting.num_drafts for setting in settings}),
        most.num_drafts,
        most.draft_vocab is not None,
        METHODS.index(most.method),
    )
