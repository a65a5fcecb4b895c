"""Log-probabilities are the target's own: whatever K, worker, loop, chunks, pressure or stops."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest
import torch

from mtp_plugin.hosts.embedded import SamplingParams, prompt_logprobs
from mtp_plugin.requests.logprobs import ENTRY_WIDTH, Logprob
from mtp_plugin.speculative.drafting import worker as worker_module
from tests.hosts.embedded.conftest import (
    LOOPS,
    VOCAB,
    WORKERS,
    assert_drained,
    assert_idle,
    pads_batches,
)
from tests.hosts.embedded.replays import WatchedGraphs
from tests.hosts.embedded.test_llm_api import Pieces
from tests.hosts.embedded.test_sampling import OPTIONS

NUM_TOKENS = 16
TOLERANCE = 1e-4
REQUESTED = (5, None, 0, 20, 1)
TIGHT = {"max_num_tokens": 36, "kv_cache_config": {"max_tokens": 96}, "kv_fill": float("nan")}
"""Prompts come in chunks, and requests give way to each other."""


def params_of(place: int, **more) -> SamplingParams:
    """Every second request samples, one in five requests no log-probabilities."""
    options = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": REQUESTED[place % 5]}
    sampled = {**OPTIONS[place], "seed": place} if place % 2 else {}
    return SamplingParams(**{**options, **sampled, **more})


@torch.inference_mode()
def distribution(target, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities after every token of a text [len(tokens), V], by the target alone."""
    logits = target.model.lm_head(target.states(tuple(tokens)))
    return torch.log_softmax(logits.float(), dim=-1).cpu()


def decode(tokenizer, token: int) -> str:
    return tokenizer.decode([token], skip_special_tokens=False)


def check_logprobs(reported, row: torch.Tensor, token: int, number: int, tokenizer=None) -> None:
    """One token's mapping, against the distribution that it came from."""
    order = row.argsort(descending=True, stable=True).tolist()
    assert list(reported) == [token, *(other for other in order[:number] if other != token)]
    for other, (value, rank, text) in reported.items():
        assert value == pytest.approx(float(row[other]), abs=TOLERANCE)
        assert rank == order.index(other) + 1
        assert text == (None if tokenizer is None else decode(tokenizer, other))


def check(target, output, requested: SamplingParams, tokenizer=None) -> None:
    """Everything that an output reports."""
    prompt, text = output.prompt_token_ids, output.token_ids
    rows = distribution(target, [*prompt, *text])
    if requested.logprobs is None:
        assert output.logprobs is None
    else:
        assert len(output.logprobs) == len(text)
        for place, (reported, token) in enumerate(zip(output.logprobs, text, strict=True)):
            row = rows[len(prompt) - 1 + place]
            check_logprobs(reported, row, token, requested.logprobs, tokenizer)
    if requested.prompt_logprobs is None:
        assert output.prompt_logprobs is None
    else:
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        for place, reported in enumerate(output.prompt_logprobs):
            if place:
                number = requested.prompt_logprobs
                check_logprobs(reported, rows[place - 1], prompt[place], number, tokenizer)


def check_all(llm, target, prompts, params) -> list[list[int]]:
    outputs = llm.generate(prompts, params)
    assert_drained(llm)
    for output, requested in zip(outputs, params, strict=True):
        check(target, output, requested, llm.tokenizer)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("vanilla", WORKERS)
@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_log_probabilities_of_the_text(harness, target, prompts, no_overlap, vanilla, k):
    params = [params_of(place) for place in range(len(prompts))]
    llm = harness.llm(k=k, vanilla=vanilla, disable_overlap_scheduler=no_overlap)
    texts = check_all(llm, target, prompts, params)
    for prompt, text, requested in list(zip(prompts, texts, params, strict=True))[::2]:
        assert requested.is_greedy
        assert text == target.greedy(prompt, NUM_TOKENS)
    if k:
        assert llm.executor.acceptance.acceptance_length > 1.15


