"""Random schedules: nothing leaks, and every request gets its own tokens, in events."""

from __future__ import annotations

from functools import cache

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtp_plugin.hosts.embedded import SamplingParams
from mtp_plugin.infer import decode
from mtp_plugin.requests.states import FinishReason
from tests.hosts.embedded.conftest import VOCAB, assert_drained

NUM_TOKENS = 12
KINDS: dict[str, dict] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    "processed": {"temperature": 0.9, "frequency_penalty": 0.7, "seed": 4},
}

request = st.fixed_dictionaries(
    {
        "prompt": st.integers(0, 11),
        "arrives": st.integers(0, 12),
        "aborts": st.none() | st.integers(0, 12),
        "tokens": st.integers(1, NUM_TOKENS),
        "kind": st.sampled_from(sorted(KINDS)),
    }
)
schedule = st.fixed_dictionaries(
    {
        "requests": st.lists(request, min_size=1, max_size=8),
        "k": st.integers(1, 3),
        "vanilla": st.booleans(),
        "no_overlap": st.booleans(),
        "blocks": st.integers(10, 40),
        "chunks": st.lists(st.integers(1, 9), min_size=1, max_size=5),
        "batch": st.integers(1, 4),
        "budget": st.integers(16, 40),
    }
)


def prompt_of(index: int) -> list[int]:
    return [(7 * index + 3 * i * i + i) % VOCAB for i in range(1 + 2 * index)]


def params_of(kind: str, num_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, **KINDS[kind])


@cache
def expected(model, index: int, kind: str) -> list[int]:
    return decode(model, prompt_of(index), params_of(kind, NUM_TOKENS)).token_ids


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(plan=schedule)
def test_random_arrivals_aborts_chunks_and_pressure(harness, plan):
    sizes = plan["chunks"]
    llm = harness.llm(
        k=plan["k"],
        vanilla=plan["vanilla"],
        disable_overlap_scheduler=plan["no_overlap"],
        max_batch_size=plan["batch"],
        max_num_tokens=max(plan["budget"], plan["batch"] * (plan["k"] + 1)),
        kv_cache_config={"tokens_per_block": 4, "max_tokens": 4 * plan["blocks"]},
        chunk_policy=lambda r, limit: min(
            limit, sizes[(r.request_id + r.context_current_position) % len(sizes)]
        ),
        kv_fill=float("nan"),
    )
    arrivals = sorted(plan["requests"], key=lambda r: r["arrives"])
    running = []
    events = []
    step = 0
    while arrivals or llm.executor.has_work:
        while arrivals and arrivals[0]["arrives"] <= step:
            wanted = arrivals.pop(0)
            params = params_of(wanted["kind"], wanted["tokens"])
            live = llm.make_request(prompt_of(wanted["prompt"]), params)
            llm.executor.enqueue(live)
            running.append((live, wanted))
        for live, wanted in running:
            if wanted["aborts"] is not None and step == wanted["arrives"] + wanted["aborts"]:
                llm.executor.cancel(live.request_id)
        events += llm.executor.step()
        step += 1
        assert step < 2000  # no schedule may stall
    for live, wanted in running:
        truth = expected(harness.oracle_model.target, wanted["prompt"], wanted["kind"])
        truth = truth[: wanted["tokens"]]
        mine = [event for event in events if event.request_id == live.request_id]
        assert [token for event in mine for token in event.token_ids] == live.output_token_ids
        ends = [event.finish_reason for event in mine]
        assert ends == [None] * (len(mine) - 1) + [live.finish_reason]
        assert all(event.token_ids for event in mine[:-1])
        if live.finish_reason is FinishReason.CANCELLED:
            assert live.output_token_ids == truth[: len(live.output_token_ids)]
        else:
            assert live.finish_reason is FinishReason.LENGTH
            assert live.output_token_ids == truth
    assert_drained(llm)
