"""Token history updates: the reference equals torch equals Triton; other rows are unchanged."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.ops import token_history_triton
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logits_processor_state import LogitsProcessorState
from mtp_plugin.ops.step import Accepted, SlotRows
from mtp_plugin.ops.token_history import update_token_history
from mtp_plugin.requests.columns import SlotColumn
from mtp_plugin.requests.options import MAX_BAD_WORD_LEN
from tests.op_arguments import check_arguments, storage
from tests.ops.bits import same_bits
from tests.ops.logits_processing.example import LogitsOptions
from tests.ops.logits_processing.pools import bits_of, pools_of
from tests.ops.on_device import DEVICE, INDEX_DTYPES, POISON, forbid_launches, vector
from tests.ops.slots import on_copy, slot_rows
from tests.ops.token_history.example import Kept
from tests.ops.top_k.launches import captured

OTHER_COLUMN = SlotColumn("of_a_mode", int, 0, 3)
HIGH = (0, 1, 32767, 32768, 65530, 65534, 65535)


@dataclass
class Batch:
    """What was emitted, and what was kept before."""

    accepted: Accepted
    slots: SlotRows
    runs: list[list[int]]
    kept: list[Kept]

    @classmethod
    def of(cls, seed: int, requests: int, k: int, vocab: int, **slots: Any) -> Batch:
        rng = random.Random(seed)
        few = [rng.randrange(vocab) for _ in range(3)]
        # ids outside the vocabulary are of the text, and not counted
        ids = (*few, *few, rng.randrange(vocab), vocab, 2**31 - 1)
        runs = [[rng.choice(ids) for _ in range(rng.randint(0, k + 1))] for _ in range(requests)]
        kept, logits_options = [], []
        for _ in range(requests):
            recent = [rng.choice((-1, *few)) for _ in range(MAX_BAD_WORD_LEN)]
            if rng.random() < 0.3:
                kept.append(Kept(recent))
                logits_options.append(LogitsOptions())
                continue
            counts = {t: rng.choice(HIGH) for t in (*few, rng.randrange(vocab))}
            seen = {rng.randrange(vocab), *(t for t, n in counts.items() if n)}
            kept.append(Kept(recent, counts, seen, vocab))
            logits_options.append(LogitsOptions(counts=counts, seen=seen))
        pools, columns = pools_of(logits_options, vocab, rng)
        values = [{"recent": one.recent, **rows} for one, rows in zip(kept, columns, strict=True)]
        held = slot_rows(values, [OTHER_COLUMN], seed=seed, **slots)
        # values after a run are not read
        tokens = [
            [*run, *(rng.choice((-1, few[0], POISON)) for _ in range(k + 1 - len(run)))]
            for run in runs
        ]
        accepted = Accepted(
            torch.tensor(tokens, dtype=torch.int32, device=DEVICE).reshape(requests, k + 1),
            vector(map(len, runs), torch.int32),
            torch.zeros(requests, dtype=torch.int32, device=DEVICE),
        )
        return cls(accepted, replace(held, pools=pools), runs, kept)

    def reference(self) -> list[torch.Tensor]:
        """Table, counts and seen bits after the update; all else is unchanged."""
        slots, pools = self.slots, self.slots.pools
        assert pools is not None
        table, counts, seen = (t.cpu().clone() for t in (slots.table, pools.counts, pools.seen))
        recent, rows = slots.columns.offset("recent"), slots.columns.offset("count_row")
        for request, (run, before) in enumerate(zip(self.runs, self.kept, strict=True)):
            one = replace(before, counts=before.counts and dict(before.counts))
            one = replace(one, seen=None if one.seen is None else set(one.seen))
            one.emit(run)
            slot = int(slots.slot_ids[request])
            table[slot, recent : recent + MAX_BAD_WORD_LEN] = torch.tensor(one.recent).int()
            if one.counts is None or one.seen is None:
                continue
            row = int(table[slot, rows])
            for token, number in one.counts.items():
                counts[row, token] = number - 2**16 if number >= 2**15 else number
            seen[row] = bits_of(one.seen, seen.shape[1])
        return [tensor.to(DEVICE) for tensor in (table, counts, seen)]

    def noted(self, backend: Backend) -> Batch:
        """On copies of all that is moved on."""
        assert self.slots.pools is not None
        pools = LogitsProcessorState(*(pool.clone() for pool in vars(self.slots.pools).values()))
        slots = replace(on_copy(self.slots), pools=pools)
        update_token_history(self.accepted, slots, backend=backend)
        return replace(self, slots=slots)


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**31),
    requests=st.integers(0, 6),
    k=st.sampled_from((0, 1, 2, 3, 7, 16, 20)),
    vocab=st.sampled_from((1, 2, 31, 32, 33, 100)),
    gap=st.integers(0, 2),
    id_stride=st.integers(1, 3),
    id_dtype=st.sampled_from(INDEX_DTYPES),
)
def test_reference_torch_and_triton_agree(seed, requests, k, vocab, **slots) -> None:
    batch = Batch.of(seed, requests, k, vocab, **slots)
    expected = batch.reference()
    given_pools = batch.slots.pools
    assert given_pools is not None
    for backend in Backend:
        noted = batch.noted(backend)
        pools = noted.slots.pools
        assert pools is not None
        for tensor, reference in zip(
            (noted.slots.table, pools.counts, pools.seen), expected, strict=True
        ):
            assert torch.equal(tensor, reference)
        for name in ("bias", "allowed", "words"):
            assert same_bits(vars(pools)[name], vars(given_pools)[name])
        # what lies between the rows of the table is unused
        own, before = storage(noted.slots.table), storage(batch.slots.table)
        for whole in (own, before):
            table = noted.slots.table
            whole.as_strided(table.shape, table.stride(), table.storage_offset()).zero_()
        assert torch.equal(own, before)


@pytest.mark.parametrize("backend", Backend)
def test_rows_of_padding_share_a_slot(backend: Backend) -> None:
    """Whatever they write there, the other requests have their own values."""
    batch = Batch.of(5, 3, 3, 40, slots=[1, 2, 6])
    expected = batch.reference()
    ids = vector([1, 2, 6, 6, 6])
    tokens = torch.cat([batch.accepted.tokens, batch.accepted.tokens[:2]])
    numbers = torch.cat([batch.accepted.num_accepted, batch.accepted.num_accepted[:2]])
    first = batch.slots.columns.offset("count_row")
    batch.slots.table[6, first] = -1
    padded = replace(
        batch,
        accepted=Accepted(tokens, numbers, torch.zeros_like(numbers)),
        slots=replace(batch.slots, slot_ids=ids),
    )
    noted = padded.noted(backend)
    others = [slot for slot in range(len(expected[0])) if slot != 6]
    assert torch.equal(noted.slots.table[others], expected[0][others])
    for request, one_of in enumerate(batch.kept[:2]):
        if one_of.counts is not None:
            row = int(noted.slots.table[request + 1, first])
            assert torch.equal(noted.slots.pools.counts[row], expected[1][row])


@pytest.mark.parametrize("backend", Backend)
def test_without_pools_or_requests_nothing_is_launched(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_launches(monkeypatch, token_history_triton)
    Batch.of(1, 0, 2, 9).noted(backend)
    batch = Batch.of(1, 2, 2, 9)
    before = storage(batch.slots.table)
    update_token_history(batch.accepted, replace(batch.slots, pools=None), backend=backend)
    assert torch.equal(storage(batch.slots.table), before)


@pytest.mark.parametrize("backend", Backend)
def test_arguments(backend: Backend) -> None:
    batch = Batch.of(2, 3, 3, 40)
    pools = batch.slots.pools
    assert pools is not None
    finite = replace(pools, bias=pools.bias.nan_to_num(nan=0.25))
    arguments = {"accepted": batch.accepted, "slots": replace(batch.slots, pools=finite)}
    refused = {"accepted.tokens": "row-contiguous", "slots.table": "row-contiguous"}
    refused |= {f"slots.pools.{name}": f"pools.{name}" for name in vars(pools)}
    names = ("slots.table", "slots.slot_ids", *(f"slots.pools.{name}" for name in vars(pools)))
    free = {f"{name}: shorter" for name in names} | {"accepted.status"}
    check_arguments(update_token_history, arguments, refused=refused, free=free, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize(("requests", "k"), [(1, 0), (3, 3), (64, 7), (256, 16)])
def test_real_shapes_in_a_cuda_graph(requests: int, k: int) -> None:
    """Captured once, replayed over other runs; without synchronization."""
    vocab = 151936
    mine = Batch.of(1, requests, k, vocab)
    graph, _ = captured(
        lambda: update_token_history(mine.accepted, mine.slots, backend=Backend.TRITON)
    )
    for seed in (2, 3):
        other = Batch.of(seed, requests, k, vocab)
        expected = other.noted(Backend.TORCH).slots
        assert mine.slots.pools is not None
        assert other.slots.pools is not None
        assert expected.pools is not None
        mine.slots.table.copy_(other.slots.table)
        mine.slots.slot_ids.copy_(other.slots.slot_ids)
        for name, pool in vars(mine.slots.pools).items():
            pool.copy_(vars(other.slots.pools)[name])
        mine.accepted.tokens.copy_(other.accepted.tokens)
        mine.accepted.num_accepted.copy_(other.accepted.num_accepted)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(mine.slots.table, expected.table)
        assert torch.equal(mine.slots.pools.counts, expected.pools.counts)
        assert torch.equal(mine.slots.pools.seen, expected.pools.seen)
