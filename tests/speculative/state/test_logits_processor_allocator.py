"""Rows of the pools: which requests have one, its values, and when it is freed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import MetadataError, NoFreeSlotsError
from mtp_plugin.hosts.embedded.request import LlmRequest
from mtp_plugin.ops.logits_processor_state import LogitsProcessorState
from mtp_plugin.ops.step import SamplingKind
from mtp_plugin.requests.columns import NO_ROW, POOL_ROWS
from mtp_plugin.requests.options import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, SamplingParams
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.requests.stopping import MAX_STOP_IDS
from mtp_plugin.speculative.host import DecodingOptions
from mtp_plugin.speculative.state import MTPHiddenStatesManager, SlotStateManager
from mtp_plugin.speculative.state.logits_processor_allocator import (
    POOLED_OPTIONS,
    LogitsProcessorAllocator,
)
from mtp_plugin.speculative.verification import make_modes
from tests.ops.logits_processing.pools import ids_in
from tests.ops.on_device import read_back_forbidden
from tests.speculative.state.cases import Request, batch, make

VOCAB = 70
CPU = torch.device("cpu")
SOILED = 0x2B2B


def managed(
    max_num_requests: int = 3, vocab_size: int | None = VOCAB, **sizes: Any
) -> SlotStateManager:
    modes = make_modes(DecodingOptions(max_draft_len=2), CPU)
    manager = SlotStateManager(
        modes, max_num_requests, device="cpu", vocab_size=vocab_size, **sizes
    )
    if manager.logits_allocator is not None:
        for pool in vars(manager.logits_allocator.pools).values():
            pool.fill_(SOILED)
    return manager


def request(request_id: int, prompt: list[int] | None = None, **options: Any) -> LlmRequest:
    params = SamplingParams(max_new_tokens=50, **options)
    tokens = prompt or [1, 2, 3]
    return LlmRequest(request_id, tokens, params, end_ids=(2,), max_draft_len=2, max_seq_len=99)


def pools(manager: SlotStateManager) -> LogitsProcessorState:
    assert manager.logits_allocator is not None
    return manager.logits_allocator.pools


def rows(manager: SlotStateManager, request_id: int) -> dict[str, int]:
    """The rows that a request's slot names."""
    slot = manager.slot_of(request_id)
    return {name: int(manager.table.column(name)[slot]) for name in POOL_ROWS}


def taken(manager: SlotStateManager) -> dict[int, int]:
    """Which request has which row, all columns of it naming the same."""
    owners = {}
    for request_id in manager.slot_manager.slot_mapping:
        named = set(rows(manager, request_id).values()) - {-1}
        if named:
            (owners[request_id],) = named
    return owners


def counts(manager: SlotStateManager, request_id: int) -> dict[int, int]:
    row = rows(manager, request_id)["count_row"]
    numbers = pools(manager).counts[row].int() & 0xFFFF
    return {token: number for token, number in enumerate(numbers.tolist()) if number}


def seen(manager: SlotStateManager, request_id: int) -> set[int]:
    return ids_in(pools(manager).seen[rows(manager, request_id)["count_row"]])


def unwritten(manager: SlotStateManager, row: int) -> bool:
    """Whether all pools hold in a row what they held first."""
    return all(bool((pool[row] == SOILED).all()) for pool in vars(pools(manager)).values())


# --- values of a row ---


@pytest.mark.gpu
def test_no_row_waits_for_the_device() -> None:
    """A host's bias of the whole vocabulary among them; all rows say what they say on the CPU."""
    options = {
        "logit_bias": {3: 1.5, 69: -0.1},
        "allowed_token_ids": (3, 5, 69),
        "repetition_penalty": 1.1,
        "prompt_ignore_length": 1,
        "bad_words": [[4], [5, 6]],
        "min_tokens": 2,
    }
    first, second = (request(i, [1, 2, 2, 5], **options).facts for i in (1, 2))
    whole = torch.linspace(-1, 1, VOCAB, dtype=torch.float64)
    second = replace(second, options={**second.options, "logit_bias": whole})
    third = request(3, min_tokens=2).facts

    def fill(device: str) -> LogitsProcessorAllocator:
        allocator = LogitsProcessorAllocator(3, VOCAB, torch.device(device))
        with read_back_forbidden():
            for facts in (first, second):
                allocator.allocate(facts.request_id, facts, [1, 2, 2, 5, 7])
            allocator.allocate_for_draft_mask(third)
        return allocator

    on_cpu, on_gpu = fill("cpu"), fill("cuda")
    for group in ("pools", "draft_mask"):
        for name, pool in vars(getattr(on_cpu, group)).items():
            assert torch.equal(pool, getattr(getattr(on_gpu, group), name).cpu()), name


