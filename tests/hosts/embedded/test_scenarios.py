"""What broke real engines, each scenario by its name, through the embedded executor."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mtp_plugin.errors import PluginError, RequestError
from mtp_plugin.hosts.embedded import SamplingParams, build
from mtp_plugin.hosts.embedded.call import Call
from mtp_plugin.hosts.embedded.scheduler import ScheduledRequests
from mtp_plugin.infer import decode
from mtp_plugin.requests.states import CUDA_GRAPH_DUMMY_REQUEST_ID, FinishReason
from mtp_plugin.speculative import plugin
from tests.greedy import greedy_decode
from tests.hosts.embedded.conftest import (
    LOOPS,
    VOCAB,
    WORKERS,
    assert_drained,
    assert_idle,
    enqueue,
    pads_batches,
    run_steps,
    watch_worker,
    wrap_worker,
)
from tests.hosts.embedded.oracles import ScriptedDrafts
from tests.hosts.embedded.test_llm_api import Pieces


def greedy(**options) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 16, "ignore_eos": True, **options})


def script(llm, sequences, accept) -> None:
    """Put drafts with a known acceptance into the executor."""
    wrap_worker(llm, lambda worker: ScriptedDrafts(worker, sequences, accept))


def edit_batches(llm, edit) -> None:
    """Let ``edit(batch)`` change what each step runs."""
    schedule = llm.executor.scheduler.schedule

    def edited(in_flight):
        batch = schedule(in_flight)
        edit(batch)
        return batch

    llm.executor.scheduler.schedule = edited


def padded_to(*sizes: int) -> dict:
    """Every graph is captured at the start: a later capture is a step of padding rows as well."""
    return {
        "batch_sizes": list(sizes),
        "enable_padding": True,
        "capture": "all",
        "prompt_tokens": [],
    }


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("new_tokens_lens", 0, "the worker returned no token"),
        ("new_tokens", -5, "the worker returned token -5 for the request"),
        ("status", 9, "the worker returned status 9 for the request"),
        (None, [], "the step gave the request no token"),
    ],
)
def test_step_without_tokens_ends_its_requests(harness, prompts, no_overlap, name, value, message):
    """Whichever component of a plugin returns nothing, generate() does not loop forever."""
    llm = harness.llm(disable_overlap_scheduler=no_overlap)
    if name is not None:

        def spoil(step, outputs):
            outputs[name][step["attn_metadata"].num_contexts :] = value

        watch_worker(llm, after=spoil)
    else:
        llm.executor.sampler.update_requests = lambda _: value
    for output in llm.generate(prompts[:2], greedy(max_new_tokens=8)):
        assert output.finish_reason == "error"
        assert output.error.startswith(message)
    assert_drained(llm)


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize(
    ("method", "result", "message"),
    [
        ("worker", None, "worker: expected a dict of the step's tensors, got None"),
        ("sample_async", None, "sampler: sample_async: expected a state with device, got None"),
        ("update_requests", None, "sampler: update_requests: expected StepResults, got None"),
        ("update_requests", [3], r"sampler: update_requests: expected StepResults, got \[3\]"),
    ],
)
def test_component_without_result_is_a_named_error(
    harness, prompts, no_overlap, method, result, message
):
    llm = harness.llm(disable_overlap_scheduler=no_overlap)
    if method == "worker":
        llm.executor.engine._early_tokens = False  # as with the sampler of another plugin
        wrap_worker(llm, lambda _: lambda **__: result)
    else:
        setattr(llm.executor.sampler, method, lambda *_: result)
    with pytest.raises(PluginError, match=message):
        llm.generate(prompts[:2], greedy(max_new_tokens=8))
    assert_drained(llm)


@pytest.mark.parametrize("metadata", [None, {}])
def test_metadata_of_another_type_is_a_named_error(harness, monkeypatch, metadata):
    def build_pieces(*args):
        return replace(plugin.build_pieces(*args), make_metadata=lambda: metadata)

    monkeypatch.setattr(build, "build_pieces", build_pieces)
    with pytest.raises(PluginError, match=r"make_metadata\(\): expected an object with prepare"):
        harness.llm()


@pytest.mark.parametrize("vanilla", WORKERS)
@pytest.mark.parametrize("no_overlap", LOOPS)
def test_r02_acceptance_does_not_depend_on_the_batch(harness, vanilla, no_overlap):
    """R02: a batch of 12 and a batch of one, with graphs where the host has them: every step
    accepts the same drafts."""
    rng = random.Random(2)
    prompts = [[rng.randrange(VOCAB) for _ in range(1 + rng.randrange(30))] for _ in range(12)]
    outputs = {}
    for batch in (1, 12):
        options = {"max_batch_size": batch, "kv_cache_config": {"max_tokens": 64 * batch}}
        if "cuda_graph_config" in harness.host:
            options["cuda_graph_config"] = padded_to(batch)
        llm = harness.llm(vanilla=vanilla, disable_overlap_scheduler=no_overlap, **options)
        outputs[batch] = llm.generate(prompts, greedy())
        assert_drained(llm)
    for one, other in zip(outputs[1], outputs[12], strict=True):
        assert one.token_ids == other.token_ids
        assert one.acceptance == other.acceptance
    assert sum(o.acceptance.emitted - o.acceptance.steps for o in outputs[12]) > 12


@pytest.mark.parametrize("vanilla", WORKERS)
@pytest.mark.parametrize("no_overlap", LOOPS)
def test_r06_padding_rows_never_reach_requests(harness, target, prompts, vanilla, no_overlap):
    """R06: five live rows padded to eight: five updates, counters equal emitted tokens."""
    pads_batches(harness)
    llm = harness.llm(
        vanilla=vanilla,
        disable_overlap_scheduler=no_overlap,
        cuda_graph_config=padded_to(1, 2, 4, 8),
    )
    padded = []
    watch_worker(
        llm,
        lambda step: padded.append(
            list(step["spec_metadata"].request_ids).count(CUDA_GRAPH_DUMMY_REQUEST_ID)
        ),
    )
    outputs = llm.generate(prompts[:5], greedy())
    assert [o.token_ids for o in outputs] == [target.greedy(p, 16) for p in prompts[:5]]
    assert max(padded) == 3
    emitted = sum(len(o.token_ids) for o in outputs)
    # the first token of each request comes from its prompt step
    assert llm.executor.acceptance.emitted == emitted - len(outputs)
    assert_drained(llm)


def test_r07_any_order_of_rows_gives_the_same_tokens(harness, target, prompts):
    """R07: under overlap predecessors are found by slot, whatever the order of the batch."""
    llm = harness.llm()
    edit_batches(llm, lambda batch: batch.generation_requests.reverse())
    outputs = llm.generate(prompts, greedy())
    assert [o.token_ids for o in outputs] == [target.greedy(p, 16) for p in prompts]


def test_r08_slots_and_blocks_survive_churn(harness, target, prompts):
    """R08: many short requests with aborts; nothing leaks, double free changes nothing."""
    llm = harness.llm(k=1, max_batch_size=4)
    for round_ in range(15):
        stream = llm.stream([p[:3] for p in prompts], greedy(max_new_tokens=3))
        for steps, _ in enumerate(stream):
            if steps == round_ % 5:
                break
        stream.close()
        assert_drained(llm)
    assert llm.generate([prompts[3]], greedy())[0].token_ids == target.greedy(prompts[3], 16)


def test_r10_parked_slots_stay_as_they_are(harness, prompts):
    """R10: padding rows write to the sentinel slot, never to a request outside the batch."""
    pads_batches(harness)
    llm = harness.llm(
        vanilla=True,
        max_batch_size=4,
        disable_overlap_scheduler=True,
        cuda_graph_config=padded_to(4),
    )
    requests = enqueue(llm, prompts[3:6], greedy())
    llm.executor.step()
    manager, parked = llm.pieces.manager, requests[1]
    slot = manager.slot_manager.get_slot(parked.request_id)
    edit_batches(llm, lambda batch: batch.generation_requests.remove(parked))
    before = (
        manager.mtp_past_hidden_states_pool[slot].clone(),
        manager.mtp_past_tokens_pool[slot].clone(),
    )
    for _ in range(3):
        llm.executor.step()
    assert torch.equal(manager.mtp_past_hidden_states_pool[slot], before[0])
    assert torch.equal(manager.mtp_past_tokens_pool[slot], before[1])
    assert len(requests[0].output_token_ids) > 3
    llm.shutdown()


@pytest.mark.parametrize("vanilla", WORKERS)
def test_r12_late_results_of_a_preempted_request_are_dropped(harness, target, prompts, vanilla):
    """R12: preempted with a step in flight, admitted again: as if never preempted."""
    llm = harness.llm(vanilla=vanilla)
    requests = enqueue(llm, prompts[3:6], greedy())
    for _ in range(4):
        llm.executor.step()
    scheduler, victim = llm.executor.scheduler, requests[1]
    known = len(victim.tokens)
    schedule = scheduler.schedule

    def preempt_once(in_flight):
        assert victim.request_id in in_flight  # its step is running
        scheduler.schedule = schedule
        batch = schedule(in_flight)
        scheduler._pause(victim, batch)
        return batch

    scheduler.schedule = preempt_once
    llm.executor.step()
    assert len(victim.tokens) == known  # the late frame was dropped
    assert victim.py_draft_tokens == []
    run_steps(llm)
    for request, prompt in zip(requests, prompts[3:6], strict=True):
        assert request.output_token_ids == target.greedy(prompt, 16)
    assert_drained(llm)


@pytest.mark.parametrize("vanilla", WORKERS)
def test_r13_a_skipped_request_goes_on_with_fresh_inputs(harness, target, prompts, vanilla):
    """R13: left out of some steps under overlap; no placeholder reaches the model."""
    llm = harness.llm(vanilla=vanilla)
    counts, lowest = itertools.count(1), []

    def skip_one(batch):
        count = next(counts)
        if len(batch.generation_requests) > 1:
            del batch.generation_requests[count % len(batch.generation_requests)]

    edit_batches(llm, skip_one)
    watch_worker(llm, lambda step: lowest.append(int(step["input_ids"].min())))
    outputs = llm.generate(prompts, greedy())
    assert [o.token_ids for o in outputs] == [target.greedy(p, 16) for p in prompts]
    assert min(lowest) >= 0


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_r14_cancel_between_launch_and_result(harness, target, prompts, no_overlap, after):
    """R14: a clean end, everything freed, no token after the cancel, others undisturbed."""
    llm = harness.llm(disable_overlap_scheduler=no_overlap)
    requests = enqueue(llm, prompts[3:6], greedy())
    for _ in range(after):
        llm.executor.step()
    victim = requests[1]
    had = list(victim.output_token_ids)
    assert llm.executor.cancel(victim.request_id)
    assert not llm.executor.cancel(victim.request_id)
    events = run_steps(llm)
    mine = [e for e in events if e.request_id == victim.request_id]
    assert [e.finish_reason for e in mine] == [FinishReason.CANCELLED]
    assert victim.output_token_ids == had
    for i in (0, 2):
        assert requests[i].output_token_ids == target.greedy(prompts[3 + i], 16)
    assert_drained(llm)


@pytest.mark.parametrize("vanilla", WORKERS)
def test_r16_the_token_budget_is_never_exceeded(harness, target, prompts, vanilla):
    """R16: chunked prefill near max_num_tokens; generations count K+1 rows, chunks their
    history."""
    llm = harness.llm(vanilla=vanilla, max_num_tokens=32, max_batch_size=8)
    totals = []
    k = 3

    def look(step):
        attention = step["attn_metadata"]
        cached = attention.kv_cache_params.num_cached_tokens_per_seq
        history = sum(min(k, c) for c in cached[: attention.num_contexts]) if vanilla else 0
        totals.append(int(step["input_ids"].numel()) + history)

    watch_worker(llm, look)
    outputs = llm.generate(prompts, greedy())
    assert [o.token_ids for o in outputs] == [target.greedy(p, 16) for p in prompts]
    assert max(totals) <= 32


@pytest.mark.parametrize("vanilla", WORKERS)
def test_r21_block_boundaries(harness, target, vanilla):
    """R21: prompt lengths around a block's end: every offset gives the same text."""
    rng = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, VOCAB, (n,), generator=rng).tolist() for n in (12, 15, 16, 17, 20)]
    want = [target.greedy(p, 16) for p in prompts]
    for block in (1, 4, 16):
        llm = harness.llm(
            vanilla=vanilla, kv_cache_config={"tokens_per_block": block, "max_tokens": 1024}
        )
        outputs = llm.generate(prompts, greedy())
        assert [o.token_ids for o in outputs] == want


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("vanilla", WORKERS)
def test_r22_one_new_token(harness, target, prompts, no_overlap, vanilla):
    """R22: max_new_tokens = 1 emits exactly one token, once."""
    llm = harness.llm(vanilla=vanilla, disable_overlap_scheduler=no_overlap)
    events = [e for step in llm.stream(prompts, greedy(max_new_tokens=1)) for e in step]
    assert len(events) == len(prompts)
    for event in events:
        assert event.token_ids == target.greedy(prompts[event.request_id], 1)
        assert event.finish_reason is FinishReason.LENGTH
    assert_drained(llm)


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize(("k", "is_eos"), [(3, False), (5, True)], ids=["stop-id", "eos"])
def test_r23_end_token_inside_an_accepted_run(
    harness, target, prompts, monkeypatch, no_overlap, k, is_eos
):
    """R23: nothing after an end token is emitted or counted."""
    prompt = prompts[4]
    truth = target.greedy(prompt, 24 + k)
    llm = harness.llm(k=k, disable_overlap_scheduler=no_overlap)
    script(llm, {0: prompt + truth}, lambda *_: k)
    # all drafts are right: runs of K+1 tokens; a token new to the text ends the third of its run
    position = next(i for i in range(3, 20) if truth[i] not in truth[:i] and (i - 1) % (k + 1) == 2)
    ends = (truth[position],)
    if is_eos:  # as if the checkpoint named it
        admission = llm._admission
        monkeypatch.setattr(admission, "_facts", replace(admission._facts, eos_token_ids=ends))
        params = SamplingParams(max_new_tokens=24)
    else:
        params = greedy(max_new_tokens=24, stop_token_ids=ends)
    output = llm.generate([prompt], params)[0]
    assert output.token_ids == truth[: position + 1]
    assert output.finish_reason == "stop"
    histogram = [0] * (k + 2)
    histogram[k + 1] = (position - 1) // (k + 1)
    histogram[3] += 1
    assert output.acceptance.histogram == histogram
    assert_drained(llm)


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_r23_penalties_count_nothing_after_an_end(harness, prompts, no_overlap):
    """R23: nor does who gets its row next. All drafts are right; the end is inside a run."""
    model, k, length = harness.oracle_model.target, 3, 20
    requested = {"frequency_penalty": 0.9, "repetition_penalty": 1.2, "max_new_tokens": length}
    free = greedy(**requested)
    truths = [decode(model, prompt, free).token_ids for prompt in prompts[:4]]
    llm = harness.llm(k=k, disable_overlap_scheduler=no_overlap, max_batch_size=1)
    script(llm, dict(enumerate(map(list.__add__, prompts[:4], truths))), lambda *_: k)
    params, wanted = [], []
    for truth in truths:
        end = next(i for i in range(3, 16) if truth[i] not in truth[:i] and (i - 1) % (k + 1) == 2)
        params.append(greedy(**requested, stop_token_ids=(truth[end],)))
        wanted.append(truth[: end + 1])
    outputs = llm.generate(prompts[:4], params)
    assert [output.token_ids for output in outputs] == wanted
    assert all(output.finish_reason == "stop" for output in outputs)
    assert_drained(llm)


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_r24_a_stop_and_a_limit_in_one_run(harness, target, prompts, no_overlap):
    """R24: the earlier one names the finish reason, and on one token the stop does."""
    prompt, k = prompts[4], 5
    truth = target.greedy(prompt, 24)
    position = next(
        i for i in range(3, 12) if truth[i] not in truth[:i] and truth[i + 1] != truth[i]
    )
    stop = (truth[position],)
    for limit, count, reason in (
        (position + 3, position + 1, "stop"),
        (position + 1, position + 1, "stop"),
        (position, position, "length"),
    ):
        llm = harness.llm(k=k, disable_overlap_scheduler=no_overlap)
        script(llm, {0: prompt + truth}, lambda *_: k)
        output = llm.generate([prompt], greedy(max_new_tokens=limit, stop_token_ids=stop))[0]
        assert output.token_ids == truth[:count]
        assert output.finish_reason == reason


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("vanilla", WORKERS)
def test_r25_min_tokens(harness, target, prompts, no_overlap, vanilla):
    """R25: a stop id is masked at every verified position until min_tokens are out."""
    rng = random.Random(25)
    for place in (1, 6):  # of the stop id; drafts are right, so the second lies inside a run
        while True:
            prompt = [rng.randrange(VOCAB) for _ in range(6)]
            free = target.greedy(prompt, 30)
            if free[place] not in free[:place]:
                break
        ends = {"eos_token_ids": (free[place],)}
        for min_tokens in (place, place + 1) if place == 1 else (place + 1, place + 4):
            want = greedy_decode(
                harness.oracle_model.target, prompt, 20, **ends, min_tokens=min_tokens
            )
            assert (len(want) == place + 1) == (min_tokens <= place)
            llm = harness.llm(k=3, vanilla=vanilla, disable_overlap_scheduler=no_overlap)
            script(llm, {0: prompt + free}, lambda *_: 3)
            params = greedy(max_new_tokens=20, stop_token_ids=(free[place],), min_tokens=min_tokens)
            outputs = llm.generate([prompt, prompts[5]], [params, greedy()])
            assert outputs[0].token_ids == want
            assert outputs[1].token_ids == target.greedy(prompts[5], 16)


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("include", [False, True])
def test_r26_a_stop_string_over_two_accepted_runs(harness, target, prompts, no_overlap, include):
    """R26: found by the text, whatever runs its tokens come in; the stream is the full text."""
    prompt, tokenizer = prompts[4], Pieces()
    truth = target.greedy(prompt, 24)
    text = tokenizer.decode(truth, skip_special_tokens=True)
    # after the prompt's token runs of four: the string begins in one and ends in the next
    ends = [len(tokenizer.decode(truth[:n], skip_special_tokens=True)) for n in range(24)]
    first = next(
        n for n in (3, 7, 11) if text.index(text[ends[n] : ends[n + 3]]) == ends[n] < ends[n + 2]
    )
    stop = text[ends[first] : ends[first + 3]]
    llm = harness.llm(k=3, tokenizer=tokenizer, disable_overlap_scheduler=no_overlap)
    script(llm, {0: prompt + truth}, lambda *_: 3)
    params = greedy(max_new_tokens=24, stop=(stop,), include_stop_str_in_output=include)
    (request,) = llm.make_requests([prompt], [params])
    events = [event for step in llm._read(Call.of([request])) for event in step]
    assert max(len(event.token_ids) for event in events) == 4
    assert [token for event in events for token in event.token_ids] == truth[: first + 3]
    assert request.finish_reason is FinishReason.STOP_WORDS
    want = text[: ends[first + 3]] if include else text[: ends[first]]
    assert "".join(event.text for event in events) == request.text.full_text == want
    assert_drained(llm)


