"""Penalties in place: example, torch reference and Triton agree, and nothing else is written."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops import penalties_triton
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.logits_processor_state import LogitsProcessorState
from mtp_plugin.ops.penalties import penalize_logits
from mtp_plugin.ops.step import SlotRows
from mtp_plugin.requests.columns import SlotColumn
from mtp_plugin.requests.stopping import MAX_STOP_IDS
from tests.op_arguments import check_arguments, storage
from tests.ops.bits import same_bits
from tests.ops.logits_processing import example
from tests.ops.logits_processing.pools import pools_of
from tests.ops.on_device import DEVICE, INDEX_DTYPES, forbid_launches, vector
from tests.ops.slots import slot_rows
from tests.ops.top_k.launches import captured
from tests.ops.top_k.rows import odd_rows, without_nan

OTHER_COLUMN = SlotColumn("of_a_mode", int, 0, 3)
BIG = penalties_triton.BLOCK
NUMBERS = (0, 0, 1, 2, 7, 32768, 65534, 65535)
PENALTIES = ("repetition", "presence", "frequency")


@dataclass
class Batch:
    """Contexts with one row and generations with k + 1, near their minimum of tokens."""

    logits: torch.Tensor
    slots: SlotRows
    rows: LogitRows
    places: list[example.Place]

    @classmethod
    def of(
        cls,
        seed: int,
        contexts: int,
        generations: int,
        k: int,
        vocab: int,
        *,
        index_dtype: torch.dtype = torch.int64,
        spare: int = 0,
        drafts: bool = True,
        **slots: Any,
    ) -> Batch:
        r, rng = random.Random(seed), torch.Generator().manual_seed(seed)
        few = [r.randrange(vocab) for _ in range(3)]
        requests = contexts + generations
        options = [random_options(r, vocab, few) for _ in range(requests)]
        pools, columns = pools_of(options, vocab, r)
        values = [
            {
                "prompt_len": one.prompt_len,
                "min_tokens": one.min_tokens,
                "stop_ids": [*one.stops, *[-1] * (MAX_STOP_IDS - len(one.stops))],
                "repetition_penalty": one.repetition,
                "presence_penalty": one.presence,
                "frequency_penalty": one.frequency,
                **rows,
            }
            for one, rows in zip(options, columns, strict=True)
        ]
        held = replace(slot_rows(values, [OTHER_COLUMN], seed=seed, **slots), pools=pools)
        positions = [r.randrange(9) for _ in range(requests)]
        drafted = [
            [r.choice([*few, *few, -1, vocab + 3]) for _ in range(k)] for _ in range(generations)
        ]
        given = torch.tensor(drafted, dtype=index_dtype, device=DEVICE).reshape(generations, k)
        rows = LogitRows(
            contexts, k + 1, vector(positions, index_dtype), drafts=given if drafts and k else None
        )
        places = [
            example.Place(one, positions[i] + 1 + j, before[:j])
            for i, one in enumerate(options)
            for before in ([drafted[i - contexts]] if drafts and i >= contexts else [[]])
            for j in range(1 if i < contexts else k + 1)
        ]
        return cls(
            padded(odd_rows(rng, rows.num_rows, vocab, torch.float32), spare),
            held,
            rows,
            places,
        )

    def penalized(self, backend: Backend) -> torch.Tensor:
        """A copy of the logits after the op."""
        logits = storage(self.logits).as_strided(self.logits.shape, self.logits.stride())
        penalize_logits(logits, self.rows, self.slots, backend=backend)
        return logits

    def example(self) -> torch.Tensor:
        expected = [
            example.penalized(row, place)
            for row, place in zip(self.logits.double().tolist(), self.places, strict=True)
        ]
        shape = self.logits.shape
        return torch.tensor(expected, dtype=torch.float64).reshape(shape).to(self.logits)


def padded(rows: torch.Tensor, spare: int) -> torch.Tensor:
    """The same rows, with columns after them that are not the op's."""
    wide = torch.full((rows.shape[0], rows.shape[1] + spare), 77.0, dtype=rows.dtype, device=DEVICE)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


def random_options(r: random.Random, vocab: int, few: list[int]) -> example.LogitsOptions:
    stops = [r.choice([*few, r.randrange(vocab), vocab]) for _ in range(r.choice((0, 1, 3, 32)))]
    minimum = r.choice((0, 0, r.randrange(8), 2**31 - 1))
    if r.random() < 0.2:
        return example.LogitsOptions(stops=stops, prompt_len=r.randrange(8), min_tokens=minimum)
    counts = {token: r.choice(NUMBERS) for token in (*few, r.randrange(vocab))}
    return example.LogitsOptions(
        counts=counts,
        seen={r.randrange(vocab), *(token for token, number in counts.items() if number)},
        repetition=r.choice((1.0, 1.3, 0.4)),
        presence=r.choice((0.0, 0.7, -1.1)),
        frequency=r.choice((0.0, 0.3, -0.6)),
        stops=stops,
        prompt_len=r.randrange(8),
        min_tokens=minimum,
    )


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    contexts=st.integers(0, 3),
    generations=st.integers(0, 3),
    k=st.integers(0, 4),
    vocab=st.sampled_from([1, 2, 31, 32, 33, 100]),
    spare=st.integers(0, 2),
    gap=st.integers(0, 2),
    id_stride=st.integers(1, 3),
    id_dtype=st.sampled_from(INDEX_DTYPES),
    index_dtype=st.sampled_from(INDEX_DTYPES),
    drafts=st.sampled_from([True, True, False]),
)
def test_example_torch_and_triton_agree(seed, contexts, generations, k, vocab, **options) -> None:
    batch = Batch.of(seed, contexts, generations, k, vocab, **options)
    expected = without_nan(batch.example())
    read = [batch.slots.table, *vars(batch.slots.pools).values()]
    kept = [storage(tensor) for tensor in read]
    for backend in Backend:
        found = batch.penalized(backend)
        assert torch.equal(without_nan(found), expected)
        own, before = storage(found), storage(batch.logits)
        for whole in (own, before):  # columns of padding
            whole.as_strided(found.shape, found.stride()).zero_()
        assert same_bits(own, before)
        for tensor, held in zip(read, kept, strict=True):
            assert same_bits(storage(tensor), held)


