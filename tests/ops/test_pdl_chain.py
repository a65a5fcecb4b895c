"""Sequences of kernels, each launched before the previous one has ended.

A kernel that does not wait reads results of the previous step: inputs change with every step, and
results are written to the same memory.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields, replace

import pytest
import torch

from mtp_plugin.ops import draft_triton, top1
from mtp_plugin.ops.acceptance import AcceptanceRules, RelaxedRule, accept
from mtp_plugin.ops.acceptance import accept_triton as acceptance
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.draft import propose
from mtp_plugin.ops.draft_inputs import (
    DraftKVLengths,
    DraftWindows,
    History,
    TargetRows,
    advance_and_build_inputs,
    build_reused_inputs,
    draft_inputs_triton,
)
from mtp_plugin.ops.step import DraftOutput, StepLayout
from tests.ops import slots as slot_tables
from tests.ops.acceptance.cases import PHASE_COLUMNS
from tests.ops.bits import same_bits
from tests.ops.on_device import DEVICE, poisoned
from tests.ops.top_k.launches import captured

MAX_POSITION = 90
BEGIN, END = 1, 2


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
    rule: RelaxedRule  # of requests at those slots
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
        slots = integers(batch, dtype=torch.int64)
        kept = slot_tables.slot_rows([], PHASE_COLUMNS, num_slots=batch + 2)
        rule = RelaxedRule(
            replace(kept, slot_ids=slots), slot_tables.column(kept, "pool"), BEGIN, END
        )
        floats = {"dtype": torch.bfloat16, "device": DEVICE}
        state = cls(
            logits=torch.empty(rows, vocab, **floats),
            drafts=integers(batch, k),
            draft_lens=integers(batch),
            input_ids=integers(rows),
            positions=integers(rows, dtype=torch.int64),
            hidden_states=torch.empty(rows, hidden, **floats),
            slots=slots,
            rule=rule,
            draft_logits=torch.empty(k, batch, vocab, **floats),
            kv_lens=integers(batch),
            tokens_pool=integers(batch + 2, k),
            states_pool=torch.empty(batch + 2, k, hidden, **floats),
            new_drafts=poisoned(batch, k, dtype=torch.int32),
            next_tokens=poisoned(batch, k + 1, dtype=torch.int32),
        )
        state.shuffle(torch.Generator(DEVICE).manual_seed(0))
        return state

    def shuffle(self, rng: torch.Generator) -> None:
        """Other inputs, on the device alone: nothing waits for anything."""
        batch, k = self.drafts.shape
        vocab = self.logits.shape[1]
        for tensor in (self.logits, self.hidden_states, self.draft_logits, self.states_pool):
            tensor.normal_(generator=rng)
        for token in (BEGIN, END):
            often = torch.rand(len(self.logits), generator=rng, device=DEVICE) < 0.15
            self.logits[:, token] += 9 * often
        first, second = self.logits.topk(2).indices.int().view(batch, k + 1, 2)[:, :k].unbind(2)
        wrong = torch.rand(batch, k, generator=rng, device=DEVICE) < 0.3
        self.drafts.copy_(torch.where(wrong, second, first))
        self.draft_lens.random_(0, k + 1, generator=rng)
        self.input_ids.random_(0, vocab, generator=rng)
        self.tokens_pool.random_(0, vocab, generator=rng)
        lens = torch.empty_like(self.slots).random_(1, MAX_POSITION, generator=rng)
        self.positions.view(batch, k + 1).copy_(
            lens.unsqueeze(1) + torch.arange(k + 1, device=DEVICE)
        )
        self.kv_lens.copy_(lens + k + 1)
        order = torch.rand(batch + 2, generator=rng, device=DEVICE).argsort()
        self.slots.copy_(order[:batch])
        self.rule.slots.table.random_(0, vocab, generator=rng)  # stop ids and unread columns
        # the second choice at any distance
        slot_tables.column(self.rule.slots, "relaxed_topk").random_(1, 4, generator=rng)
        for name in ("thinking", "relaxed_limit", "pool"):
            slot_tables.column(self.rule.slots, name).random_(0, 2, generator=rng)
        self.new_drafts.fill_(-777)
        self.next_tokens.fill_(-777)


def run(
    vanilla: bool, state: State, backend: Backend, *, relaxed: bool = False
) -> dict[str, torch.Tensor]:
    """Accept, first pass, K proposals: all results."""
    batch, k = state.drafts.shape
    last = state.next_tokens[:, 0]
    layout = StepLayout((), batch, k, state.kv_lens[:0], state.positions)
    rows = TargetRows(state.input_ids, state.hidden_states)
    kv = DraftKVLengths(state.kv_lens, None)
    accepted = accept(
        layout,
        state.logits,
        state.drafts,
        AcceptanceRules(relaxed=state.rule if relaxed else None),
        draft_lens=state.draft_lens,
        last_tokens=last,
        backend=backend,
    )
    if vanilla:
        history = History(state.tokens_pool, state.states_pool, state.slots)
        first = advance_and_build_inputs(
            layout,
            history,
            rows,
            accepted.num_accepted,
            last,
            DraftWindows(k + 1, []),
            kv=kv,
            backend=backend,
        )
    else:
        first = build_reused_inputs(
            layout,
            rows,
            accepted.tokens,
            accepted.num_accepted,
            max_position=MAX_POSITION,
            kv=kv,
            backend=backend,
        )
    for column in range(k):
        place = DraftOutput(state.new_drafts, state.next_tokens, column)
        if vanilla and column + 1 < k:
            place = replace(place, shifted_ids=first.ids, last_rows=first.last_rows)
        elif not vanilla:
            place = replace(
                place,
                positions=first.next_positions,
                kv_lens=state.kv_lens,
                max_position=MAX_POSITION,
            )
        propose(state.draft_logits[column], place, backend=backend)
    results = {field.name: getattr(accepted, field.name) for field in fields(accepted)}
    del results["scores"], results["sums"], results["rows"]  # of other calls alone
    for name in ("positions", "last_rows", "states"):
        results[name] = getattr(first, name)
    results["ids"] = first.ids[: len(state.input_ids)]  # the others are of later depths
    results["loop_kv_lens"] = first.kv_lens
    results["slot_table"] = state.rule.slots.table
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
@pytest.mark.parametrize("relaxed", [False, True], ids=["strict", "relaxed"])
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
    relaxed: bool,
) -> None:
    """Consecutive steps without a sync, all with other inputs."""
    if in_graph and DEVICE.type == "cpu":
        pytest.skip("needs a CUDA device")
    if not pdl:
        for module in (acceptance, draft_inputs_triton, draft_triton, top1):
            monkeypatch.setattr(module, "pdl_options", lambda _: {"PDL": False})
    state = State.of(batch, k, vocab, hidden)

    def step() -> dict[str, torch.Tensor]:
        return run(vanilla, state, Backend.TRITON, relaxed=relaxed)

    if in_graph:
        graph, results = captured(step)
    rng = torch.Generator(DEVICE).manual_seed(1)
    wrong = {}
    emitted = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(steps):
        state.shuffle(rng)
        theirs = copy.deepcopy(state)
        if in_graph:
            graph.replay()
        else:
            results = step()
        expected = run(vanilla, theirs, Backend.TORCH, relaxed=relaxed)
        for name, value in expected.items():
            differs = (results[name] != value).any()
            wrong[name] = wrong[name] | differs if name in wrong else differs
        emitted += expected["num_accepted"].sum()
    assert [name for name, differs in wrong.items() if bool(differs)] == []
    # neither all drafts were right nor all wrong
    assert steps * batch < int(emitted) < steps * batch * (k + 1)


def test_stale_results_are_noticed() -> None:
    """The comparison above fails if a kernel reads old partials, or an old phase."""
    state = State.of(3, 2, 130, 16)
    first = run(True, state, Backend.TRITON, relaxed=True)
    before = {name: value.clone() for name, value in first.items()}
    state.shuffle(torch.Generator(DEVICE).manual_seed(3))
    after = run(True, state, Backend.TRITON, relaxed=True)
    for name in ("tokens", "ids", "states", "slot_table", *CHANGED):
        assert not same_bits(before[name], after[name]), name
