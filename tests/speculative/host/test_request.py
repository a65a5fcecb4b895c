"""What is read of a host's request, TensorRT-LLM's or the embedded executor's."""

from __future__ import annotations

import math
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.hosts.embedded import LlmRequest, SamplingParams
from mtp_plugin.requests.columns import REQUEST_COLUMNS, TopPMass
from mtp_plugin.requests.seeds import seed_words
from mtp_plugin.requests.states import RequestState
from mtp_plugin.requests.stopping import MAX_STOP_IDS, StopRule
from mtp_plugin.speculative.host import (
    UNBOUNDED,
    RequestFacts,
    ends_prompt,
    epoch_of,
    facts_of,
    has_finished,
    may_speculate,
    needs_sampling,
    num_drafted_of,
    num_listed_chunks,
    phase_of,
    read_request,
    set_num_verified,
    slot_of,
    token_after_chunk,
)
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats


def request(**fields: Any) -> SimpleNamespace:
    """A request with TensorRT-LLM's fields: a prompt of three tokens and no options."""
    given = {"request_id": 7, "get_tokens": lambda beam: [1, 2, 3][beam:], **fields}
    return SimpleNamespace(**given)


def sampling(**config: Any) -> SimpleNamespace:
    return request(sampling_config=SimpleNamespace(**config))


# --- facts ---


def test_a_request_that_says_nothing() -> None:
    facts = read_request(request())
    rule = StopRule(max_length=UNBOUNDED, prompt_len=3, trtllm_words=True)
    assert facts == RequestFacts(7, rule, top_p_mass=TopPMass.MIN_P)
    assert (facts.full_length, facts.options, facts.stats) == (UNBOUNDED, {}, None)
    assert not facts.is_dummy
    assert read_request(request(), 64).stop.max_length == 64
    assert read_request(request(), 64).full_length == 64


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ({"py_end_id": None}, ()),
        ({"py_end_id": -1, "end_id": -1}, ()),
        ({"py_end_id": 2}, (2,)),
        ({"end_id": 0}, (0,)),
        ({"py_end_id": 2, "end_id": 2, "py_stop_ids": (2, 9, 7)}, (2, 9, 7)),
        ({"py_end_id": -1, "end_id": 4}, (4,)),
        ({"py_stop_ids": None}, ()),
        ({"py_stop_ids": [5, -1, 5]}, (5,)),
    ],
)
def test_end_ids_under_the_names_of_hosts(options: dict[str, Any], ids: tuple[int, ...]) -> None:
    stop = read_request(request(**options)).stop
    assert stop.end_ids == stop.device_ids == ids


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        (None, ()),
        ([], ()),
        ([[5], [6, 7], [2], [8]], ((5,), (6, 7), (2,), (8,))),
        ([[5, 6, 7, 8], [1, 3, 4, -1]], ((5,), (6, 7), (8,))),
    ],
    ids=["none", "empty", "plain", "flat"],
)
def test_both_forms_of_stop_words(listed: Any, words: tuple[tuple[int, ...], ...]) -> None:
    """Words of one token too: stop ids of TensorRT-LLM's requests come as such."""
    stop = read_request(request(py_end_id=2, py_stop_words_list=listed)).stop
    assert stop.words == words
    alone = [word[0] for word in words if len(word) == 1 and word[0] != 2]
    assert stop.device_ids == (2, *alone)


def test_the_length_of_the_prompt() -> None:
    """Given by the host engine, or the number of tokens."""
    assert read_request(request(py_orig_prompt_len=2)).stop.prompt_len == 2
    assert read_request(request(py_orig_prompt_len=0)).stop.prompt_len == 0
    assert read_request(request(py_orig_prompt_len=None)).stop.prompt_len == 3
    # the tokens are not read needlessly
    with_length = request(py_orig_prompt_len=2)
    del with_length.get_tokens
    assert read_request(with_length).stop.prompt_len == 2


@pytest.mark.parametrize(
    ("options", "seq_len", "length"),
    [
        ({"py_max_new_tokens": 9}, UNBOUNDED, 12),
        ({"py_max_new_tokens": 9}, 12, 12),
        ({"py_max_new_tokens": 9}, 11, 11),
        ({"py_max_new_tokens": 9, "py_orig_prompt_len": 1}, 64, 10),
        ({"py_max_new_tokens": None}, 64, 64),
        ({"py_max_new_tokens": 0}, 64, 3),
        ({}, 64, 64),
    ],
)
def test_the_longest_text(options: dict[str, Any], seq_len: int, length: int) -> None:
    facts = read_request(request(**options), seq_len)
    assert facts.stop.max_length == length
    # drafts end at the length that the host engine has reserved, not at this one
    assert facts.full_length == seq_len