@pytest.mark.gpu
def test_a_bias_that_is_pinned_may_be_written_over_at_once() -> None:
    bias = torch.linspace(-1, 1, VOCAB).pin_memory()
    expected = bias.clone()
    facts = request(1).facts
    allocator = LogitsProcessorAllocator(1, VOCAB, torch.device("cuda"))
    torch.cuda._sleep(100_000_000)
    row = allocator.allocate(1, replace(facts, options={"logit_bias": bias}), [1])["bias_row"]
    bias.fill_(7)
    assert torch.equal(allocator.pools.bias[row].cpu(), expected)


def test_a_request_without_options_has_no_row() -> None:
    manager = managed()
    manager.prepare_resources(batch(request(1), request(2, temperature=0.7), request(3)))
    for request_id in (1, 2, 3):
        assert rows(manager, request_id) == dict.fromkeys(POOL_ROWS, -1)
    recent = manager.table.column("recent")[: manager.num_rows]
    assert (recent == -1).all()
    assert all(unwritten(manager, row) for row in range(4))


def test_options_of_freed_requests_are_forgotten() -> None:
    manager = managed()
    sampled, greedy = request(2, temperature=0.7), request(3)
    manager.prepare_resources(batch(sampled, greedy))
    manager.free_resources(greedy)
    assert manager.any_request_options
    manager.free_resources(sampled)
    assert not manager.any_request_options


def test_bias() -> None:
    manager = managed()
    bias = {3: 1.5, 69: -0.1, 0: 1e300, 1: -1e300}
    manager.prepare_resources(batch(request(1, logit_bias=bias)))
    assert rows(manager, 1) == {"bias_row": 0, "allowed_row": -1, "count_row": -1, "words_row": -1}
    expected = torch.zeros(VOCAB)
    expected[3], expected[69] = 1.5, -0.1
    most = torch.finfo(torch.float32).max  # finite, as all requested values
    expected[0], expected[1] = most, -most
    assert torch.equal(pools(manager).bias[0], expected)
    assert unwritten(manager, 1)


@pytest.mark.parametrize("shape", [(VOCAB,), (1, VOCAB)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_dense_bias_of_a_host(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    manager = managed()
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    manager.prepare_resources(batch(Request(1, embedding_bias=dense, py_orig_prompt_len=1)))
    held = pools(manager).bias[rows(manager, 1)["bias_row"]]
    assert torch.equal(held, dense.reshape(-1).float())
    dense.zero_()
    assert held.any()


def banned_rows(manager: SlotStateManager, request_id: int) -> tuple[set[int], int, list[int]]:
    """The ids that drafts of a request may be, how many it may write, and which are banned."""
    assert manager.logits_allocator is not None
    row = rows(manager, request_id)["allowed_row"]
    draft_mask = manager.logits_allocator.draft_mask
    assert torch.equal(draft_mask.allowed[row], pools(manager).allowed[row])
    hidden = [token for token in draft_mask.masked_ids[row].tolist() if token >= 0]
    return ids_in(draft_mask.allowed[row, :-1]), int(draft_mask.allowed[row, -1]), hidden


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"min_tokens": 3}, range(VOCAB)),
        ({"bad_token_ids": [5]}, range(VOCAB)),
        ({"bad_words": [[5, 6]], "min_tokens": 2}, range(VOCAB)),
        ({"allowed_token_ids": [3, 69]}, [3, 69]),
        ({"allowed_token_ids": [3, 69], "min_tokens": 1, "bad_token_ids": [3]}, [3, 69]),
    ],
)
def test_ids_that_drafts_may_be(options: dict[str, Any], allowed: Sequence[int]) -> None:
    """At first all that may be written; a row that somebody else had is cleaned."""
    manager = managed()
    assert manager.logits_allocator is not None
    manager.logits_allocator.draft_mask.allowed.fill_(SOILED)
    manager.logits_allocator.draft_mask.masked_ids.fill_(7)
    manager.prepare_resources(batch(request(1, **options)))
    assert banned_rows(manager, 1) == (set(allowed), len(allowed), [])