@pytest.mark.parametrize("backend", Backend)
def test_rows_of_many_blocks(backend: Backend) -> None:
    batch = Batch.of(1, 1, 4, 2, 2 * BIG + 5)
    found = batch.penalized(backend)
    assert torch.equal(without_nan(found), without_nan(batch.example()))
    assert not same_bits(found, batch.logits)


@pytest.mark.parametrize("backend", Backend)
def test_the_order_is_that_of_sglang(backend: Backend) -> None:
    """The presence penalty makes the logit negative before it is scaled."""
    one = example.LogitsOptions(counts={1: 2}, repetition=2.0, presence=1.0, frequency=0.5)
    pools, columns = pools_of([one], 4, random.Random(0))
    penalties = {f"{name}_penalty": getattr(one, name) for name in PENALTIES}
    slots = replace(slot_rows([{"min_tokens": 0, **penalties, **columns[0]}]), pools=pools)
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0]], device=DEVICE)
    penalize_logits(logits, LogitRows.flat(vector([3])), slots, backend=backend)
    assert logits.tolist() == [[1.0, -2.0, 1.0, 1.0]]


@pytest.mark.parametrize("backend", Backend)
def test_no_rows(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_launches(monkeypatch, penalties_triton)
    Batch.of(1, 0, 0, 2, 9).penalized(backend)


def test_wrong_rows_and_slots_are_refused() -> None:
    batch = Batch.of(3, 1, 2, 2, 9)
    with pytest.raises(TensorContractError, match="expected slots with pools, got None"):
        penalize_logits(batch.logits, batch.rows, replace(batch.slots, pools=None))
    rows = replace(batch.rows, column=1, width=1, drafts=None)
    with pytest.raises(TensorContractError, match="got rows of drafts"):
        penalize_logits(batch.logits[:3], rows, batch.slots)


@pytest.mark.parametrize("backend", Backend)
def test_arguments(backend: Backend) -> None:
    batch = Batch.of(3, 2, 2, 2, 7)
    pools = batch.slots.pools
    assert pools is not None
    finite = replace(pools, bias=pools.bias.nan_to_num(nan=0.25))
    arguments = {
        "logits": batch.logits.nan_to_num(nan=0.25),
        "rows": batch.rows,
        "slots": replace(batch.slots, pools=finite),
    }
    refused = {"logits": "row-contiguous", "slots.table": "row-contiguous"}
    refused["rows.drafts"] = "row-contiguous"
    names = [f"slots.pools.{name}" for name in vars(pools)]
    refused |= dict.fromkeys(names, "pools.")
    free = {f"{name}: shorter" for name in (*names, "slots.table", "slots.slot_ids")}
    check_arguments(penalize_logits, arguments, refused=refused, free=free, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("contexts", "generations", "k"), [(1, 0, 0), (0, 1, 3), (7, 60, 3), (0, 256, 1)]
)
def test_real_shapes_in_a_cuda_graph(contexts: int, generations: int, k: int) -> None:
    """Captured once, replayed with other logits, counts, drafts and positions."""
    vocab = 151935
    mine = Batch.of(1, contexts, generations, k, vocab)
    graph, _ = captured(
        lambda: penalize_logits(mine.logits, mine.rows, mine.slots, backend=Backend.TRITON)
    )
    assert mine.slots.pools is not None
    for seed in (2, 5):  # with both, logits of every shape change
        other = Batch.of(seed, contexts, generations, k, vocab)
        mine.slots.table.copy_(other.slots.table)
        mine.slots.slot_ids.copy_(other.slots.slot_ids)
        mine.rows.positions.copy_(other.rows.positions)
        if mine.rows.drafts is not None:
            mine.rows.drafts.copy_(other.rows.drafts)
        for name, pool in vars(mine.slots.pools).items():
            pool.copy_(vars(other.slots.pools)[name])
        mine.logits.copy_(other.logits)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(without_nan(mine.logits), without_nan(other.penalized(Backend.TORCH)))
        assert not same_bits(mine.logits, other.logits)


def test_pools_without_bias_rows_are_small() -> None:
    """Counts may have more rows than the other pools."""
    batch = Batch.of(3, 1, 2, 2, 9)
    pools = batch.slots.pools
    assert pools is not None
    small = LogitsProcessorState(
        pools.bias[:1], pools.allowed[:1], pools.counts, pools.seen, pools.words[:1]
    )
    expected = batch.penalized(Backend.TORCH)
    found = replace(batch, slots=replace(batch.slots, pools=small)).penalized(Backend.TORCH)
    assert same_bits(found, expected)