def test_what_else_is_read() -> None:
    stats = AcceptanceStats(3)
    facts = read_request(request(max_length=9, py_acceptance=stats), 64)
    assert (facts.full_length, facts.stop.max_length) == (9, 64)
    assert facts.stats is stats


@pytest.mark.parametrize("name", ["is_dummy", "is_attention_dp_dummy"])
def test_dummies(name: str) -> None:
    assert read_request(request(**{name: True})).is_dummy
    assert not read_request(request(**{name: False})).is_dummy


# --- options ---


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, {}),
        ({"min_length": [8]}, {"min_tokens": 8}),
        ({"min_length": 8}, {"min_tokens": 8}),
        ({"min_length": [1]}, {}),
        ({"min_length": []}, {}),
        ({"temperature": [0.7], "top_k": [0]}, {"temperature": 0.7, "top_k": 0}),
        ({"top_k": [9], "random_seed": [5]}, {"top_k": 9, "seed": 5}),
        ({"top_k": 9, "random_seed": 2**64 - 1}, {"top_k": 9, "seed": 2**64 - 1}),
        ({"top_p": [0.5], "random_seed": [-5]}, {"top_p": 0.5, "seed": -5}),
        # greedy: no sampling options
        ({"random_seed": [5]}, {}),
        ({"temperature": [0.0], "top_k": [9], "random_seed": [5]}, {}),
        ({"temperature": [0.9], "top_k": [1], "top_p": [0.5]}, {}),
        ({"top_k": [-1], "top_p": [1.0]}, {"top_k": 0, "top_p": 1.0}),
        (
            {"repetition_penalty": [1.5], "presence_penalty": [-1.0], "frequency_penalty": 0.5},
            {"repetition_penalty": 1.5, "presence_penalty": -1.0, "frequency_penalty": 0.5},
        ),
        ({"repetition_penalty": [1.0], "presence_penalty": [0.0], "frequency_penalty": 0}, {}),
        ({"prompt_ignore_length": [4]}, {"prompt_ignore_length": 4}),
        ({"prompt_ignore_length": [0]}, {}),
        ({"num_return_sequences": 1, "length_penalty": [0.0], "no_repeat_ngram_size": [0]}, {}),
        ({"top_p_decay": [1.0], "top_p_min": [1e-6], "top_p_reset_ids": [-1]}, {}),
        # invalid values are left out here and reported when the request is refused
        ({"repetition_penalty": [0.0], "presence_penalty": [math.nan]}, {}),
        ({"beam_width": 2}, {}),  # of no name among ours
    ],
    ids=str,
)
def test_options_of_a_sampling_config(config: dict[str, Any], options: dict[str, Any]) -> None:
    assert read_request(sampling(**config)).options == options


@pytest.mark.parametrize(
    ("relaxed", "options"), [(False, {"relaxed_acceptance": False}), (True, {}), (None, {})]
)
def test_options_of_a_request(relaxed: bool | None, options: dict[str, Any]) -> None:
    assert read_request(request(py_relaxed_acceptance=relaxed)).options == options


WORDS = ((5,), (6, 7), (8,))


@pytest.mark.parametrize("name", ["bad_words_list", "py_bad_words_list"])
@pytest.mark.parametrize(
    "listed",
    [
        [[5], [6, 7], [8]],
        ((5,), (6, 7), (8,)),
        [[5, 6, 7, 8], [1, 3, 4, -1]],
        torch.tensor([[5, 6, 7, 8], [1, 3, 4, -1]]),
        torch.tensor([[[5, 6, 7, 8], [1, 3, 4, -1]]], dtype=torch.int32),
    ],
    ids=["plain", "tuples", "flat", "tensor", "tensor of one request"],
)
def test_every_form_of_bad_words(name: str, listed: Any) -> None:
    assert read_request(request(**{name: listed})).options == {"bad_words": WORDS}


@pytest.mark.parametrize("name", ["embedding_bias", "py_embedding_bias"])
def test_a_dense_bias(name: str) -> None:
    bias = torch.tensor([0.0, -2.5, 3.0])
    for given in (bias, bias.unsqueeze(0)):
        facts = read_request(request(**{name: given}))
        assert list(facts.options) == ["logit_bias"]
        assert torch.equal(facts.options["logit_bias"], bias)
        assert facts.sampling_kind
    assert read_request(request(**{name: None})).options == {}
    assert read_request(request(**{name: {3: 1.5}})).options == {"logit_bias": {3: 1.5}}