@pytest.mark.parametrize("options", [{"min_tokens": 3, "ignore_eos": True}, {"logprobs": 3}])
def test_drafts_that_may_be_anything_have_no_row(options: dict[str, Any]) -> None:
    manager = managed()
    manager.prepare_resources(batch(request(1, **options)))
    assert taken(manager) == {}


def test_drafts_make_do_without_a_row() -> None:
    """Where all are taken, a request that needs none is served without."""
    manager = managed(1)
    for number in (1, 2):
        manager.prepare_resources(batch(request(number, presence_penalty=1.0)))
    manager.prepare_resources(batch(request(3, min_tokens=3)))
    assert sorted(taken(manager)) == [1, 2]
    slot = manager.slot_of(3)
    assert int(manager.table.column("min_tokens")[slot]) == 3
    manager.free_resources(request(1))
    manager.prepare_resources(batch(request(4, min_tokens=3)))
    assert taken(manager) == {2: 1, 4: 0}
    without = managed(2, None)
    without.prepare_resources(batch(request(1, min_tokens=3)))
    assert taken(without) == {}


def test_allowed_ids() -> None:
    manager = managed()
    allowed = (69, 0, 31, 32, 63, 64, 31, 31)
    manager.prepare_resources(batch(request(1, allowed_token_ids=allowed)))
    row = pools(manager).allowed[rows(manager, 1)["allowed_row"]]
    assert ids_in(row[:-1]) == set(allowed)
    assert row[-1] == 6


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_counts_of_a_prompt(name: str) -> None:
    """Everything is seen; tokens after the ignored part are counted."""
    manager = managed(4)
    prompt = [5, 5, 63, 31, 5, 32, 69]
    manager.prepare_resources(
        batch(
            request(1, prompt, **{name: 1.5}),
            request(2, prompt, prompt_ignore_length=4, **{name: 1.5}),
            request(3, prompt, prompt_ignore_length=7, **{name: 1.5}),
            request(4, prompt, prompt_ignore_length=10**9, **{name: 1.5}),
        )
    )
    assert [seen(manager, i) for i in (1, 2, 3, 4)] == [set(prompt)] * 4
    assert counts(manager, 1) == {5: 3, 31: 1, 32: 1, 63: 1, 69: 1}
    assert counts(manager, 2) == {5: 1, 32: 1, 69: 1}
    assert counts(manager, 3) == counts(manager, 4) == {}


def test_counts_beyond_16_bits() -> None:
    manager = managed()
    prompt = [7] * 70000 + [8] * 40000
    params = SamplingParams(frequency_penalty=0.1)
    manager.prepare_resources(
        batch(LlmRequest(1, prompt, params, end_ids=(2,), max_draft_len=2, max_seq_len=200000))
    )
    assert counts(manager, 1) == {7: 65535, 8: 40000}


def test_bad_words() -> None:
    manager = managed()
    words = ((3, 4), (5,), tuple(range(16)))
    manager.prepare_resources(batch(request(1, bad_words=words, bad_token_ids=(9, 8))))
    listed = pools(manager).words[rows(manager, 1)["words_row"]].tolist()
    expected = [*words, (9,), (8,)]
    expected += [()] * (MAX_BAD_WORDS - len(expected))
    assert listed == [[-1] * (MAX_BAD_WORD_LEN - len(word)) + list(word) for word in expected]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_recent_tokens(length: int) -> None:
    """The last 16 of the prompt, of requests with a row."""
    manager = managed()
    prompt = [token % VOCAB for token in range(length)]
    manager.prepare_resources(batch(request(1, prompt, bad_words=((3, 4),)), request(2, prompt)))
    recent = manager.table.column("recent")
    assert recent[manager.slot_of(1)].tolist() == ([-1] * 16 + prompt)[-16:]
    assert recent[manager.slot_of(2)].tolist() == [-1] * 16


def test_a_request_has_one_row_in_all_pools() -> None:
    manager = managed()
    manager.prepare_resources(batch(request(1, bad_token_ids=(1,))))
    options = {"logit_bias": {1: 1.0}, "allowed_token_ids": (4,), "bad_token_ids": (1,)}
    manager.prepare_resources(batch(request(2, presence_penalty=1.0, **options)))
    assert rows(manager, 2) == dict.fromkeys(POOL_ROWS, 1)


