"""Kernels one behind the other, each launched before the one in front has ended.

A kernel that does not wait reads what the step before left there: inputs change with every step,
and all scratch is shared.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch

from mtp_plugin.kernels.top_k import Top1Partials
from mtp_plugin.kernels.top_k import launch as top_k
from mtp_plugin.speculative.ops.acceptance import launch as acceptance
from mtp_plugin.speculative.ops.backend import REFERENCE_OPS, StepOps, triton_ops
from mtp_plugin.speculative.ops.draft import launch as draft_step
from mtp_plugin.speculative.ops.draft_inputs import launch as draft_inputs
from mtp_plugin.speculative.step import Accepted, DraftColumn, FirstPass
from tests.kernels.top_k.launches import captured
from tests.speculative.ops.bits import same_bits
from tests.speculative.ops.on_device import DEVICE, poisoned

MAX_POSITION = 90


@dataclass
class State:
    """What one step reads, and what it changes."""

    logits: torch.Tensor  # [G*(K+1), V]
    drafts: torch.Tensor  # [G, K]
    draft_lens: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    hidden_states: torch.Tensor
    slots: torch.Tensor
    draft_logits: torch.Tensor  # [K, G, V]
    kv_lens: torch.Tensor
    tokens_pool: torch.Tensor
    states_pool: torch.Tensor
    new_drafts: torch.Tensor
    next_tokens: torch.Tensor

    @classmethod
    def of(cls, batch: int, k: int, vocab: int, hidden: int) -> State:
        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=DEVICE)

        rows = batch * (k + 1)
        floats = {"dtype": torch.bfloat16, "device": DEVICE}
        state = cls(
            logits=torch.empty(rows, vocab, **floats),
            drafts=integers(batch, k),
            draft_lens=integers(batch),
            input_ids=integers(rows),
            positions=integers(rows, dtype=torch.int64),
            hidden_states=torch.empty(rows, hidden, **floats),
            slots=integers(batch, dtype=torch.int64),
            draft_logits=torch.empty(k, batch, vocab, **floats),
            kv_lens=integers(batch),
            tokens_pool=integers(batch + 2, k),
            states_pool=torch.empty(batch + 2, k, hidden, **floats),
            new_drafts=poisoned(batch, k, dtype=torch.int32),
            next_tokens=poisoned(batch, k + 1, dtype=torch.int32),
        )
        state.shuffle(torch.Generator(DEVICE).manual_seed(0))
        return state

    def shuffle(self, dice: torch.Generator) -> None:
        """Other inputs, on the device alone: nothing waits for anything."""
        batch, k = self.drafts.shape
        vocab = self.logits.shape[1]
        for tensor in (self.logits, self.hidden_states, self.draft_logits, self.states_pool):
            tensor.normal_(generator=dice)
        best = self.logits.argmax(dim=1).view(batch, k + 1)[:, :k].int()
        wrong = torch.rand(batch, k, generator=dice, device=DEVICE) < 0.3
        self.drafts.copy_(torch.where(wrong, (best + 1) % vocab, best))
        self.draft_lens.random_(0, k + 1, generator=dice)
        self.input_ids.random_(0, vocab, generator=dice)
        self.tokens_pool.random_(0, vocab, generator=dice)
        lens = torch.empty_like(self.slots).random_(1, MAX_POSITION, generator=dice)
        self.positions.view(batch, k + 1).copy_(
            lens.unsqueeze(1) + torch.arange(k + 1, device=DEVICE)
        )
        self.kv_lens.copy_(lens + k + 1)
        order = torch.rand(batch + 2, generator=dice, device=DEVICE).argsort()
        self.slots.copy_(order[:batch])
        self.new_drafts.fill_(-777)
        self.next_tokens.fill_(-777)


class Chain:
    """Accept, first pass, K proposals; `out` is where the kernels write beside the state."""

    def __init__(self, vanilla: bool, state: State) -> None:
        self.vanilla = vanilla
        (batch, k), (rows, vocab) = state.drafts.shape, state.logits.shape
        self.accepted = Accepted.unwritten(batch, k, DEVICE)
        self.scratch = Top1Partials.unwritten(rows, vocab, DEVICE)
        self.draft_scratch = Top1Partials.unwritten(batch, vocab, DEVICE)
        if vanilla:
            room = torch.empty_like(state.hidden_states)
            self.first = FirstPass.unwritten(rows + k - 1, rows, batch, room, state.kv_lens)
        else:
            positions, states = state.positions, state.hidden_states
            self.first = FirstPass.beside_step(positions, states, batch, state.kv_lens)

    def run(self, ops: StepOps, state: State, *, handed_in: bool = True) -> dict[str, torch.Tensor]:
        """All results; those of the kernels lie where they lay the step before."""
        k = state.drafts.shape[1]

        def out(**given: Any) -> dict[str, Any]:
            return given if handed_in else {}

        last, none = state.next_tokens[:, 0], state.kv_lens[:0]
        shape = {"num_contexts": 0, "max_draft_len": k, "draft_lens": state.draft_lens}
        accepted = ops.accept_strict(
            state.logits,
            state.drafts,
            **shape,
            last_tokens=last,
            **out(out=self.accepted, scratch=self.scratch),
        )
        step = state.input_ids, state.positions, state.hidden_states
        shared = {"kv_lens": state.kv_lens, **out(out=self.first)}
        if self.vanilla:
            pools = state.tokens_pool, state.states_pool, state.slots
            counts = accepted.num_accepted, last
            shared |= {"chunk_lens": [], "history_lens": [], "window": k + 1}
            first = ops.vanilla_first_pass(*pools, *step, *counts, None, none, **shared)
        else:
            counts = accepted.tokens, accepted.num_accepted
            shared |= {"num_contexts": 0, "num_ctx_tokens": 0, "max_position": MAX_POSITION}
            first = ops.eagle_first_pass(*step, *counts, None, none, **shared)
        for column in range(k):
            place = DraftColumn(state.new_drafts, state.next_tokens, column)
            if self.vanilla and column + 1 < k:
                place = DraftColumn(
                    state.new_drafts, state.next_tokens, column, first.ids, first.last_rows
                )
            elif not self.vanilla:
                place = DraftColumn(
                    state.new_drafts,
                    state.next_tokens,
                    column,
                    positions=first.next_positions,
                    kv_lens=state.kv_lens,
                    max_position=MAX_POSITION,
                )
            ops.propose(state.draft_logits[column], place, **out(scratch=self.draft_scratch))
        results = {field.name: getattr(accepted, field.name) for field in fields(accepted)}
        results |= {name: getattr(first, name) for name in ("ids", "positions", "last_rows")}
        results["states"] = first.states
        if first.next_positions is not None:
            results["next_positions"] = first.next_positions
        return results | {name: getattr(state, name) for name in CHANGED}


CHANGED = ("kv_lens", "tokens_pool", "states_pool", "new_drafts", "next_tokens")

SIZES = [
    pytest.param(3, 2, 130, 16, 2, id="3x130"),
    pytest.param(8, 3, 32003, 1024, 200, id="8x32003-200-times", marks=pytest.mark.gpu),
    pytest.param(64, 3, 129280, 4096, 40, id="64x129280-40-times", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("batch", "k", "vocab", "hidden", "steps"), SIZES)
@pytest.mark.parametrize("pdl", [True, False], ids=["pdl", "serial"])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("vanilla", [False, True], ids=["eagle", "vanilla"])
def test_every_step_is_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    batch: int,
    k: int,
    vocab: int,
    hidden: int,
    steps: int,
    pdl: bool,
    in_graph: bool,
    vanilla: bool,
) -> None:
    """Steps follow each other without a pause, all with other inputs."""
    if in_graph and DEVICE.type == "cpu":
        pytest.skip("needs a CUDA device")
    if not pdl:
        for module in (acceptance, draft_inputs, draft_step, top_k):
            monkeypatch.setattr(module, "pdl_options", lambda _: {"PDL": False})
    state = State.of(batch, k, vocab, hidden)
    chain, ops = Chain(vanilla, state), triton_ops()

    def step() -> dict[str, torch.Tensor]:
        return chain.run(ops, state)

    if in_graph:
        graph, results = captured(step)
    dice = torch.Generator(DEVICE).manual_seed(1)
    wrong = {}
    emitted = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(steps):
        state.shuffle(dice)
        theirs = copy.deepcopy(state)
        if in_graph:
            graph.replay()
        else:
            results = step()
        expected = chain.run(REFERENCE_OPS, theirs, handed_in=False)
        rows = len(state.input_ids)
        for name, value in expected.items():
            mine, told = (t[:rows] if name == "ids" else t for t in (results[name], value))
            differs = (mine != told).any()
            wrong[name] = wrong[name] | differs if name in wrong else differs
        emitted += expected["num_accepted"].sum()
    assert [name for name, differs in wrong.items() if bool(differs)] == []
    # neither all drafts were right nor all wrong
    assert steps * batch < int(emitted) < steps * batch * (k + 1)


def test_a_state_left_from_the_step_before_is_seen() -> None:
    """The comparison above fails where one kernel reads old partials."""
    state = State.of(3, 2, 130, 16)
    chain = Chain(True, state)
    before = {name: value.clone() for name, value in chain.run(triton_ops(), state).items()}
    state.shuffle(torch.Generator(DEVICE).manual_seed(3))
    after = chain.run(triton_ops(), state)
    for name in ("tokens", "ids", "states", *CHANGED):
        assert not same_bits(before[name], after[name]), name
