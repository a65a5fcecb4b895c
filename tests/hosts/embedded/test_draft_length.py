"""Turning drafts down and up again, end to end: the text never changes, and drafting comes back."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from mtp_plugin.hosts.embedded import SamplingParams
from mtp_plugin.speculative.draft_length import gain
from mtp_plugin.speculative.metrics import alarms
from tests.hosts.embedded.conftest import LOOPS, VOCAB, WORKERS, assert_drained, wrap_worker
from tests.hosts.embedded.oracles import Oracle, ScriptedDrafts
from tests.hosts.embedded.test_logprobs import TIGHT

K = 3
WARMTH = [pytest.param(True, id="warm"), pytest.param(False, id="cold")]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(2, 12))] for _ in range(count)]


class Watched:
    """An executor whose step lengths and results are written down."""

    def __init__(self, llm) -> None:
        self.llm = llm
        self.executor = llm.executor
        self.lengths: list[int] = []
        self.results: dict[int, list[tuple[int, int, int]]] = {}
        """Request id -> (tokens before the step, emitted, verified drafts) per generation step."""
        sampler, plan = llm.pieces.sampler, llm.pieces.draft_lengths.plan
        on_step = sampler.on_step

        def write_down(request, num_emitted, num_drafted):
            before = request.get_num_tokens() - num_emitted
            steps = self.results.setdefault(request.request_id, [])
            steps.append((before, num_emitted, num_drafted))
            on_step(request, num_emitted, num_drafted)

        def plan_and_note(batch):
            self.lengths.append(plan(batch))
            return self.lengths[-1]

        sampler.on_step = write_down
        llm.pieces.draft_lengths.plan = plan_and_note

    def enqueue(self, prompts, num_tokens):
        requests = [self.llm.make_request(p, greedy(num_tokens)) for p in prompts]
        for request in requests:
            self.executor.enqueue(request)
        return requests

    def run(self, num_steps=None) -> None:
        while self.executor.has_work and num_steps != 0:
            self.executor.step()
            num_steps = None if num_steps is None else num_steps - 1
        if num_steps is None:
            assert_drained(self.llm)


def script(llm, sequences, accept) -> None:
    wrap_worker(llm, lambda worker: ScriptedDrafts(worker, sequences, accept))


def test_waves_of_requests_change_no_text(harness, target):
    """The batch grows and shrinks through all lengths of the schedule, with some preemption."""
    watched = Watched(
        harness.llm(
            vanilla=True,
            speculative={"draft_len_schedule": {2: K, 4: 1}},
            mtp={"keep_warm": False},
            kv_cache_config={"tokens_per_block": 4, "max_tokens": 112},
            kv_fill=float("nan"),
        )
    )
    waves = [(2, 40), (2, 12), (3, 10), (0, 0), (1, 20), (5, 14)]
    prompts = random_prompts(sum(count for count, _ in waves))
    todo, started = iter(prompts), []
    for count, num_tokens in waves:
        wave = [next(todo) for _ in range(count)]
        started += zip(watched.enqueue(wave, num_tokens), wave, strict=True)
        watched.run(6)
    watched.run()
    for request, prompt in started:
        assert request.output_token_ids == target.greedy(prompt, request.params.max_new_tokens)
    assert set(watched.lengths) == {0, 1, K}
    assert watched.executor.num_preemptions > 0
    seen = {drafted for steps in watched.results.values() for *_, drafted in steps}
    assert seen >= {0, 1, K}


@pytest.mark.parametrize("vanilla", WORKERS)
@pytest.mark.parametrize("no_overlap", LOOPS)
def test_r38_acceptance_recovers_after_a_crowd(harness, vanilla, no_overlap):
    """R38: four requests draft, eight more come (no drafts), and leave: from the second step on
    every draft is what a fresh run over the prefix proposes, so acceptance is what it would be."""
    oracle = Oracle(harness.oracle_model, K, vanilla=vanilla)
    watched = Watched(
        harness.llm(
            vanilla=vanilla,
            disable_overlap_scheduler=no_overlap,
            max_batch_size=12,
            speculative={"draft_len_schedule": {4: K}},
            kv_fill=float("nan"),
        )
    )
    prompts = random_prompts(12, seed=1)
    long = watched.enqueue(prompts[:4], 80)
    watched.run(6)
    watched.enqueue(prompts[4:], 16)
    watched.run()
    off = watched.lengths.count(0)
    assert off >= 15
    resumed = emitted = fresh = 0
    for request, prompt in zip(long, prompts, strict=False):
        truth = oracle.greedy(prompt, 80)
        assert request.output_token_ids == truth
        steps = watched.results[request.request_id]
        last_off = max(i for i, (*_, drafted) in enumerate(steps) if drafted == 0)
        text = prompt + truth
        for before, num_emitted, drafted in steps[last_off + 1 :]:
            if drafted < K:
                continue  # near the request's full length
            drafts = oracle.fresh(tuple(text[:before])).drafts
            right = next((i for i in range(K) if drafts[i] != text[before + i]), K)
            resumed += 1
            emitted += num_emitted
            fresh += min(right + 1, len(text) - before)
    assert resumed > 40
    assert emitted / resumed > 1.3  # these drafts are often right
    assert abs(emitted - fresh) <= 0.05 * fresh
    assert emitted == fresh


def test_without_keep_warm_only_new_and_preempted_requests_draft(harness, target):
    """Two requests in a large batch stop drafting; a third one drafts among them, as does one of
    them after a preemption."""
    watched = Watched(
        harness.llm(
            speculative={"max_concurrency": 3},
            mtp={"keep_warm": False},
            kv_fill=float("nan"),
        )
    )
    prompts = random_prompts(6, seed=2)
    old = watched.enqueue(prompts[:2], 60)
    watched.run(5)
    crowd = watched.enqueue(prompts[2:4], 5)
    watched.run(12)
    assert all(request.is_finished for request in crowd)
    assert [request.py_draft_state.warm for request in old] == [0, 0]
    # no request could use a draft: the steps made none
    assert watched.lengths[-1] == 0
    young = watched.enqueue(prompts[4:5], 40)[0]
    watched.run(4)
    assert watched.lengths[-1] == K
    assert not any(request.is_finished for request in [*old, young])

    scheduler = watched.executor.scheduler
    schedule = scheduler.schedule

    def preempt_once(in_flight):
        scheduler.schedule = schedule
        batch = schedule(in_flight)
        scheduler._pause(old[0], batch)
        return batch

    scheduler.schedule = preempt_once
    watched.run(1)
    known = old[0].get_num_tokens()
    watched.run()
    for request, prompt in zip([*old, young], [*prompts[:2], prompts[4]], strict=True):
        assert request.output_token_ids == target.greedy(prompt, request.params.max_new_tokens)
    first_cold = [
        next(i for i, (*_, drafted) in enumerate(watched.results[r.request_id]) if drafted == 0)
        for r in old
    ]
    assert min(first_cold) > 0  # they drafted before the crowd came
    later = watched.results[old[1].request_id][first_cold[1] :]
    assert len(later) > 20
    assert {drafted for *_, drafted in later} == {0}
    assert K in {drafted for *_, drafted in watched.results[young.request_id]}
    again = [s for s in watched.results[old[0].request_id][first_cold[0] :] if s[2] > 0]
    assert again
    assert all(before >= known for before, *_ in again)


GATE = {"acceptance_window": 8, "acceptance_length_threshold": 2.0}
PROBES = {"gate_margin": 0.5, "gate_probe_interval": 6, "gate_max_probe_interval": 24}


@pytest.mark.parametrize("keep_warm", WARMTH)
def test_the_gate_follows_the_drafter(harness, target, keep_warm, caplog):
    """Nothing right for 40 tokens, then everything: down, a probe or two, up, and up it stays."""
    llm = harness.llm(
        speculative={**GATE, "max_draft_len": K},
        mtp={**PROBES, "keep_warm": keep_warm},
    )
    caplog.set_level("INFO", logger="mtp_plugin")
    watched = Watched(llm)
    prompts = random_prompts(4, seed=3)
    truths = [target.greedy(p, 110) for p in prompts]
    sequences = {i: p + t for i, (p, t) in enumerate(zip(prompts, truths, strict=True))}
    script(llm, sequences, lambda i, position: 0 if i < 2 and position < 40 else K)
    requests = watched.enqueue(prompts[:2], 100)
    watched.run(14)
    gate = llm.pieces.draft_lengths.gates[K]

    def decisions() -> list[bool]:
        """Whether each logged decision of the gate is to draft."""
        texts = [record.getMessage() for record in caplog.records]
        return ["is on again" in text for text in texts if text.startswith("acceptance gate: ")]

    assert set(decisions()) == {False}
    assert 0 in watched.lengths
    assert watched.lengths[:4] == [K] * 4
    if not keep_warm:
        # what has read its prompt before the pause is cold: somebody new has to come
        watched.run(40)
        assert True not in decisions()
        assert gate.state == "probing"
        requests += watched.enqueue(prompts[2:], 100)
    watched.run()
    assert gate.state == "open"
    assert decisions()[-1]
    assert decisions().count(True) == 1
    for request, truth in zip(requests, truths, strict=False):
        assert request.output_token_ids == truth[:100]
    drafted = [d for *_, d in watched.results[requests[-1].request_id]]
    # the last step or two may be short of room
    assert drafted[-8:-2] == [K] * 6


def test_a_drafter_that_is_always_wrong_raises_the_alarm(
    harness, target, prompts, monkeypatch, caplog
):
    monkeypatch.setattr(alarms, "COLLAPSE_STEPS", 24)
    prompt = prompts[4]
    truth = target.greedy(prompt, 40)
    llm = harness.llm()
    script(llm, {0: prompt + truth}, lambda *_: 0)
    llm.generate([prompt], greedy(20))
    assert not llm.pieces.alarms.collapsed
    llm = harness.llm()
    script(llm, {0: prompt + truth}, lambda *_: 0)
    output = llm.generate([prompt], greedy(30))[0]
    assert output.token_ids == truth[:30]
    assert llm.pieces.alarms.collapsed
    assert [r.levelname for r in caplog.records if r.name == "mtp_plugin"] == ["WARNING"]


@pytest.mark.parametrize(("right", "loops"), [(K, True), (2, False)])
def test_a_text_that_loops_at_the_ceiling_raises_the_alarm(
    looping_harness, right, loops, caplog, monkeypatch
):
    """The next token depends on the last one alone: the text must come round."""
    target = Oracle(looping_harness.oracle_model, 1, vanilla=False)
    monkeypatch.setattr(alarms, "LOOP_SPAN", 64)
    prompt = [3, 1]
    truth = target.greedy(prompt, 90)
    assert alarms.repeated_share(truth[-alarms.LOOP_SPAN :], alarms.LOOP_NGRAM) > 0.5
    llm = looping_harness.llm()
    script(llm, {0: prompt + truth}, lambda *_: right)
    llm.generate([prompt], greedy(84))
    assert llm.pieces.alarms.num_looping_requests == loops
    messages = [r.getMessage() for r in caplog.records if r.name == "mtp_plugin"]
    assert [message[:15] for message in messages] == ["request 0 loops"] * loops


# --- adaptive draft length ---


def test_adaptive_length_changes_no_output(harness, monkeypatch):
    """Random arrivals, preemptions, and requests with limits; drafts are those of a fresh run."""
    oracle = Oracle(harness.oracle_model, K, vanilla=False)
    watched = Watched(
        harness.llm(
            mtp={"adaptive_draft_len": True},
            kv_cache_config={"tokens_per_block": 4, "max_tokens": 132},
            kv_fill=float("nan"),
        )
    )
    monkeypatch.setattr(gain, "WORTH_TRYING", 1.0)  # a new batch size tries every length
    rng = random.Random(11)
    # random step times, equal in every run of the test
    times = itertools.accumulate(rng.random() for _ in itertools.count())
    watched.llm.pieces.draft_lengths.gain._clock = times.__next__
    rng, started = random.Random(13), []
    for prompt in random_prompts(12, seed=11):
        options = rng.choice([{}, {"max_draft_len": 1}, {"speculate": False}])
        params = SamplingParams(max_new_tokens=rng.randrange(4, 60), ignore_eos=True, **options)
        request = watched.llm.make_request(prompt, params)
        watched.executor.enqueue(request)
        started.append((prompt, request, options))
        watched.run(rng.randrange(1, 20))
    watched.run()
    assert set(watched.lengths) == {0, 1, 2, K}
    assert watched.executor.num_preemptions > 0
    compared = {1: 0, 2: 0, K: 0}
    for prompt, request, options in started:
        output = prompt + oracle.greedy(prompt, request.params.max_new_tokens)
        assert request.tokens == output
        for before, num_emitted, drafted in watched.results.get(request.request_id, ()):
            most = 0 if "speculate" in options else options.get("max_draft_len", K)
            assert drafted <= most
            if drafted:
                drafts = oracle.fresh(tuple(output[:before])).drafts[:drafted]
                right = next(
                    (i for i in range(drafted) if drafts[i] != output[before + i]), drafted
                )
                assert num_emitted == min(right + 1, len(output) - before)
                compared[drafted] += 1
    assert min(compared.values()) > 2


def test_adaptive_length_measures_generation_steps(harness, prompts, monkeypatch):
    monkeypatch.setattr(gain, "WORTH_TRYING", 1.0)  # a new batch size tries every length
    llm = harness.llm(mtp={"adaptive_draft_len": True})
    llm.generate(prompts[:1], greedy(100))
    (shape,) = llm.pieces.draft_lengths.gain._shapes.values()
    assert shape.times._times.keys() == set(range(K + 1))
    assert all(0 < shape.times.of(k) < 10 for k in range(K + 1))


# --- shorter steps with the other options ---


def run_waves(watched, waves, seed: int):
    """(prompt, request) of waves of (requests, tokens), six steps apart, run to the end."""
    prompts = iter(random_prompts(sum(count for count, _ in waves), seed))
    started = []
    for count, num_tokens in waves:
        wave = [next(prompts) for _ in range(count)]
        started += zip(wave, watched.enqueue(wave, num_tokens), strict=True)
        watched.run(6)
    watched.run()
    return started


def test_shorter_steps_than_the_window_change_no_text(harness, target):
    """Windows longer than the step, prompts shorter than the window, chunks in the same batch."""
    watched = Watched(
        harness.llm(
            vanilla=True,
            speculative={"draft_len_schedule": {2: K, 4: 2, 5: 1}},
            mtp={"keep_warm": False, "draft_window": "exact", "chain": "target_shift"},
            chunk_policy=lambda _, limit: min(limit, 2),
            kv_fill=float("nan"),
        )
    )
    waves = [(2, 40), (2, 20), (1, 16), (2, 12), (0, 0)]
    for prompt, request in run_waves(watched, waves, seed=6):
        assert request.output_token_ids == target.greedy(prompt, request.params.max_new_tokens)
    assert set(watched.lengths) >= {0, 1, 2, K}


RELAXED = {
    "use_relaxed_acceptance_for_thinking": True,
    "relaxed_topk": 1,
    "relaxed_delta": 0.0,
    "begin_thinking_phase_token": 5,
    "end_thinking_phase_token": 6,
}


def test_the_phase_is_followed_in_steps_without_drafts(harness, target):
    prompt = [5, 9, 40]
    truth = target.greedy(prompt, 12)
    assert 5 not in truth
    ends = {**RELAXED, "end_thinking_phase_token": truth[4]}
    llm = harness.llm(
        disable_overlap_scheduler=True,
        speculative={"draft_len_schedule": {1: K}, **ends},
    )
    watched = Watched(llm)
    request, _ = watched.enqueue([prompt, [7, 8]], 12)
    thought = {}
    while llm.executor.has_work:
        watched.run(1)
        if not request.is_finished:
            slot = llm.pieces.manager.slot_manager.get_slot(request.request_id)
            thought[request.get_num_tokens() - len(prompt)] = bool(
                llm.pieces.manager.table.column("thinking")[slot]
            )
    assert set(watched.lengths) == {0}
    assert thought == {count: count <= truth.index(truth[4]) for count in range(1, 12)}


def test_draws_fall_for_the_drafts_of_the_step(harness):
    """Forced to accept everything: a step of K' drafts emits K'+1 tokens, one of none emits one."""
    watched = Watched(
        harness.llm(
            speculative={"draft_len_schedule": {1: K, 2: 1}},
            mtp={
                "verification": "synthetic",
                "synthetic_acceptance": [1.0, 1.0, 1.0],
            },
        )
    )
    started = run_waves(watched, [(1, 40), (1, 12), (2, 8), (0, 0)], seed=8)
    seen = set()
    for prompt, request in started:
        for before, num_emitted, drafted in watched.results[request.request_id]:
            room = len(prompt) + request.params.max_new_tokens - before
            assert num_emitted == min(drafted + 1, room)
            seen.add(drafted)
    assert seen >= {0, 1, K}


def test_requests_hold_only_what_a_shorter_step_drafted(harness):
    watched = Watched(
        harness.llm(
            disable_overlap_scheduler=True, speculative={"draft_len_schedule": {1: K, 2: 1}}
        )
    )
    many = ((1, 40), (1, 20), (2, 8))
    requests = [r for n, length in many for r in watched.enqueue(random_prompts(n, 9), length)]
    held = set()
    while watched.executor.has_work:
        watched.run(1)
        for request in requests:
            if request.is_finished:
                assert request.py_draft_tokens == []
            elif request.py_decoding_iter > 1:
                assert all(0 <= draft < VOCAB for draft in request.py_draft_tokens)
                held.add(len(request.py_draft_tokens))
                assert 0 <= request.py_rewind_len <= K
    assert held >= {0, 1, K}


def test_a_plugin_without_workers_of_its_own_for_shorter_steps(harness, target):
    """Every step has K rows, of which the controller lets requests verify fewer."""
    llm = harness.llm(
        speculative={"draft_len_schedule": {2: K, 4: 1}},
        kv_fill=float("nan"),
    )
    engine = llm.executor.engine
    engine.captured = None  # captured with the workers that are taken away
    engine.pieces = dataclasses.replace(engine.pieces, shorter_steps=False)
    assert engine.pieces.draft_lens() == (K,)
    watched = Watched(llm)
    for prompt, request in run_waves(watched, [(2, 24), (2, 10), (2, 8), (0, 0)], seed=7):
        assert request.output_token_ids == target.greedy(prompt, request.params.max_new_tokens)
    seen = {drafted for steps in watched.results.values() for *_, drafted in steps}
    assert seen >= {0, 1, K}


def test_what_a_request_has_drafted_survives_preemptions(harness, prompts):
    """Of greedy and sampled requests."""
    requested = [1, 0, 1, 2, 1, 0, 1, 2]
    params = [
        SamplingParams(
            max_new_tokens=32, ignore_eos=True, max_draft_len=most, temperature=0.7 * (place % 2)
        )
        for place, most in enumerate(requested)
    ]
    mtp = {"verification": "rejection", "draft_sampling": "plain"}
    llm = harness.llm(mtp=mtp, **TIGHT)
    outputs = llm.generate(prompts, params)
    assert llm.executor.num_preemptions > 0
    assert_drained(llm)
    for output, most in zip(outputs, requested, strict=True):
        stats = output.acceptance
        assert stats.num_drafted <= most * stats.steps
        assert (stats.num_drafted > 0) == (most > 0)
        assert sum(stats.histogram[most + 2 :]) == 0