def test_a_preempted_request_counts_what_it_emitted() -> None:
    """With the length of the prompt that it came with."""
    manager = managed()
    preempted = request(
        1, [5, 6, 6], frequency_penalty=1.0, prompt_ignore_length=9, bad_words=((6, 7),)
    )
    manager.prepare_resources(batch(preempted))
    assert (counts(manager, 1), seen(manager, 1)) == ({}, {5, 6})
    before = rows(manager, 1)
    manager.free_resources(preempted)
    for token in (7, 7, 5):
        preempted.add_new_token(token)
    preempted.pause()
    other = request(2, [1], logit_bias={1: 1.0})
    manager.prepare_resources(batch(other))  # takes the row meanwhile
    manager.prepare_resources(batch(preempted))
    assert rows(manager, 1) != before
    # of the 9 ignored tokens 3 are the prompt's
    assert (counts(manager, 1), seen(manager, 1)) == ({7: 2, 5: 1}, {5, 6, 7})
    slot = manager.slot_of(1)
    assert manager.table.column("recent")[slot].tolist() == [-1] * 10 + [5, 6, 6, 7, 7, 5]
    assert manager.table.column("prompt_len")[slot] == 3


# --- who has a row ---


def test_a_row_that_comes_back_holds_nothing_of_the_request_before() -> None:
    options: dict[str, Any] = {
        "logit_bias": {3: 1.0},
        "allowed_token_ids": (5, 6),
        "presence_penalty": 1.0,
        "bad_words": ((1, 2), (3,)),
    }
    others: dict[str, Any] = {
        "logit_bias": {4: 2.0},
        "allowed_token_ids": (7,),
        "presence_penalty": 2.0,
        "bad_words": ((9,),),
    }
    manager, fresh = managed(), managed()
    manager.prepare_resources(batch(request(1, [8, 9], **options)))
    manager.free_resources(request(1))
    for each in (manager, fresh):
        each.prepare_resources(batch(request(2, [4], **others)))
    assert rows(manager, 2) == rows(fresh, 2) == dict.fromkeys(POOL_ROWS, 0)
    for name, pool in vars(pools(manager)).items():
        assert torch.equal(pool, vars(pools(fresh))[name]), name


@settings(max_examples=8)
@given(seed=st.integers(0, 2**31))
def test_no_two_have_the_same_row(seed: int) -> None:
    """With random admissions, preemptions and finishes."""
    rng, manager, here = random.Random(seed), managed(4), set()
    for request_id in range(20):
        for gone in [i for i in here if rng.random() < 0.3]:
            manager.free_resources(request(gone))
            here.remove(gone)
        if len(here) < 4:
            has_bias = rng.random() < 0.7
            options = {"logit_bias": {request_id: 1.0}} if has_bias else {}
            manager.prepare_resources(batch(request(request_id, **options)))
            here.add(request_id)
        held = taken(manager)
        assert len(set(held.values())) == len(held)
        for owner, row in held.items():
            assert pools(manager).bias[row].nonzero().flatten().tolist() == [owner]
    manager.shutdown()
    manager.prepare_resources(batch(*(request(i, logit_bias={i: 1.0}) for i in range(5))))
    assert sorted(taken(manager).values()) == [0, 1, 2, 3, 4]


def test_giving_back_writes_nothing() -> None:
    """A step in flight may still read the row."""
    manager = managed()
    manager.prepare_resources(batch(request(1, logit_bias={3: 1.0}, presence_penalty=1.0)))
    before = {name: pool.clone() for name, pool in vars(pools(manager)).items()}
    manager.free_resources(request(1))
    manager.free_resources(request(1))
    manager.shutdown()
    for name, pool in vars(pools(manager)).items():
        assert torch.equal(pool, before[name])


def test_dummies_have_no_row() -> None:
    manager = managed()
    manager.add_dummy_requests([70, 71])
    assert rows(manager, 70) == rows(manager, 71) == dict.fromkeys(POOL_ROWS, -1)


# --- what cannot be ---


def test_who_has_ended_makes_room() -> None:
    """A host may free it later; then the row stays its new owner's."""
    manager = managed(2)
    requests = [request(i, logit_bias={i: 1.0}) for i in range(1, 5)]
    manager.prepare_resources(batch(*requests[:3]))
    requests[1].finish_by(FinishReason.END_ID)
    manager.prepare_resources(batch(requests[3]))
    assert taken(manager) == {1: 0, 3: 2, 4: 1}
    manager.free_resources(requests[1])
    assert taken(manager) == {1: 0, 3: 2, 4: 1}
    assert pools(manager).bias[1].nonzero().flatten().tolist() == [4]
    for one in requests:
        manager.free_resources(one)
    assert taken(manager) == {}