def test_the_engines_seed() -> None:
    """Of requests without one; the columns of the others stay."""
    seeded, has_none = sampling(temperature=[0.5], random_seed=[7]), sampling(temperature=[0.5])
    for engine_seed in (0, 1, 2**32, 2**64 - 1):
        columns = read_request(has_none).columns(engine_seed)
        assert columns["seed"] == seed_words(None, 7, engine_seed=engine_seed)
        assert read_request(seeded).columns(engine_seed)["seed"] == (7, 0)
    assert read_request(has_none).columns() == read_request(has_none).columns(0)
    assert len({read_request(has_none).columns(n)["seed"] for n in (0, 1, 2**32)}) == 3


# --- columns ---


def test_every_column_of_a_request_is_given_or_empty() -> None:
    names = [column.name for column in REQUEST_COLUMNS]
    assert list(read_request(request()).columns()) == [
        "number",
        "prompt_len",
        "stop_ids",
        "top_p_mass",
    ]
    draws = {"temperature": [0.7], "top_k": [5], "top_p": [0.9], "min_p": [0.1]}
    edits = {"repetition_penalty": [1.5], "presence_penalty": [-1], "frequency_penalty": [0.5]}
    given = {**draws, **edits}
    columns = read_request(sampling(min_length=[8], **given)).columns()
    assert {name: columns[name] for name in given} == {n: v[0] for n, v in given.items()}
    assert columns["min_tokens"] == 8
    others = {"number", "prompt_len", "seed", "stop_ids", "min_tokens", "top_p_mass"}
    assert set(columns) == others | set(given) <= set(names)


def test_columns_of_a_request() -> None:
    long_id = 2**40 + 5
    facts = read_request(request(request_id=long_id, py_end_id=2, py_stop_words_list=[[9]]))
    assert facts.request_id == long_id
    columns = {"number": 5, "prompt_len": 3, "stop_ids": (2, 9)}
    assert facts.columns() == {**columns, "top_p_mass": TopPMass.MIN_P}


def test_ids_that_no_slot_has_room_for_are_left_out() -> None:
    """All of them: one that is missing could be accepted as a draft."""
    fits = tuple(range(MAX_STOP_IDS))
    assert read_request(request(py_stop_ids=fits)).columns()["stop_ids"] == fits
    more = read_request(request(py_stop_ids=(*fits, MAX_STOP_IDS)))
    assert more.columns()["stop_ids"] == ()
    assert more.stop.slot_ids is None


# --- who has facts of its own ---


def own() -> LlmRequest:
    params = SamplingParams(max_new_tokens=9, min_tokens=2, relaxed_acceptance=False)
    return LlmRequest(2**31 + 3, [4, 5], params, end_ids=(1,), max_draft_len=3, max_seq_len=64)


def test_the_embedded_executors_own_facts() -> None:
    mine = own()
    facts = read_request(mine, 5)
    assert facts is mine.facts is facts_of(mine, 5, reads_prompt=True)
    assert facts.stop.max_length == facts.full_length == 11
    assert facts.stats is mine.py_acceptance
    assert facts.options == {"max_new_tokens": 9, "min_tokens": 2, "relaxed_acceptance": False}
    assert facts.columns() == {"min_tokens": 2, "number": 3, "prompt_len": 2, "stop_ids": (1,)}
    assert not facts.is_dummy
    assert "py_mtp_facts" not in vars(mine)


def test_what_only_has_the_name_is_no_facts() -> None:
    assert read_request(request(facts=["of the host's"], py_end_id=2)).stop.end_ids == (2,)


def test_facts_are_kept_in_the_request_until_its_prompt_is_read_again() -> None:
    theirs = request(py_end_id=2)
    first = facts_of(theirs, 64, reads_prompt=False)
    assert first == read_request(theirs, 64)
    theirs.py_end_id = 3
    assert facts_of(theirs, 64, reads_prompt=False) is first
    again = facts_of(theirs, 64, reads_prompt=True)
    assert again.stop.end_ids == (3,)
    assert facts_of(theirs, 64, reads_prompt=False) is again


def test_managers_read_the_fields_afresh() -> None:
    """What a sampler kept knows its own limits."""
    theirs = request()
    facts_of(theirs, 64, reads_prompt=True)
    assert read_request(theirs).stop.max_length == UNBOUNDED