@pytest.mark.parametrize(
    "mtp",
    [
        {"verification": "rejection", "draft_sampling": "plain"},
        {"verification": "block", "draft_sampling": "plain"},
        {"verification": "synthetic", "synthetic_acceptance": 0.7},
    ],
    ids=["rejection", "block", "synthetic"],
)
@pytest.mark.parametrize("vanilla", WORKERS)
def test_log_probabilities_of_texts_of_other_modes(harness, target, prompts, vanilla, mtp):
    """The outputs differ from the target's own; its log-probabilities are reported all the same."""
    params = [params_of(place) for place in range(len(prompts))]
    llm = harness.llm(vanilla=vanilla, mtp=mtp)
    check_all(llm, target, prompts, params)
    assert llm.executor.acceptance.acceptance_length > 1.15


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("vanilla", WORKERS)
def test_chunks_and_preemption(harness, target, prompts, no_overlap, vanilla):
    params = [params_of(i, prompt_logprobs=(3, None, 0, 20)[i % 4]) for i in range(len(prompts))]
    llm = harness.llm(vanilla=vanilla, disable_overlap_scheduler=no_overlap, **TIGHT)
    check_all(llm, target, prompts, params)
    assert llm.executor.num_preemptions > 0


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_prompts_in_chunks(harness, target, prompts, chunk):
    """The last row of a chunk scores the first token of the next."""
    llm = harness.llm(chunk_policy=lambda _, most: min(chunk, most))
    params = [params_of(i, prompt_logprobs=2, max_new_tokens=3) for i in range(len(prompts))]
    check_all(llm, target, prompts, params)


def test_prompts_are_scored_once_and_a_tile_at_a_time(harness, target, prompts, monkeypatch):
    """What was reported before a preemption is not computed again."""
    monkeypatch.setattr(prompt_logprobs, "TILE_ROWS", 7)
    rows: list[int] = []
    honest = prompt_logprobs._entries

    def entries(logits, tokens, *args):
        assert logits.shape[0] == tokens.shape[0]
        rows.append(logits.shape[0])
        return honest(logits, tokens, *args)

    monkeypatch.setattr(prompt_logprobs, "_entries", entries)
    llm = harness.llm(**TIGHT)
    params = [params_of(i, prompt_logprobs=1) for i in range(len(prompts))]
    check_all(llm, target, prompts, params)
    assert llm.executor.num_preemptions > 0
    assert max(rows) == 7
    assert sum(rows) == sum(len(prompt) - 1 for prompt in prompts)


def test_logits_of_256_rows_exist_at_a_time(harness):
    """Of a prompt that a step reads whole."""
    rows: list[int] = []
    llm = harness.llm(max_seq_len=512, max_num_tokens=512)
    watch = harness.model.lm_head.register_forward_pre_hook(
        lambda _, args: rows.append(len(args[0]))
    )
    try:
        (output,) = llm.generate(
            [[token % VOCAB for token in range(400)]],
            SamplingParams(max_new_tokens=1, prompt_logprobs=0),
        )
    finally:
        watch.remove()
    assert len(output.prompt_logprobs) == 400
    assert max(rows) == 256
    assert 143 in rows


def test_a_prompt_keeps_nothing_of_its_batch_mates(harness, prompts):
    llm = harness.llm()
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=1)
    outputs = llm.generate(prompts[4:7], params)
    for prompt, output in zip(prompts[4:7], outputs, strict=True):
        (part,) = output.prompt_logprobs._scored._parts
        assert part._entries.untyped_storage().nbytes() == (len(prompt) - 1) * ENTRY_WIDTH * 4