def test_more_requests_than_rows() -> None:
    """Who comes too late has neither slot nor row, the others theirs; a row that is given back is
    the next one's."""
    manager = managed(2)
    requests = [request(i, logit_bias={i: 1.0}) for i in range(1, 5)]
    manager.prepare_resources(batch(*requests[:2]))
    with pytest.raises(NoFreeSlotsError, match="all 3 rows of the pools are in use, request 4"):
        manager.prepare_resources(batch(requests[2], requests[3]))
    assert manager.slot_manager.get_slot(4) is None
    assert taken(manager) == {1: 0, 2: 1, 3: 2}
    # one that edits nothing has room
    manager.prepare_resources(batch(request(5)))
    manager.free_resources(requests[1])
    manager.prepare_resources(batch(requests[3]))
    assert taken(manager) == {1: 0, 3: 2, 4: 1}
    assert pools(manager).bias[1].nonzero().flatten().tolist() == [4]


def test_no_slot_is_no_row() -> None:
    manager = managed(1, num_seq_slots=1)
    spare = manager.slot_manager.max_num_requests
    for number in range(spare):
        manager.slot_manager.add_slot(1000 + number)
    with pytest.raises(NoFreeSlotsError):
        manager.prepare_resources(batch(request(1, logit_bias={1: 1.0})))
    manager.slot_manager.remove_slot(1000)
    manager.prepare_resources(batch(request(2, logit_bias={1: 1.0})))
    assert taken(manager) == {2: 0}


CANNOT_BE: dict[str, tuple[dict[str, Any], str]] = {
    "bias": ({"logit_bias": {1: 1.0, 70: 1.0}}, r"logit_bias: expected ids below 70.* got \[70\]"),
    "allowed": (
        {"logit_bias": {1: 1.0}, "allowed_token_ids": (1, 99, 2**40)},
        r"allowed_token_ids: expected ids below 70.*\[99, 1099511627776\]",
    ),
    "words": ({"bad_words": ((1, 70),)}, r"bad_words: expected ids below 70.*\[70\]"),
    "ids": ({"bad_token_ids": (70,)}, r"bad_words: expected ids below 70.*\[70\]"),
}


@pytest.mark.parametrize("name", CANNOT_BE)
def test_ids_outside_the_vocabulary(name: str) -> None:
    """No request keeps a slot or a row with values of another."""
    options, message = CANNOT_BE[name]
    manager = managed()
    with pytest.raises(MetadataError, match=message):
        manager.prepare_resources(batch(request(1, presence_penalty=1.0), request(2, **options)))
    assert manager.slot_manager.slot_mapping == {1: 0}
    assert taken(manager) == {1: 0}
    manager.prepare_resources(batch(request(3, logit_bias={1: 1.0})))
    assert taken(manager) == {1: 0, 3: 1}


def test_a_prompt_outside_the_vocabulary() -> None:
    manager = managed()
    with pytest.raises(MetadataError, match=r"prompt: expected ids below 70.*got \[70, -1\]"):
        manager.prepare_resources(batch(request(1, [1, 70, -1], frequency_penalty=0.5)))
    assert manager.slot_manager.slot_mapping == {}
    # without penalties the prompt is not checked
    manager.prepare_resources(batch(request(1, [1, 70], logit_bias={1: 1.0})))


