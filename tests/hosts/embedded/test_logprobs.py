"""Log-probabilities are the target's own, with ranks and texts, whatever emits the tokens.

`test_losslessness` and `test_random_requests` compare those of other workers and loops.
"""

from __future__ import annotations

import asyncio
import math

import pytest
import torch

from mtp_plugin.hosts.embedded import SamplingParams, prompt_logprobs
from mtp_plugin.requests.logprobs import ENTRY_WIDTH
from mtp_plugin.speculative.drafting import worker as worker_module
from tests.hosts.embedded.conftest import VOCAB, assert_drained, assert_idle
from tests.hosts.embedded.requests_by_kind import LOGPROBS, PROMPT_LOGPROBS, SAMPLED
from tests.hosts.embedded.test_llm_api import Pieces

NUM_TOKENS = 16
TOLERANCE = 1e-4
TIGHT = {"max_num_tokens": 36, "kv_cache_config": {"max_tokens": 96}, "kv_fill": float("nan")}
"""Prompts come in chunks, and requests are preempted."""


def params_of(place: int, **more) -> SamplingParams:
    """Every second request samples, one in five requests no log-probabilities."""
    options = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": LOGPROBS[place % 5]}
    sampled = {**SAMPLED[place], "seed": place} if place % 2 else {}
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


def check_all(llm, target, prompts, params) -> list:
    outputs = llm.generate(prompts, params)
    assert_drained(llm)
    for output, requested in zip(outputs, params, strict=True):
        check(target, output, requested, llm.tokenizer)
    return outputs


MODES: dict[str, dict] = {
    "coupled": {"tokenizer": Pieces(), "max_batch_size": 9},
    "tight": TIGHT,
    "block": {"mtp": {"verification": "block", "draft_sampling": "plain"}, "vanilla": True},
    "synthetic": {"mtp": {"verification": "synthetic", "synthetic_acceptance": 0.7}},
    "relaxed": {
        "speculative": {
            "use_relaxed_acceptance_for_thinking": True,
            "relaxed_topk": 9,
            "relaxed_delta": 0.9,
            "begin_thinking_phase_token": 5,
            "end_thinking_phase_token": 6,
        }
    },
}


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_of_outputs_and_prompts(harness, target, prompts, mode):
    """Some outputs differ from the target's own; its log-probabilities are reported all the
    same."""
    few = [[5, *prompt] for prompt in prompts[1:]] + [[VOCAB - 1]]
    params = [
        params_of(place, prompt_logprobs=PROMPT_LOGPROBS[place % 4]) for place in range(len(few))
    ]
    llm = harness.llm(**MODES[mode])
    outputs = check_all(llm, target, few, params)
    ranks = [
        reported[token].rank
        for output, requested in zip(outputs, params, strict=True)
        if requested.logprobs is not None and requested.is_greedy
        for reported, token in zip(output.logprobs, output.token_ids, strict=True)
    ]
    # relaxed and synthetic acceptance emit drafts that are not the argmax
    assert (max(ranks) > 1) == (mode in ("relaxed", "synthetic"))
    assert bool(llm.executor.num_preemptions) == (mode == "tight")
    assert llm.executor.acceptance.acceptance_length > 1.15


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


def are_close(reported, expected) -> bool:
    """Whether two requests report the same: chunks, which round differently, depend on arrivals."""
    if reported is None or expected is None:
        return reported is expected
    pairs = [(one or {}, other or {}) for one, other in zip(reported, expected, strict=True)]
    return all(
        list(one) == list(other)
        and all(
            entry._replace(logprob=0) == other[token]._replace(logprob=0)
            and abs(entry.logprob - other[token].logprob) < TOLERANCE
            for token, entry in one.items()
        )
        for one, other in pairs
    )


@pytest.mark.parametrize("way", ["stream", "submit"])
def test_streams_report_what_generate_returns(harness, prompts, way):
    """The first event of a request reports the whole prompt, and no other does."""
    params = [params_of(i, prompt_logprobs=PROMPT_LOGPROBS[i % 4]) for i in range(len(prompts))]
    llm = harness.llm(disable_overlap_scheduler=way == "submit", **TIGHT)
    outputs = llm.generate(prompts, params)

    async def read(events) -> list:
        return [(event, len(event.prompt_logprobs or ())) async for event in events]

    async def together() -> list[list]:
        return await asyncio.gather(*(read(llm.submit(*one)) for one in zip(prompts, params)))  # noqa: B905

    if way == "stream":
        reported: list[list] = [[] for _ in prompts]
        for events in llm.stream(prompts, params):
            for event in events:
                reported[event.prompt_index].append((event, len(event.prompt_logprobs or ())))
    else:
        reported = asyncio.run(together())
    for mine, output, requested in zip(reported, outputs, params, strict=True):
        events = [event for event, _ in mine]
        assert are_close(events[0].prompt_logprobs, output.prompt_logprobs)
        # when it came, not only when it was looked at
        assert mine[0][1] == len(output.prompt_logprobs or ())
        assert all(event.prompt_logprobs is None for event in events[1:])
        if requested.seed is None and requested.logprobs is not None:
            reported_later = [one for event in events for one in event.logprobs]
            assert are_close(reported_later, output.logprobs)
            for event in events:
                assert [next(iter(one)) for one in event.logprobs] == event.token_ids


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


# --- processed log-probabilities ---


def test_processed_logprobs_with_rejection_sampling(harness, prompts):
    """Every token that is emitted is one that could be sampled there."""
    llm = harness.llm(mtp={"verification": "rejection", "logprobs_mode": "processed"})
    requested = SamplingParams(
        max_new_tokens=12, ignore_eos=True, temperature=0.7, top_k=4, logprobs=4
    )
    for output in llm.generate(prompts[:4], requested):
        for reported, token in zip(output.logprobs, output.token_ids, strict=True):
            assert reported[token].rank <= 4
            first = [one for one in reported.values() if one.rank <= 4]
            assert sum(math.exp(one.logprob) for one in first) == pytest.approx(1, abs=1e-4)


def test_greedy_requests_report_the_untruncated_distribution(harness, prompts):
    """At temperature 1 without truncation, whatever else is in the batch."""
    llm = harness.llm(mtp={"logprobs_mode": "processed"})
    requested = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=3)
    alone = llm.generate(prompts[:2], requested)
    edited = SamplingParams(max_new_tokens=6, ignore_eos=True, frequency_penalty=0.5)
    batched = llm.generate(prompts[:3], [requested, requested, edited])
    for one, other in zip(alone, batched, strict=False):
        assert one.token_ids == other.token_ids
        for reported, same in zip(one.logprobs, other.logprobs, strict=True):
            assert {t: each.logprob for t, each in reported.items()} == pytest.approx(
                {t: each.logprob for t, each in same.items()}, abs=5e-5
            )
