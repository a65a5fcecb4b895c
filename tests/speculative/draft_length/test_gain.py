"""The gain policy against simulated step times and acceptance."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

import pytest

from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.speculative.draft_length.controller import DraftLengthController, DraftState
from mtp_plugin.speculative.draft_length.gain import (
    PROBE_STEPS,
    WINDOW,
    AcceptanceRates,
    StepTimes,
)

K = 3
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
Rates = tuple[float, ...]
MEASURED = {1: (2.26, 0.35), 8: (2.38, 0.41), 32: (2.55, 0.6), 64: (2.72, 0.86), 128: (3.37, 1.74)}
"""Batch size -> milliseconds of a step without drafts, and of each draft, on a GPU."""


def gpu_times(length: int, size: int) -> float:
    start, each = MEASURED[size]
    return start + each * length


def stepped_times(length: int, size: int) -> float:
    """Drafting has a fixed cost, and the third draft costs most at large batches."""
    return 2.0 + 0.01 * size + (0.5 if length else 0) + (0, 0.2, 0.4, 0.9)[length] * size / 16


def flat_times(length: int, size: int) -> float:
    return 5.0 + 0.01 * length + 0.001 * size


@dataclass
class Request:
    """A request that accepts its drafts at random."""

    rates: Rates
    most: int = K
    speculates: bool = True
    is_first_context_chunk: bool = False
    sampling_kind: int = 0
    is_finished: bool = False
    py_draft_state: DraftState = field(init=False)

    def __post_init__(self) -> None:
        self.py_draft_state = DraftState.fresh(K, self.most)

    @property
    def py_disable_speculative_decoding(self) -> bool:
        return not self.speculates

    def tokens(self, length: int) -> float:
        """Expected output tokens of a step."""
        usable = min(length, self.most) if self.speculates else 0
        return 1 + sum(accumulate(self.rates[:usable], mul))


@dataclass(eq=False)
class Batch:
    generation_requests: list[Request]
    context_requests: list[Request] = field(default_factory=list)

    def all_requests(self) -> list[Request]:
        return self.context_requests + self.generation_requests


class Simulation:
    """An overlap loop: the results of a step are read after the next one is launched."""

    def __init__(
        self,
        times: Callable[[int, int], float],
        *,
        noise: float = 0.01,
        outliers: float = 0.01,
        seed: int = 0,
        padded_sizes: Sequence[int] = SIZES,
        **config: object,
    ) -> None:
        self.times, self.noise, self.outliers = times, noise, outliers
        self.rng = random.Random(seed)
        self.now = self.num_tokens = 0.0
        self.controller = DraftLengthController(
            MTPDecodingConfig(max_draft_len=K, mtp={"adaptive_draft_len": True}, **config),
            max_batch_size=128,
            padded_sizes=padded_sizes,
            clock=lambda: self.now,
        )
        self.end = 0.0
        self.previous: tuple[Batch, list[int]] | None = None
        self.lengths: list[int] = []

    def step(self, batch: Batch, prompt_time: float = 0.0) -> int:
        length = self.controller.plan(batch)
        limits = [r.py_draft_state.limit if r.speculates else 0 for r in batch.generation_requests]
        if self.previous is not None:
            self.read(*self.previous)
        self.previous = (batch, limits)
        seconds = self.times(length, len(batch.all_requests())) + prompt_time
        seconds *= 1 + self.rng.uniform(0, self.noise)
        if self.rng.random() < self.outliers:
            seconds *= 5
        self.end += seconds
        self.lengths.append(length)
        return length

    def read(self, batch: Batch, limits: list[int]) -> None:
        self.now = self.end
        self.controller.finish(batch)
        for request, limit in zip(batch.generation_requests, limits, strict=True):
            accepted = 0
            while accepted < limit and self.rng.random() < request.rates[accepted]:
                accepted += 1
            self.num_tokens += accepted + 1
            self.controller.record(accepted + 1, limit, request)

    def run(self, requests: Sequence[Request], num_steps: int) -> Counter[int]:
        """Steps of a batch that does not change; counts the draft lengths."""
        before = len(self.lengths)
        for _ in range(num_steps):
            self.step(Batch(list(requests)))
        return Counter(self.lengths[before:])

    def share_of_best(self, requests: Sequence[Request], lengths: Counter[int]) -> float:
        """Expected tokens per second of these steps, divided by those of the best length."""
        size = len(requests)
        tokens = [sum(r.tokens(k) for r in requests) for k in range(K + 1)]
        best = max(tokens[k] / self.times(k, size) for k in range(K + 1))
        total = sum(tokens[k] * count for k, count in lengths.items())
        return total / sum(self.times(k, size) * n for k, n in lengths.items()) / best


def uniform(rate: float, size: int) -> list[Request]:
    return [Request((rate,) * K) for _ in range(size)]


def mixed(size: int) -> list[Request]:
    return uniform(0.9, (size + 1) // 2) + uniform(0.3, size // 2)


TRAFFIC: dict[str, Callable[[int], list[Request]]] = {
    "0.3": lambda size: uniform(0.3, size),
    "0.6": lambda size: uniform(0.6, size),
    "0.9": lambda size: uniform(0.9, size),
    "mixed": mixed,
    "falling": lambda size: [Request((0.8, 0.5, 0.2)) for _ in range(size)],
}
CONVERGED = 4 * PROBE_STEPS + 200


@pytest.mark.parametrize("times", [gpu_times, stepped_times, flat_times])
@pytest.mark.parametrize(
    ("size", "traffic"),
    [(1, "0.9"), (8, "0.3"), (8, "0.6"), (8, "mixed"), (32, "falling"), (128, "0.9")],
)
def test_policy_reaches_the_best_static_length(
    times: Callable[[int, int], float], size: int, traffic: str
) -> None:
    simulation = Simulation(times, seed=size)
    requests = TRAFFIC[traffic](size)
    simulation.run(requests, CONVERGED)
    share = simulation.share_of_best(requests, simulation.run(requests, 2000 if size < 64 else 500))
    assert share >= 0.98


@pytest.mark.parametrize("size", [1, 8, 128])
def test_policy_converges_after_exploration(size: int) -> None:
    """Drafting pays at rate 0.9 and does not at 0.05; it is known after one decision."""
    for rate, best in ((0.9, K), (0.05, 0)):
        simulation = Simulation(stepped_times if size == 128 else gpu_times)
        lengths = Counter[int]()
        if size == 128 and rate == 0.9:
            best = max(
                range(K + 1), key=lambda k: uniform(0.9, 1)[0].tokens(k) / stepped_times(k, 128)
            )
        simulation.run(uniform(rate, size), 4 * PROBE_STEPS + 2)
        lengths = simulation.run(uniform(rate, size), 100)
        assert lengths[best] >= 90, (rate, lengths)


def test_new_batch_size_tries_every_length() -> None:
    simulation = Simulation(gpu_times)
    lengths = simulation.run(uniform(0.6, 8), 4 * PROBE_STEPS)
    assert lengths == dict.fromkeys(range(K + 1), PROBE_STEPS)
    assert simulation.lengths[0] == K


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize(("before", "after"), [(0.9, 0.1), (0.1, 0.9)])
def test_policy_follows_acceptance(size: int, before: float, after: float) -> None:
    simulation = Simulation(gpu_times)
    requests = uniform(before, size)
    simulation.run(requests, 1000)
    for request in requests:
        request.rates = (after,) * K
    simulation.run(requests, 1500)
    assert simulation.share_of_best(requests, simulation.run(requests, 2000)) >= 0.98


def test_policy_uses_the_rates_of_the_batch() -> None:
    """Requests that accept little leave, and the others draft more at once."""
    simulation = Simulation(stepped_times)
    good, bad = uniform(0.9, 8), uniform(0.05, 24)
    simulation.run(good + bad, 600)
    assert simulation.run(good + bad, 100).most_common(1)[0][0] == 0
    simulation.run(good, 4 * PROBE_STEPS + 2)
    lengths = simulation.run(good, 50)
    assert simulation.share_of_best(good, lengths) >= 0.98
    assert lengths.most_common(1)[0][0] > 0


def test_probes_cost_less_than_one_percent() -> None:
    simulation = Simulation(gpu_times, noise=0, outliers=0)
    requests = uniform(0.9, 8)
    simulation.run(requests, CONVERGED)
    lengths = simulation.run(requests, 10_000)
    assert simulation.share_of_best(requests, lengths) >= 0.99
    assert min(lengths[k] for k in range(K + 1)) > 0


def test_schedule_limits_the_length() -> None:
    simulation = Simulation(gpu_times, draft_len_schedule={8: K, 32: 1})
    assert simulation.controller.draft_lens() == (0, 1, 2, 3)
    assert simulation.controller.draft_lens([32, 64]) == (0, 1)
    assert max(simulation.run(uniform(0.9, 32), 300)) == 1
    assert set(simulation.run(uniform(0.9, 64), 30)) == {0}
    assert simulation.run(uniform(0.9, 8), 300)[K] > 200


def test_requests_limit_the_length() -> None:
    simulation = Simulation(gpu_times)
    off = [Request((0.9,) * K, speculates=False) for _ in range(8)]
    assert set(simulation.run(off, 50)) == {0}
    assert simulation.run([*off[1:], Request((0.9,) * K, most=2)], 300).keys() == {0, 1, 2}


def test_requests_without_drafts_gain_nothing() -> None:
    """One request of 64 drafts: its tokens are not worth the time of the others."""
    simulation = Simulation(gpu_times)
    requests = [Request((0.9,) * K), *(Request((0.9,) * K, speculates=False) for _ in range(63))]
    simulation.run(requests, CONVERGED)
    assert simulation.run(requests, 500)[0] > 450


@pytest.mark.parametrize(("padded_sizes", "expected"), [(SIZES, K), ((), 0)])
def test_length_of_steps_with_prompts(padded_sizes: tuple[int, ...], expected: int) -> None:
    """Steps with prompts have CUDA graphs only for the largest length, and only with padding."""
    simulation = Simulation(gpu_times, padded_sizes=padded_sizes)
    requests = uniform(0.05, 8)
    simulation.run(requests, 200)
    batch = Batch(requests[:7], requests[7:])
    assert simulation.step(batch) == expected
    assert simulation.run(requests, 50)[0] > 40


def test_slow_first_steps_of_a_length_are_not_its_time() -> None:
    """Eager steps, and a capture, before there is a CUDA graph."""
    seen = Counter[int]()

    def times(length: int, size: int) -> float:
        seen[length] += 1
        return (
            (20.0, 20.0, 20.0, 400.0)[seen[length] - 1]
            if seen[length] < 5
            else gpu_times(length, size)
        )

    simulation = Simulation(times, noise=0, outliers=0)
    simulation.run(uniform(0.6, 8), 4 * PROBE_STEPS + 2)
    assert simulation.controller.gain is not None
    (shape,) = simulation.controller.gain._shapes.values()
    for length in range(K + 1):
        assert shape.times.of(length) == pytest.approx(gpu_times(length, 8))


def test_steps_with_prompts_are_not_measured() -> None:
    simulation = Simulation(gpu_times, noise=0, outliers=0)
    requests, prompt = uniform(0.9, 7), Request((0.9,) * K)
    assert simulation.controller.gain is not None
    for i in range(400):
        prompts = [prompt] if i % 5 == 0 else []
        batch = Batch(requests + ([] if prompts else [prompt]), prompts)
        length = simulation.step(batch, prompt_time=100.0 if prompts else 0.0)
        assert prompts == [] or i < 50 or length == K
    (shape,) = simulation.controller.gain._shapes.values()
    for length in range(K + 1):
        assert shape.times.of(length) == pytest.approx(gpu_times(length, 8))


def test_time_over_a_step_whose_results_were_dropped_is_not_counted() -> None:
    """The time since the last results is then that of two steps."""
    simulation = Simulation(gpu_times, noise=0, outliers=0)
    requests = uniform(0.6, 8)
    for _ in range(100):
        simulation.step(Batch(requests))
        simulation.step(Batch(requests))
        simulation.previous = None  # the executor dropped the step in flight
    assert simulation.controller.gain is not None
    (shape,) = simulation.controller.gain._shapes.values()
    assert [shape.times.of(length) for length in range(K + 1)] == [None] * (K + 1)


def test_time_of_a_step_after_one_of_another_length_is_not_counted() -> None:
    simulation = Simulation(gpu_times, noise=0, outliers=0)
    gain = simulation.controller.gain
    assert gain is not None
    gain._choose_measured = lambda *_: len(simulation.lengths) % 2  # type: ignore[method-assign]
    simulation.run(uniform(0.6, 8), 100)
    (shape,) = gain._shapes.values()
    assert [shape.times.of(length) for length in (0, 1)] == [None, None]


def test_longer_sequences_do_not_change_the_choice() -> None:
    """All lengths become slower; only the one in use is measured."""
    slower = 0.0
    simulation = Simulation(lambda length, size: gpu_times(length, size) + slower)
    requests = uniform(0.5, 8)
    simulation.run(requests, 1000)
    lengths = Counter[int]()
    for _ in range(1000):
        slower += 0.002
        lengths[simulation.step(Batch(requests))] += 1
    best = max(range(K + 1), key=lambda k: requests[0].tokens(k) / (gpu_times(k, 8) + 2.0))
    assert simulation.run(requests, 300)[best] > 200


def test_last_step_of_a_request_is_not_counted() -> None:
    """A stop may have removed accepted drafts."""
    simulation = Simulation(gpu_times)
    request = Request((0.6,) * K, is_finished=True)
    simulation.controller.record(1, K, request)
    assert request.py_draft_state.acceptance is None
    request.is_finished = False
    simulation.controller.record(2, K, request)
    assert request.py_draft_state.acceptance is not None


def test_every_sampling_kind_has_its_own_times() -> None:
    simulation = Simulation(gpu_times)
    requests = uniform(0.6, 8)
    simulation.run(requests, 100)
    requests[3].sampling_kind = 1
    assert simulation.run(requests, 4 * PROBE_STEPS) == dict.fromkeys(range(K + 1), PROBE_STEPS)


def test_finished_batches_are_not_kept_alive() -> None:
    simulation = Simulation(gpu_times)
    request = Request((0.6,) * K)
    simulation.run([request], 3)
    simulation.previous = None
    assert simulation.controller.gain is not None
    assert all(step.batch() is None for step in simulation.controller.gain._launched)


# --- times ---


def test_time_is_a_median_without_delayed_steps() -> None:
    times = StepTimes()
    for i in range(WINDOW):
        times.record(1, 9.0 if i % 3 == 0 else 2.0, in_use=True)
    assert times.of(1) == 2.0


def test_time_of_an_unmeasured_length_is_interpolated() -> None:
    times = StepTimes()
    assert times.of(0) is None
    for _ in range(4):
        times.record(3, 4.0, in_use=False)
    assert times.of(0) == 4.0
    for _ in range(4):
        times.record(0, 1.0, in_use=False)
    assert [times.of(k) for k in range(5)] == [1.0, 2.0, 3.0, 4.0, 4.0]


def test_older_times_follow_the_length_in_use() -> None:
    times = StepTimes()
    for _ in range(4):
        times.record(0, 1.0, in_use=False)
    for _ in range(WINDOW):
        times.record(2, 3.0, in_use=True)
    for _ in range(WINDOW):
        times.record(2, 3.5, in_use=True)
    assert (times.of(0), times.of(2)) == (1.5, 3.5)
    times.restart(0)
    for _ in range(4):
        assert times.of(0) == 1.5
        times.record(0, 1.2, in_use=False)
    assert (times.of(0), times.of(2)) == (1.2, 3.5)


# --- rates ---


def test_rates_are_those_of_verified_positions() -> None:
    rates = AcceptanceRates(3, horizon=1000)
    rates.record(0, 3)  # the first draft was rejected
    rates.record(2, 3)
    rates.record(2, 2)
    rates.record(3, 3)
    assert [rates.rate(i, 0.0, 1e-9) for i in range(3)] == pytest.approx(
        [3 / 4, 1, 1 / 2], abs=1e-2
    )
    assert AcceptanceRates(1, horizon=9).rate(0, 0.4, 8.0) == pytest.approx(0.4)


def test_rates_of_many_steps_are_as_if_read_after_each() -> None:
    """Steps are averaged together when a rate is read."""
    single, together = (AcceptanceRates(3, horizon=500) for _ in range(2))
    rng = random.Random(0)
    for _ in range(40):
        for drafted in rng.choices(range(4), k=20):
            step = (rng.randint(0, drafted), drafted)
            for rates in (single, together):
                rates.record(*step)
            single.rate(0, 0.5, 1.0)
        for i in range(3):
            assert together.rate(i, 0.5, 1.0) == pytest.approx(single.rate(i, 0.5, 1.0), abs=0.02)