@pytest.mark.parametrize("size", [VOCAB - 1, VOCAB + 2])
def test_a_dense_bias_of_another_vocabulary(size: int) -> None:
    """The host's own requests are refused one by one, and the batch goes on."""
    manager = managed()
    refused = Request(1, embedding_bias=torch.zeros(size), py_orig_prompt_len=1)
    other = Request(2, embedding_bias=torch.ones(VOCAB), py_orig_prompt_len=1)
    manager.prepare_resources(batch(refused, other))
    assert refused.py_mtp_refused == (f"logit_bias: expected 70 values, one per id, got {size}")
    assert manager.slot_manager.slot_mapping == {1: 0, 2: 1}
    assert taken(manager) == {2: 0}
    assert manager.table.column("bias_row").tolist()[:2] == [NO_ROW, 0]
    assert [manager.sampling_kind_of(n) for n in ([1], [1, 2])] == [
        SamplingKind.GREEDY,
        SamplingKind.PROCESSED,
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": (1,)},
        {"bad_words": ((1,),)},
        {"bad_token_ids": (1,)},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_manager_that_knows_no_vocabulary(options: dict[str, Any]) -> None:
    manager = managed(vocab_size=None)
    assert manager.logits_allocator is None
    message = f"request 2: {', '.join(options)} need a manager with vocab_size"
    with pytest.raises(MetadataError, match=message):
        manager.prepare_resources(batch(request(1), request(2, **options)))
    assert manager.slot_manager.slot_mapping == {1: 0}
    assert manager.slot_rows(torch.tensor([0])).pools is None
    assert set(options) <= POOLED_OPTIONS


# --- what it takes ---


def test_the_report_lists_the_pools() -> None:
    manager, without = managed(7, 2**17), managed(7, None)
    # bias 4, count 2, bits and their number
    words = 2**17 // 32
    per_row = 2**17 * 6 + 4 * (2 * words + 1) + 4 * MAX_BAD_WORDS * MAX_BAD_WORD_LEN
    assert manager.logits_allocator is not None
    # for drafts the bits again, and the masked ids with those of the spare row
    hidden = 4 * (MAX_STOP_IDS + MAX_BAD_WORDS)
    size = 8 * (per_row + 4 * (words + 1)) + 9 * hidden
    assert manager.logits_allocator.num_bytes == size
    edits = f", logits processing {size / 2**20:.1f} MiB"
    assert manager.memory_report() == without.memory_report() + edits
    assert "logits processing" not in without.memory_report()
    assert manager.bytes_per_slot() == without.bytes_per_slot()


def test_a_step_reads_the_pools_where_they_lie() -> None:
    manager = make(vocab_size=VOCAB)
    assert isinstance(manager, MTPHiddenStatesManager)
    given_pools = manager.slot_rows(torch.tensor([0])).pools
    assert given_pools is pools(manager)
    given_pools.check(given_pools.bias.device, VOCAB)


# --- rows for the sake of drafts ---


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "in one batch"])
@pytest.mark.parametrize("num_needed", [1, 3, 4])
def test_rows_for_the_sake_of_drafts_yield(at_once: bool, num_needed: int) -> None:
    """To requests that need one; a request without its row drafts without a mask."""
    manager = managed()  # four rows
    assert manager.logits_allocator is not None
    holders = [request(n, min_tokens=9, stop_token_ids=[7]) for n in range(4)]
    needing = [request(10 + n, bad_token_ids=[5 + n]) for n in range(num_needed)]
    for each in [[*holders, *needing]] if at_once else [[one] for one in (*holders, *needing)]:
        manager.prepare_resources(batch(*each))
    left = taken(manager)
    assert len(left) == len(set(left.values())) == 4
    assert {one.request_id for one in needing} <= {*left}
    for n in range(num_needed):
        assert rows(manager, 10 + n)["words_row"] == rows(manager, 10 + n)["allowed_row"] >= 0
        assert banned_rows(manager, 10 + n) == (set(range(VOCAB)), VOCAB, [])
    yielded = [n for n in range(4) if n not in left]
    assert len(yielded) == num_needed
    for n in range(4):
        assert int(manager.table.column("min_tokens")[manager.slot_of(n)]) == 9
    # who yielded has nothing to give back
    for n in yielded:
        manager.free_resources(holders[n])
    assert taken(manager) == left
    for n in range(num_needed):
        manager.free_resources(needing[n])
    manager.prepare_resources(batch(request(20, min_tokens=9, stop_token_ids=[7])))
    assert rows(manager, 20)["allowed_row"] >= 0


def test_rows_that_are_needed_do_not_yield() -> None:
    manager = managed()
    for n in range(4):
        manager.prepare_resources(batch(request(n, bad_token_ids=[5])))
    with pytest.raises(NoFreeSlotsError):
        manager.prepare_resources(batch(request(4, bad_token_ids=[5])))
    assert len(taken(manager)) == 4
    manager.prepare_resources(batch(request(5, min_tokens=9, stop_token_ids=[7])))
    assert rows(manager, 5)["allowed_row"] == NO_ROW
