"""Relaxed verification: what it keeps of a request, and what it reads of a host's step."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.errors import MetadataError
from mtp_plugin.ops.acceptance import STRICT
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.step import StepLayout
from mtp_plugin.requests.stopping import MAX_STOP_IDS, StopRule
from mtp_plugin.requests.thinking import thinking_after
from mtp_plugin.speculative.drafting import make_verification_inputs
from mtp_plugin.speculative.host import DecodingOptions, HostStep, RequestFacts
from mtp_plugin.speculative.state import SlotStateManager
from mtp_plugin.speculative.verification import RelaxedVerification, VerificationInputs
from tests.ops.bits import same_bits
from tests.ops.on_device import DEVICE, vector

BEGIN, END, TOPK, DELTA = 40, 41, 3, 0.25
OPTIONS = DecodingOptions(
    2,
    use_relaxed_acceptance_for_thinking=True,
    relaxed_topk=TOPK,
    relaxed_delta=DELTA,
    thinking_tokens=(BEGIN, END),
)
POOL = "mtp_relaxed_delta_pool"


def facts(request_id: int = 5, stops: int = 2, **options: Any) -> RequestFacts:
    stop = StopRule(max_length=100, end_ids=tuple(range(stops)))
    return RequestFacts(request_id=request_id, stop=stop, options=options)


# --- a request that gets its slot ---


def values(mode: RelaxedVerification, request: RequestFacts, tokens: list[int]) -> tuple[Any, ...]:
    given = mode.slot_values(request, tokens)
    assert set(given) == {column.name for column in mode.columns}
    names = (POOL, "thinking", "relaxed_topk", "relaxed_limit")
    return tuple(given[name] for name in names)


def test_a_request_has_what_the_config_says() -> None:
    mode = RelaxedVerification(OPTIONS, DEVICE)
    assert values(mode, facts(), [1, 2]) == (0.0, 0, TOPK, DELTA)
    assert values(mode, facts(), [1, BEGIN, 2]) == (DELTA, 1, TOPK, DELTA)
    assert values(mode, facts(), [BEGIN, END, 2]) == (0.0, 0, TOPK, DELTA)


def test_request_without_relaxed_acceptance_is_strict() -> None:
    """Its phase is kept all the same, where no delta shows it."""
    mode = RelaxedVerification(OPTIONS, DEVICE)
    strict = facts(relaxed_acceptance=False)
    assert values(mode, strict, [1, BEGIN]) == (0.0, 1, 1, 0.0)
    assert values(mode, strict, [1]) == (0.0, 0, 1, 0.0)
    assert values(mode, facts(relaxed_acceptance=True), [1]) == (0.0, 0, TOPK, DELTA)


def test_a_request_has_a_threshold_of_its_own() -> None:
    mode = RelaxedVerification(OPTIONS, DEVICE)
    own = {"relaxed_topk": 7, "relaxed_delta": 0.75}
    assert mode.served_options == set(own)
    assert values(mode, facts(**own), [1, BEGIN]) == (0.75, 1, 7, 0.75)
    assert values(mode, facts(relaxed_delta=0.0), [1, BEGIN]) == (0.0, 1, TOPK, 0.0)
    assert values(mode, facts(relaxed_delta=2.5), [1, BEGIN]) == (2.5, 1, TOPK, 2.5)
    assert values(mode, facts(relaxed_topk=1), [1]) == (0.0, 0, 1, DELTA)


def test_label_shows_the_thresholds() -> None:
    assert RelaxedVerification.label(OPTIONS).settings == "top 3, delta 0.25"


def test_more_stop_ids_than_a_slot_has_room_for(caplog: pytest.LogCaptureFixture) -> None:
    mode = RelaxedVerification(OPTIONS, DEVICE)
    with caplog.at_level(logging.WARNING, "mtp_plugin"):
        assert values(mode, facts(stops=MAX_STOP_IDS), [1]) == (0.0, 0, TOPK, DELTA)
        assert not caplog.records
        for request_id in (7, 8):
            many = facts(request_id, stops=MAX_STOP_IDS + 1)
            assert values(mode, many, [1, BEGIN]) == (0.0, 1, 1, 0.0)
    (record,) = caplog.records  # said once
    assert record.getMessage().startswith("a request has 33 stop ids, and relaxed")


def test_ignore_eos_with_min_tokens_is_strict(caplog: pytest.LogCaptureFixture) -> None:
    """A slot holds only stop ids that min_tokens masks: such a request is strict, and logged."""
    mode = RelaxedVerification(OPTIONS, DEVICE)
    ignored = StopRule(max_length=100, ignored_ids=(2,))
    with caplog.at_level(logging.WARNING, "mtp_plugin"):
        assert values(mode, replace(facts(), stop=ignored), [1, BEGIN])[1:] == (1, TOPK, DELTA)
        assert not caplog.records
        held = replace(facts(), stop=replace(ignored, min_tokens=1))
        assert values(mode, held, [1, BEGIN]) == (0.0, 1, 1, 0.0)
        # with those the slot has one id too many
        full = StopRule(max_length=100, end_ids=tuple(range(MAX_STOP_IDS)), ignored_ids=(99,))
        assert values(mode, replace(facts(), stop=full), [1, BEGIN]) == (0.0, 1, 1, 0.0)
        assert values(mode, replace(held, request_id=6), [1, BEGIN]) == (0.0, 1, 1, 0.0)
    of_ignored, of_full = (record.getMessage() for record in caplog.records)  # each reason once
    assert of_ignored.startswith("a request has ignore_eos and min_tokens; such")
    assert of_full.startswith("a request has 33 stop ids")
    assert full.slot_ids is None


def test_an_empty_slot_is_that_of_a_request_that_does_not_think() -> None:
    mode = RelaxedVerification(OPTIONS, DEVICE)
    manager = SlotStateManager((mode,), 2, device=DEVICE)
    assert manager.mtp_relaxed_delta_pool.eq(0).all()
    for name, empty in (("thinking", 0), ("relaxed_topk", TOPK), ("relaxed_limit", DELTA)):
        assert manager.table.column(name).eq(empty).all()


# --- a step ---


class Prompts:
    """Chunks of prompts, whose requests think before them or not; then one generation."""

    def __init__(
        self,
        pieces: list[list[int]],
        thinks: bool = True,
        own_pool: bool = False,
    ):
        self.mode, self.pieces = RelaxedVerification(OPTIONS, DEVICE), pieces
        self.manager = SlotStateManager((self.mode,), len(pieces) + 2, device=DEVICE)
        self.slots = random.Random(len(pieces)).sample(range(len(pieces) + 2), len(pieces))
        if own_pool:
            self.manager.mtp_relaxed_delta_pool = torch.zeros(50, 2, device=DEVICE)[:, 1]
        for slot in self.slots:  # with a delta that the host wrote
            self.manager.mtp_relaxed_delta_pool[slot] = 0.125 if thinks else 0.0
            self.manager.table.column("thinking")[slot] = int(thinks)

    def step(self, **options: Any) -> VerificationInputs:
        lens = [len(piece) for piece in self.pieces]
        layout = StepLayout(tuple(lens), 1, 2, vector(lens, torch.int32))
        slot_ids = vector([*self.slots, self.manager.sentinel_slot])
        step = HostStep(
            layout,
            vector([BEGIN, END], torch.int32),
            manager=self.manager,
            slot_ids=slot_ids,
            slots=self.manager.slot_rows(slot_ids),
            **options,
        )
        # rows of generations have thinking tokens that are not those of a prompt
        ids = [token for piece in self.pieces for token in piece] + [BEGIN, END, BEGIN]
        logits = torch.zeros(len(lens) + 3, 50, device=DEVICE)
        return make_verification_inputs(step, logits, vector(ids, torch.int32))


PIECES = [
    [1],
    [BEGIN],
    [1, BEGIN, 2],
    [END],
    [BEGIN, 1, END],
    [END, 3, BEGIN],
    [BEGIN, BEGIN, 7],
    [1, 2, 3],
]


@pytest.mark.parametrize("own_pool", [False, True], ids=["column", "own-pool"])
@pytest.mark.parametrize("before", [False, True])
def test_prompts_are_scanned_without_next_prompt_tokens(before: bool, own_pool: bool) -> None:
    """The last thinking token of a piece counts; one without any leaves the phase as it is."""
    prompts = Prompts(PIECES, before, own_pool)
    manager, inputs = prompts.manager, prompts.step()
    untouched = manager.table.rows.clone(), manager.mtp_relaxed_delta_pool.clone()
    rules = prompts.mode.verify(inputs, STRICT, backend=Backend.TORCH)
    assert rules.relaxed.delta_in_force is manager.mtp_relaxed_delta_pool
    for slot, piece in zip(prompts.slots, PIECES, strict=True):
        thinks = thinking_after(([BEGIN] if before else []) + piece, BEGIN, END)
        assert manager.table.column("thinking")[slot] == thinks
        # the delta of the host stays while its phase does
        delta = 0.125 if before else DELTA
        assert manager.mtp_relaxed_delta_pool[slot] == (delta if thinks else 0.0)
        manager.table.column("thinking")[slot] = untouched[0][
            slot, manager.table.columns.offset("thinking")
        ]
        manager.mtp_relaxed_delta_pool[slot] = untouched[1][slot]
    assert same_bits(manager.table.rows, untouched[0])
    assert same_bits(manager.mtp_relaxed_delta_pool, untouched[1])


@pytest.mark.parametrize("why", ["next tokens", "no ids", "no prompts"])
def test_prompts_are_not_scanned(why: str) -> None:
    """With next_prompt_tokens whole prompts were scanned when the requests got their slots."""
    prompts = Prompts([] if why == "no prompts" else PIECES)
    inputs = prompts.step(
        next_prompt_tokens=vector([-1] * len(PIECES)) if why == "next tokens" else None,
    )
    if why == "no ids":
        inputs = replace(inputs, prompt_ids=None)
    before = prompts.manager.table.rows.clone()
    prompts.mode.verify(inputs, STRICT, backend=Backend.TORCH)
    assert same_bits(prompts.manager.table.rows, before)


def test_a_pool_is_read_afresh() -> None:
    """A host may replace it between two steps."""
    prompts = Prompts([])
    prompts.manager.mtp_relaxed_delta_pool = torch.ones(9, device=DEVICE)
    rules = prompts.mode.verify(prompts.step(), STRICT, backend=Backend.TORCH)
    assert rules.relaxed.delta_in_force is prompts.manager.mtp_relaxed_delta_pool
    assert rules.forced_matches is None


def test_a_step_needs_slots() -> None:
    prompts = Prompts([])
    bare = HostStep(prompts.step().layout, vector([1, 2]), manager=SimpleNamespace())
    logits = torch.zeros(3, 50, device=DEVICE)
    mode = RelaxedVerification(OPTIONS, DEVICE)
    for manager, message in (
        (bare.manager, r"needs spec_metadata\.slot_ids"),
        (None, r"needs spec_metadata\.mtp_hidden_states_manager"),
    ):
        inputs = make_verification_inputs(replace(bare, manager=manager), logits)
        with pytest.raises(MetadataError, match=message):
            mode.verify(inputs, STRICT, backend=Backend.TORCH)