def test_r31_refused_before_the_stream_with_every_reason(harness, target, prompts):
    """R31: unsupported options are all reported at the call, and nothing was started."""
    llm = harness.llm()
    params = greedy(
        best_of=2,
        use_beam_search=True,
        no_repeat_ngram_size=3,
        logits_processor=[print],
        guided_decoding={"json": {}},
        stop=("x",),
        stop_token_ids=(VOCAB,),
    )
    message = (
        "not supported: best_of=2 is not enabled; write n, and choose among outputs by their "
        "cumulative_logprob, use_beam_search=True, no_repeat_ngram_size=3, "
        f"logits_processor={[print]!r}, guided_decoding={{'json': {{}}}}, "
        "stop=('x',) (the checkpoint has no tokenizer.json), "
        f"stop_token_ids: {VOCAB} is outside the vocabulary of {VOCAB}"
    )
    calls = [
        lambda: llm.generate(prompts[0], params),
        lambda: llm.stream(prompts[0], params),
        lambda: llm.stream_async(prompts[0], params),
        lambda: llm.make_request(prompts[0], params),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(RequestError) as caught:
            call()
        assert str(caught.value) == f"request {number}: {message}"
        assert_idle(llm)
    with pytest.raises(RequestError) as caught:
        llm.stream(prompts[:3], [greedy(), params, greedy()])
    assert str(caught.value) == f"prompt 2 of 3: {message}"
    assert llm.executor.num_steps == 0
    assert_drained(llm)
    assert llm.generate([prompts[3]], greedy())[0].token_ids == target.greedy(prompts[3], 16)


THINKING = {
    "speculative": {
        "use_relaxed_acceptance_for_thinking": True,
        "relaxed_topk": 4,
        "relaxed_delta": 0.9,
        "begin_thinking_phase_token": 5,
        "end_thinking_phase_token": 6,
    },
    "disable_overlap_scheduler": True,
}


def preempt(llm, request) -> None:
    """Pause the request; it is not scheduled before the next step."""
    llm.executor.scheduler._pause(request, ScheduledRequests())
    llm.executor.resources.free_resources(request)


def test_r34_the_phase_survives_chunks(harness, prompts):
    """R34: the thinking phase is read from the whole prompt, whatever its chunks."""
    plain_tokens = [t for t in prompts[6] if t not in (5, 6)]
    for prompt, thinks in (
        ([5, *plain_tokens], True),
        ([*plain_tokens[:4], 5, 6, *plain_tokens[4:]], False),
        ([6, *plain_tokens[:9], 5], True),
        (plain_tokens, False),
    ):
        for chunk in (4, 100):
            llm = harness.llm(
                chunk_policy=lambda _, limit, chunk=chunk: min(limit, chunk), **THINKING
            )
            (request,) = enqueue(llm, [prompt], greedy(max_new_tokens=8))
            while not request.output_token_ids:
                llm.executor.step()
            manager = llm.pieces.manager
            slot = manager.slot_manager.get_slot(request.request_id)
            emitted = request.output_token_ids[0]
            expected = {5: True, 6: False}.get(emitted, thinks)
            assert bool(manager.table.column("thinking")[slot]) is expected
            preempt(llm, request)
            run_steps(llm)
            assert_drained(llm)


@pytest.mark.thinned("chunk")
@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize(
    ("began", "said", "thinks"),
    [(False, 5, True), (True, 6, False), (True, 9, True), (False, 9, False)],
    ids=["begins", "ends", "thinks-on", "stays-out"],
)
def test_r34_the_phase_survives_a_preemption(harness, prompts, began, said, thinks, chunk):
    """R34: what was emitted before counts as prompt when a request starts over."""
    plain_tokens = [t for t in prompts[6] if t not in (5, 6)]
    llm = harness.llm(chunk_policy=lambda _, limit: min(limit, chunk), **THINKING)
    manager = llm.pieces.manager
    worker = SimpleNamespace(token=None, phases=[])

    def say(step):
        """Keep the phases of prompts, and let the target choose one token in every row."""
        if step["attn_metadata"].num_contexts:
            slot = int(step["spec_metadata"].slot_ids[0])
            worker.phases.append(bool(manager.table.column("thinking")[slot]))
        if worker.token is not None:
            step["logits"] = torch.zeros_like(step["logits"])
            step["logits"][:, worker.token] = 1.0

    watch_worker(llm, say)
    prompt = [5, *plain_tokens] if began else plain_tokens
    (request,) = enqueue(llm, [prompt], greedy(max_new_tokens=12))
    worker.token = said
    while not request.output_token_ids:
        llm.executor.step()
    worker.token = 9
    assert set(worker.phases) == {began}
    for _ in range(2):  # further tokens may follow the one that counts
        preempt(llm, request)
        assert manager.slot_manager.get_slot(request.request_id) is None
        worker.phases.clear()
        while not request.is_generating:
            llm.executor.step()
        # as set in the slot, through every chunk
        assert worker.phases == [thinks] * -(-request.context_length // chunk)
        slot = manager.slot_manager.get_slot(request.request_id)
        assert bool(manager.table.column("thinking")[slot]) is thinks
        delta = float(manager.mtp_relaxed_delta_pool[slot])
        assert delta == (pytest.approx(0.9) if thinks else 0.0)
    assert request.output_token_ids == [said, 9, 9]
    run_steps(llm)
    assert_drained(llm)


def test_r34_relaxed_runs_accept_more_and_only_while_thinking(harness, target, prompts):
    """R34: outside the phase the text is the strict one; inside it more drafts are accepted."""
    options = {**THINKING["speculative"], "relaxed_topk": 10}
    clean = [[t for t in p if t not in (5, 6)] or [7] for p in prompts]
    strict = harness.llm()
    strict.generate([[5, *p] for p in clean], greedy(max_new_tokens=40))
    relaxed = harness.llm(speculative=options)
    relaxed.generate([[5, *p] for p in clean], greedy(max_new_tokens=40))
    gain = relaxed.executor.acceptance.acceptance_length
    assert gain > 1.1 * strict.executor.acceptance.acceptance_length
    closed = harness.llm(speculative=options)
    ended = [[5, 6, *p] for p in clean]
    outputs = closed.generate(ended, greedy())
    for output, prompt in zip(outputs, ended, strict=True):
        want = target.greedy(prompt, 16)
        cut = want.index(5) + 1 if 5 in want else len(want)  # thinking again ends the guarantee
        assert output.token_ids[:cut] == want[:cut]
    opted_out = harness.llm(speculative=options)
    outputs = opted_out.generate([[5, *p] for p in clean], greedy(relaxed_acceptance=False))
    assert [o.token_ids for o in outputs] == [target.greedy([5, *p], 16) for p in clean]


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("vanilla", WORKERS)
def test_r41_near_the_context_limit(harness, target, prompts, no_overlap, vanilla):
    """R41: only the request near max_seq_len shortens its drafts; the others are unaffected."""
    limit, k = 32, 3
    for room in (1, 2, k + 1, k + 3):
        rng = torch.Generator().manual_seed(room)
        long = torch.randint(0, VOCAB, (limit - room,), generator=rng).tolist()
        llm = harness.llm(
            k=k,
            vanilla=vanilla,
            disable_overlap_scheduler=no_overlap,
            max_seq_len=limit,
            kv_fill=float("nan"),
        )
        highest = []
        watch_worker(llm, lambda step, seen=highest: seen.append(int(step["position_ids"].max())))
        outputs = llm.generate([long, prompts[3], prompts[4]], greedy())
        assert outputs[0].token_ids == target.greedy(long, room)
        assert outputs[0].finish_reason == "length"
        assert outputs[1].token_ids == target.greedy(prompts[3], 16)
        assert outputs[2].token_ids == target.greedy(prompts[4], 16)
        assert max(highest) < limit
        assert_drained(llm)


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("right", [(0,), (2,), (3,), (1, 3)])
def test_r48_counters_equal_emitted_tokens(harness, target, prompts, no_overlap, right):
    """R48: an oracle drafter with a set error rate gives exact numbers."""
    prompt, steps = prompts[5], 6
    truth = target.greedy(prompt, 64)
    llm = harness.llm(k=3, disable_overlap_scheduler=no_overlap)
    calls = itertools.cycle(right)
    script(llm, {0: prompt + truth}, lambda *_: next(calls))
    mean = sum(right) / len(right)
    count = 1 + round(steps * (mean + 1))
    output = llm.generate([prompt], greedy(max_new_tokens=count))[0]
    assert output.token_ids == truth[:count]
    stats = output.acceptance
    # the last step may be cut short by the request's length, never longer
    assert (stats.steps, stats.emitted, stats.acceptance_length) == (steps, count - 1, mean + 1)
    assert stats.per_position == [sum(n > i for n in right) / len(right) for i in range(3)]
    assert llm.executor.acceptance.histogram == stats.histogram


def test_dead_logits_end_one_request_alone(harness, target, prompts):
    """A row without any finite value fails its request; the batch goes on."""
    llm = harness.llm(disable_overlap_scheduler=True)
    steps = 0

    def poison(step):
        nonlocal steps
        steps += 1
        if steps == 3:
            step["logits"][4:8] = float("nan")

    watch_worker(llm, poison)
    outputs = llm.generate(prompts[3:6], greedy())
    assert outputs[1].finish_reason == "error"
    assert outputs[1].token_ids == target.greedy(prompts[4], 16)[: len(outputs[1].token_ids)]
    for i in (0, 2):
        assert outputs[i].token_ids == target.greedy(prompts[3 + i], 16)
    assert_drained(llm)