@pytest.mark.parametrize("overlap", [True, False])
def test_a_prompt_that_gives_way_half_read(harness, target, prompts, overlap):
    """Its reported tokens stay, the others are scored when it starts over."""
    llm = harness.llm(
        disable_overlap_scheduler=not overlap, chunk_policy=lambda _, most: min(5, most)
    )
    (request,) = llm.make_requests([prompts[6]], [params_of(0, prompt_logprobs=4)])
    executor = llm.executor
    executor.enqueue(request)
    for _ in range(3):
        executor.step()
    before = len(request.prompt_logprobs)
    assert 1 < before < 33
    assert not request.is_generating
    scheduler = executor.scheduler
    scheduler.active.remove(request)
    scheduler.blocks.free_resources(request)
    request.pause()
    executor.resources.free_resources(request)
    scheduler.waiting.appendleft(request)
    reported = list(request.prompt_logprobs)
    while executor.has_work:
        executor.step()
    assert request.prompt_logprobs[:before] == reported
    output = SimpleNamespace(
        prompt_token_ids=prompts[6],
        token_ids=request.output_token_ids,
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
    )
    check(target, output, request.params)


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_stops_inside_runs(harness, target, prompts, no_overlap):
    """Nothing is reported of what a stop cuts off."""
    rng = random.Random(3)
    free = [target.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    params = [
        SamplingParams(
            max_new_tokens=NUM_TOKENS,
            logprobs=3,
            stop_token_ids=[rng.choice(text[2:])],
            min_tokens=4 * (place % 2),
            ignore_eos=True,
        )
        for place, text in enumerate(free)
    ]
    for k in (0, 3):
        llm = harness.llm(k=k, disable_overlap_scheduler=no_overlap)
        for _ in range(2):
            texts = check_all(llm, target, prompts, params)
        assert any(len(text) < NUM_TOKENS for text in texts)


@pytest.mark.parametrize("vanilla", WORKERS)
def test_stop_strings_inside_runs(harness, target, prompts, vanilla):
    tokenizer = Pieces()
    llm = harness.llm(vanilla=vanilla, tokenizer=tokenizer)
    free = [o.text for o in llm.generate(prompts, params_of(0))]
    params = [params_of(0, stop=(text[len(text) // 2 :][:3],)) for text in free]
    texts = check_all(llm, target, prompts, params)
    assert any(len(text) < NUM_TOKENS for text in texts)


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("k", [0, 3])
def test_events_report_the_same(harness, prompts, no_overlap, k):
    params = [params_of(place) for place in range(len(prompts))]
    llm = harness.llm(k=k, disable_overlap_scheduler=no_overlap)
    requests = llm.make_requests(prompts, params)
    for request in requests:
        llm.executor.enqueue(request)
    events = []
    while llm.executor.has_work:
        events += llm.executor.step()
    for request in requests:
        mine = [event for event in events if event.request_id == request.request_id]
        if request.logprobs is None:
            assert {event.logprobs for event in mine} == {None}
            continue
        for event in mine:
            assert [next(iter(reported)) for reported in event.logprobs] == event.token_ids
        assert [reported for event in mine for reported in event.logprobs] == request.logprobs
        assert len(request.logprobs) == NUM_TOKENS


def params_of_prompts(number: int) -> list[SamplingParams]:
    return [params_of(i, prompt_logprobs=(3, None, 0, 20)[i % 4]) for i in range(number)]


def check_first(events, output) -> None:
    """The first event reports the whole prompt, and no other does."""
    assert [event.prompt_logprobs for event in events[1:]] == [None] * (len(events) - 1)
    if output.prompt_logprobs is None:
        assert events[0].prompt_logprobs is None
    else:
        assert len(events[0].prompt_logprobs) == len(output.prompt_token_ids)
        assert events[0].prompt_logprobs == output.prompt_logprobs


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("way", ["stream", "stream_async", "submit"])
def test_prompts_are_reported_in_streams(harness, prompts, way, no_overlap):
    """The same as `generate` returns, when the first token comes: then the prompt was read."""
    params = params_of_prompts(len(prompts))
    llm = harness.llm(disable_overlap_scheduler=no_overlap, **TIGHT)
    outputs = llm.generate(prompts, params)

    async def read(events) -> list:
        return [(event, len(event.prompt_logprobs or ())) async for event in events]

    async def together() -> list[list]:
        start = llm.stream_async if way == "stream_async" else llm.submit
        return await asyncio.gather(
            *(
                read(start(prompt, requested))
                for prompt, requested in zip(prompts, params, strict=True)
            )
        )

    if way == "stream":
        reported: list[list] = [[] for _ in prompts]
        for events in llm.stream(prompts, params):
            for event in events:
                reported[event.prompt_index].append((event, len(event.prompt_logprobs or ())))
    else:
        reported = asyncio.run(together())
    for mine, output in zip(reported, outputs, strict=True):
        check_first([event for event, _ in mine], output)
        # when it came, not only when it was looked at
        assert mine[0][1] == len(output.prompt_logprobs or ())


@pytest.mark.parametrize("vanilla", WORKERS)
@pytest.mark.parametrize("no_overlap", LOOPS)
def test_steps_in_padded_graphs(harness, target, prompts, monkeypatch, vanilla, no_overlap):
    pads_batches(harness)
    graphs = {"batch_sizes": [1, 4, 8], "enable_padding": True}
    llm = harness.llm(
        vanilla=vanilla, disable_overlap_scheduler=no_overlap, cuda_graph_config=graphs
    )
    watched = WatchedGraphs(llm, monkeypatch)
    few = prompts[:6]
    params = [params_of(i, max_new_tokens=6 + 2 * i, prompt_logprobs=2) for i in range(len(few))]
    check_all(llm, target, few, params)
    assert not watched.eager_generations
    assert all(shape.sampling_kind for shape in watched.replayed)


def test_who_does_not_ask_costs_nothing(harness, target, prompts, monkeypatch):
    """Greedy batches run no op more, and nothing is copied without a request for it."""

    def never(*_, **__):
        raise AssertionError("not requested")

    no_logprobs = SamplingParams(max_new_tokens=8, ignore_eos=True)
    llm = harness.llm()
    sample_async, reported = llm.executor.sampler.sample_async, []

    def watched(*args, **options):
        state = sample_async(*args, **options)
        reported.append(state.host.log_probs)
        return state

    llm.executor.sampler.sample_async = watched
    llm.generate(prompts, [params_of(1, logprobs=None)] * len(prompts))
    assert reported
    assert all(one is None for one in reported)
    assert_idle(llm)
    llm.executor.engine.captured = None
    monkeypatch.setattr(worker_module, "compute_logprobs", never)
    monkeypatch.setattr(prompt_logprobs, "compute_logprobs", never)
    check_all(llm, target, prompts, [no_logprobs] * len(prompts))


def test_accepted_drafts_that_are_no_first_choice(harness, target, prompts):
    """Relaxed acceptance emits them, with the probability that the target gave them."""
    relaxed = {
        "use_relaxed_acceptance_for_thinking": True,
        "relaxed_topk": 9,
        "relaxed_delta": 0.9,
        "begin_thinking_phase_token": 5,
        "end_thinking_phase_token": 6,
    }
    llm = harness.llm(speculative=relaxed)
    requested = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, logprobs=4)
    outputs = llm.generate([[5, *prompt] for prompt in prompts], requested)
    for output in outputs:
        check(target, output, requested)
    ranks = [
        reported[t].rank
        for o in outputs
        for reported, t in zip(o.logprobs, o.token_ids, strict=True)
    ]
    assert max(ranks) > 1


def test_a_cancelled_request_keeps_what_was_reported(harness, prompts):
    llm = harness.llm()
    (request,) = llm.make_requests([prompts[5]], [params_of(0, prompt_logprobs=0)])
    executor = llm.executor
    executor.enqueue(request)
    for _ in range(4):
        executor.step()
    executor.cancel(request.request_id)
    (event,) = [event for event in executor.step() if event.finish_reason is not None]
    assert len(event.logprobs) == len(event.token_ids) == 0
    assert 0 < len(request.logprobs) == len(request.output_token_ids) < NUM_TOKENS
    assert len(request.prompt_logprobs) == len(prompts[5])


def test_a_prompt_of_one_token_and_the_widest_list(harness, target):
    requested = SamplingParams(max_new_tokens=1, ignore_eos=True, logprobs=20, prompt_logprobs=20)
    (output,) = harness.llm().generate([[VOCAB - 1]], requested)
    assert output.prompt_logprobs == [None]
    ((token, reported),) = [
        (t, reported) for t, reported in zip(output.token_ids, output.logprobs, strict=True)
    ]
    assert isinstance(reported[token], Logprob)
    assert len(reported) == 20
    check(target, output, requested)