def test_facts_of_a_copied_request_are_read_anew() -> None:
    theirs = request(py_end_id=2)
    first = facts_of(theirs, 64, reads_prompt=False)
    copied = request(py_end_id=2, request_id=8, py_mtp_facts=first)
    assert facts_of(copied, 64, reads_prompt=False).request_id == 8


def test_what_goes_beyond_first_choices() -> None:
    options = {
        "min_length": [4],
        "temperature": [0.5],
        "repetition_penalty": [2.0],
        "prompt_ignore_length": [2],
    }
    for name, value in options.items():
        assert needs_sampling(sampling(**{name: value})), name
    assert needs_sampling(request(py_return_log_probs=True))
    for nothing in (request(), sampling(temperature=[0.0], top_k=[4]), sampling(min_length=[1])):
        assert not needs_sampling(nothing)
    mine = own()
    assert needs_sampling(mine)
    assert "py_mtp_needs_sampling" not in vars(mine)
    # read once
    theirs = sampling(temperature=[0.5])
    assert needs_sampling(theirs)
    del theirs.sampling_config
    assert needs_sampling(theirs)


def test_more_end_ids_than_can_be_held_back() -> None:
    """The request is refused with the reason, and no id is masked until it ends."""
    ids = tuple(range(MAX_STOP_IDS + 1))
    facts = read_request(
        request(py_stop_ids=ids, sampling_config=SimpleNamespace(min_length=[5]), py_end_id=0)
    )
    assert facts.refused == (
        "min_tokens=5 and 33 ids that end the text: at most 32 can be held back"
    )
    assert (facts.stop.min_tokens, facts.options) == (0, {})
    held = read_request(request(py_end_id=3, sampling_config=SimpleNamespace(min_length=[5])))
    assert (held.stop.min_tokens, held.refused) == (5, None)


def test_options_that_are_left_out() -> None:
    facts = read_request(sampling(temperature=[0.5], random_seed=[3], min_length=[5]))
    assert facts.without(["temperature", "seed"]).options == {"min_tokens": 5}
    assert facts.without(["logit_bias"]) is facts


class Theirs(IntEnum):
    GENERATION_COMPLETE = 20
    ANOTHER = 21


def test_what_is_read_at_every_step() -> None:
    assert epoch_of(request()) == 0
    assert epoch_of(request(py_epoch=2)) == 2
    states = (RequestState.GENERATION_COMPLETE, Theirs.GENERATION_COMPLETE, "GENERATION_COMPLETE")
    assert {phase_of(request(state=state)) for state in states} == {"GENERATION_COMPLETE"}
    assert ends_prompt(request()) is None
    assert ends_prompt(request(is_last_context_chunk=True)) is True
    assert ends_prompt(request(is_last_context_chunk=False)) is False
    assert num_drafted_of(request(py_draft_tokens=None)) == 0
    assert num_drafted_of(request(py_draft_tokens=[4, 5])) == 2
    assert num_drafted_of(request(py_draft_tokens=[4, 5], py_num_drafted=None)) == 2
    assert num_drafted_of(request(py_draft_tokens=[4, 5], py_num_drafted=0)) == 0
    for effective, expected in ((None, 2), (1, 1), (5, 2)):
        drafted = request(py_draft_tokens=[4, 5], py_draft_tokens_effective_len=effective)
        assert num_drafted_of(drafted) == expected
    assert slot_of(request(py_seq_slot=3, seq_slot=4)) == 3
    assert slot_of(request(py_seq_slot=None, seq_slot=4)) is None  # taken back
    assert (slot_of(request(seq_slot=4)), slot_of(request())) == (4, None)
    assert (has_finished(request()), has_finished(request(is_finished=True))) == (False, True)
    assert may_speculate(request())
    assert not may_speculate(request(py_disable_speculative_decoding=True))


def test_token_after_a_chunk() -> None:
    where = {"context_current_position": 1, "context_chunk_size": 1}
    assert token_after_chunk(request(**where)) == 3
    with_get_token = request(**where, get_token=lambda beam, position: 10 * position + beam)
    assert token_after_chunk(with_get_token) == 20
    assert token_after_chunk(request()) == 0  # the end of the chunk is unknown
    batch = SimpleNamespace(context_requests_chunking=[1, 2])
    assert (num_listed_chunks(batch), num_listed_chunks(SimpleNamespace())) == (2, 0)


def test_verified_drafts_are_set_only_if_the_request_has_the_field() -> None:
    counting, other = request(py_num_draft_tokens_verified=0), request()
    for each in (counting, other):
        set_num_verified(each, 2)
    assert counting.py_num_draft_tokens_verified == 2
    assert not hasattr(other, "py_num_draft_tokens_verified")
