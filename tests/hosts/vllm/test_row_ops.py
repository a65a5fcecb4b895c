"""Sampling, verification and draft sampling on vLLM's ragged rows."""

from __future__ import annotations

import random
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtp_plugin.errors import HostError, TensorContractError
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.sampling import DraftedBy, VerifiedBy
from tests.hosts.vllm.rows import (
    NUM_DRAFTS,
    NUM_SLOTS,
    VOCAB,
    Batch,
    draft,
    expected,
    make_batch,
    make_ops,
    output_of,
    sample,
    verify,
    with_drafts,
)
from tests.ops.on_device import DEVICE, vector

BACKENDS = pytest.mark.parametrize("backend", Backend)
SHAPES = {
    "uniform": [4, 4, 4, 4],
    "one request": [4],
    "ragged": [1, 4, 2, 3, 4, 1],
    "shorter drafts": [3, 3, 3],
    "prompts among generations": [4, 1, 4, 4, 1, 1],
    "prompts alone": [1, 1, 1],
}


@pytest.mark.thinned("seed", cases=2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_backends_and_the_expectation_agree(shape: str, seed: int) -> None:
    batch = make_batch(seed, SHAPES[shape])
    sampled = {backend: sample(make_ops(backend), batch).tolist() for backend in Backend}
    choices = sampled[Backend.TORCH]
    assert sampled[Backend.TRITON] == choices
    batch = with_drafts(batch, choices, seed)
    for backend in Backend:
        accepted = verify(make_ops(backend), batch)
        assert output_of(accepted) == expected(batch, choices)
        assert accepted.tokens.shape == (len(batch.indices), NUM_DRAFTS + 1)


def test_drafts_are_both_accepted_and_rejected_in_these_batches() -> None:
    lengths = set()
    for seed in range(4):
        batch = make_batch(seed, SHAPES["ragged"])
        choices = sample(make_ops(), batch).tolist()
        lengths |= {len(tokens) for tokens in expected(with_drafts(batch, choices, seed), choices)}
    assert lengths == {1, 2, 3, 4}


def test_greedy_requests_get_the_argmax() -> None:
    ops = make_ops()
    batch = make_batch(3, [2, 2, 2])
    batch = Batch([0, 5, 10], batch.drafts, batch.positions, batch.logits)  # slots of temperature 0
    assert sample(ops, batch).tolist() == batch.logits.argmax(1).tolist()


@pytest.mark.parametrize("sizes", [[4, 4], [4, 3, 1]])
def test_placeholders_are_never_accepted(sizes: list[int]) -> None:
    ops = make_ops()
    batch = make_batch(5, sizes)
    choices = sample(ops, batch)
    drafts = [[-1] * (size - 1) for size in sizes]
    batch = Batch(batch.indices, drafts, batch.positions, batch.logits)
    accepted = verify(ops, batch)
    assert accepted.num_accepted.tolist() == [1] * len(sizes)
    assert output_of(accepted) == [[int(choices[row])] for row in batch.first_rows[:-1]]


@BACKENDS
@pytest.mark.parametrize("method", [VerifiedBy.COUPLED, VerifiedBy.REJECTION, VerifiedBy.BLOCK])
@pytest.mark.parametrize("sizes", [[4, 4, 4], [4, 1, 3]])
def test_rows_without_finite_values_give_valid_tokens(
    backend: Backend, method: VerifiedBy, sizes: list[int]
) -> None:
    """vLLM embeds every token id, and repeats a step that gave no token for ever."""
    columns = {slot: {"temperature": 1.3, "verification": method} for slot in range(NUM_SLOTS)}
    ops = make_ops(backend, columns=columns, keeps_draft_probs=True)
    batch = make_batch(11, sizes)
    batch.logits[0] = float("nan")  # the first row of a request
    batch.logits[sizes[0]] = float("-inf")
    batch.logits[-1] = float("nan")  # the row after the last draft
    choices = sample(ops, batch)
    assert choices.min() >= 0
    drafts = [
        choices[first : first + size - 1].tolist()
        for first, size in zip(batch.first_rows, sizes, strict=False)
    ]
    accepted = verify(ops, Batch(batch.indices, drafts, batch.positions, batch.logits))
    assert accepted.num_accepted.min() >= 1
    for tokens in output_of(accepted):
        assert all(0 <= token < VOCAB for token in tokens)
    assert accepted.tokens.dtype == torch.int64
    assert accepted.tokens.min() >= 0


@pytest.mark.parametrize("column", range(NUM_DRAFTS))
def test_drafts_have_the_noise_of_the_row_that_verifies_them(column: int) -> None:
    """With equal logits, the draft is the token that the target samples at that position."""
    ops = make_ops()
    batch = make_batch(column, [1] * 8)
    indices, positions = vector(batch.indices), vector(batch.positions)
    drafts = draft(ops, batch.logits, indices, positions, column)
    assert drafts.dtype == torch.int64
    assert drafts.tolist() == ops.sample(batch.logits, indices, positions + column).tolist()
    elsewhere = ops.sample(batch.logits, indices, positions + column + 1)
    assert drafts.tolist() != elsewhere.tolist()


@pytest.mark.parametrize("ids", [range(30), [0, 3, *range(9, 40, 2), 60]])
@pytest.mark.parametrize("keeps_draft_probs", [False, True])
def test_listed_drafts_have_the_noise_of_their_ids(
    ids: list[int] | range, keeps_draft_probs: bool
) -> None:
    """They are the target's tokens if no other id can be sampled; ranks pad the columns."""
    given = {"draft_ids": ids, "num_ranks": 7, "keeps_draft_probs": keeps_draft_probs}
    ops, batch = make_ops(**given), make_batch(3, [1] * 8)
    indices, positions = vector(batch.indices), vector(batch.positions)
    others = [token for token in range(VOCAB) if token not in ids]
    batch.logits[:, others] = float("-inf")
    padding = ops.settings.most_draft_columns - len(ids)
    logits = torch.nn.functional.pad(batch.logits[:, list(ids)], (0, padding), value=99.0)
    drafts = draft(ops, logits, indices, positions, 1).tolist()
    assert drafts == ops.sample(batch.logits, indices, positions + 1).tolist()
    assert {*drafts} <= {*ids}
    more = torch.nn.functional.pad(logits, (0, 1))
    with pytest.raises(HostError, match=f"computes {more.shape[1]} logits, expected {len(ids)}"):
        draft(ops, more, indices, positions, 1)


def test_fewer_logits_than_ids_without_a_list_are_refused() -> None:
    """Their columns would be read as ids; EAGLE3 scatters them to all ids before."""
    ops, indices = make_ops(), vector([0, 1])
    with pytest.raises(HostError, match=f"computes 60 logits, expected {VOCAB}: leave out its"):
        draft(ops, torch.zeros(2, 60, device=DEVICE), indices, indices)


def test_constants_are_restored_and_rows_of_requests_stay() -> None:
    """After sleep of level 2, which discards device memory."""
    ids, method = [0, 3, 9, 60], {"verification": VerifiedBy.REJECTION}
    columns = {6: method | {"draft_sampling": DraftedBy.PLAIN, "temperature": 1.0}}
    ops = make_ops(draft_ids=ids, keeps_draft_probs=True, columns=columns)
    logits, indices = make_batch(3, [1] * 2).logits[:, ids], vector([6, -1])
    positions = vector([5, 6])
    drafts = draft(ops, logits, indices, positions).tolist()
    kept, probs = ops.slots.table[:NUM_SLOTS].clone(), ops.draft_probs.clone()
    for constant in (ops._columns, ops._draft_ids, ops.slots.table[-1], ops.slots._padding):
        constant.fill_(7)
    ops.draft_probs[:, :, 1] = 0.5
    ops.restore()
    assert torch.equal(ops.slots.table[:NUM_SLOTS], kept)
    assert torch.equal(ops.draft_probs, probs)
    assert ops._columns.tolist() == [*range(NUM_DRAFTS + 1)]
    assert ops.slots.of_padded(indices).of(slice(None)).tolist() == [6, NUM_SLOTS]
    assert draft(ops, logits, indices, positions).tolist() == drafts


def test_padding_rows_of_drafts_give_valid_tokens() -> None:
    ops = make_ops()
    batch = make_batch(2, [1] * 6)
    indices, positions = vector(batch.indices), vector(batch.positions)
    plain = draft(ops, batch.logits, indices, positions, 0)
    batch.logits[4:] = float("nan")
    indices[4:] = -1
    padded = draft(ops, batch.logits, indices, positions, 0)
    assert padded[:4].tolist() == plain[:4].tolist()
    assert all(0 <= token < VOCAB for token in padded.tolist())


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_index_dtypes_of_all_vllm_versions_are_accepted(
    backend: Backend, dtype: torch.dtype
) -> None:
    ops = make_ops(backend)
    batch = make_batch(2, [1] * 4)
    indices, positions = vector(batch.indices), vector(batch.positions)
    drafts = draft(ops, batch.logits, indices.to(dtype), positions, 1)
    assert drafts.tolist() == draft(ops, batch.logits, indices, positions, 1).tolist()
    choices = ops.sample(batch.logits, indices.to(dtype), positions)
    assert choices.tolist() == ops.sample(batch.logits, indices, positions).tolist()


def test_a_seed_gives_the_same_tokens_in_any_batch() -> None:
    """Neither the order of rows, the size of the batch nor the slot changes a request's tokens."""
    ops = make_ops()
    batch = make_batch(8, [4, 2, 1, 3, 4])
    batch = with_drafts(batch, sample(ops, batch).tolist(), 8)
    together = output_of(verify(ops, batch))
    rng = random.Random(8)
    for requests in (*([r] for r in range(5)), rng.sample(range(5), 5), rng.sample(range(5), 3)):
        part = batch.of(requests)
        assert output_of(verify(ops, part)) == [together[r] for r in requests]
    moved = make_ops(
        Backend.TORCH, seeds={(index + 5) % NUM_SLOTS: 1000 + index for index in range(7)}
    )
    low = Batch([0, 1, 2, 3, 4], batch.drafts, batch.positions, batch.logits)
    high = Batch([5, 6, 7, 8, 9], batch.drafts, batch.positions, batch.logits)
    assert sample(moved, high).tolist() == sample(ops, low).tolist()


def test_the_number_of_drafts_does_not_change_a_seed() -> None:
    """Rows verified together give the tokens of single rows at the same positions."""
    batch = make_batch(21, [4, 4, 4, 4, 4])
    batch = with_drafts(batch, sample(make_ops(), batch).tolist(), 21)
    ops, without_drafts = make_ops(), make_ops(num_drafts=0)
    output = output_of(verify(ops, batch))
    indices, positions = batch.expanded()
    single = []
    for row in range(len(indices)):
        one = slice(row, row + 1)
        single += without_drafts.sample(batch.logits[one], indices[one], positions[one]).tolist()
    for first, tokens in zip(batch.first_rows, output, strict=False):
        assert tokens == single[first : first + len(tokens)]


def test_other_seeds_and_positions_give_other_tokens() -> None:
    ops = make_ops()
    flat = torch.zeros(40, VOCAB, device=DEVICE)
    ones = torch.ones(40, dtype=torch.int64, device=DEVICE)  # slot 1: temperature 1
    by_position = ops.sample(flat, ones, vector(range(40)))
    assert by_position.unique().numel() > 15
    other = make_ops(seeds={1: 5})
    assert other.sample(flat, ones, vector(range(40))).tolist() != by_position.tolist()


@pytest.mark.parametrize("sizes", [[4] * 10, [4, 1] * 5])
@pytest.mark.parametrize(
    ("rates", "output_tokens"), [([1.0, 1.0, 1.0], 4), ([1.0, 0.0, 0.0], 2), ([0.0, 0.0, 0.0], 1)]
)
def test_synthetic_rates_decide_whatever_the_drafts_are(
    sizes: list[int], rates: list[float], output_tokens: int
) -> None:
    ops = make_ops(rates=rates)
    batch = make_batch(4, sizes)
    drafts = [[1] * (size - 1) for size in sizes]  # valid ids
    batch = Batch(batch.indices, drafts, batch.positions, batch.logits)
    accepted = verify(ops, batch)
    assert accepted.num_accepted.tolist() == [min(output_tokens, size) for size in sizes]


@pytest.mark.parametrize("sizes", [[4] * 12, [3, 4, 1] * 4])
def test_synthetic_acceptance_is_alike_in_both_backends_and_any_batch(sizes: list[int]) -> None:
    batch = make_batch(4, sizes)
    batch = Batch(batch.indices, [[1] * (s - 1) for s in sizes], batch.positions, batch.logits)
    rates = [0.7, 0.5, 0.3]
    together = []
    for backend in Backend:
        ops = make_ops(backend, rates=rates)
        together.append(verify(ops, batch).num_accepted.tolist())
    assert together[0] == together[1]
    assert len(set(together[0])) > 1
    ops = make_ops(rates=rates)
    for request in range(len(sizes)):
        part = batch.of([request])
        accepted = verify(ops, part)
        assert accepted.num_accepted.tolist() == [together[0][request]]


@BACKENDS
def test_no_op_writes_logits(backend: Backend) -> None:
    ops = make_ops(backend)
    batch = make_batch(9, [4, 2, 1])
    before = batch.logits.clone()
    verify(ops, batch)
    draft(ops, batch.logits, *batch.expanded(), 0)
    assert torch.equal(batch.logits, before)


class HostReads(TorchDispatchMode):
    """Counts the values that the host reads, which a CUDA graph cannot capture."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keeps_draft_probs", [False, True])
def test_draft_sampling_can_be_captured(keeps_draft_probs: bool) -> None:
    ops = make_ops(keeps_draft_probs=keeps_draft_probs)
    logits = torch.randn(3, VOCAB, device=DEVICE)
    indices, positions = vector([4, 0, -1]), vector([9, 3, 0])
    with HostReads() as reads:
        draft(ops, logits, indices, positions, step=1)
    assert reads.count == 0


def test_steps_of_known_shapes_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new dtype is, and so is a step that failed before."""
    ops, batch = make_ops(), make_batch(0, [2, 1, 4])
    accepted = verify(ops, batch).tokens.tolist()
    with pytest.raises(TensorContractError, match="logits: expected floating"):
        verify(ops, replace(batch, logits=batch.logits.to(torch.int32)))
    with monkeypatch.context() as patch:
        for module in ("sampling.sample", "acceptance.accept"):
            patch.setattr(import_module(f"mtp_plugin.ops.{module}"), "_check", None)
        assert verify(ops, batch).tokens.tolist() == accepted
        for again in (replace(batch, logits=batch.logits.double()), make_batch(0, [2, 1])):
            with pytest.raises(TypeError):
                verify(ops, again)
