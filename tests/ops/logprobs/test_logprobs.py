"""Log-probabilities: example, torch reference and Triton agree, for many rows and shapes."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.ops import logprobs_triton
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logprobs import compute_logprobs
from mtp_plugin.ops.row_sums import RowSums
from mtp_plugin.requests.logprobs import ENTRY_WIDTH
from mtp_plugin.requests.options import MAX_LOGPROBS
from tests.op_arguments import poisoned_memory
from tests.ops.logprobs.cases import Case, check_example, check_same, layout_of
from tests.ops.on_device import DEVICE, INDEX_DTYPES, POISON, vector
from tests.ops.sampling.cases import Batch
from tests.ops.slots import column, slot_rows
from tests.ops.top_k.launches import captured
from tests.ops.top_k.rows import DTYPES, strided

cases = {
    "seed": st.integers(0, 2**31),
    "contexts": st.integers(0, 3),
    "generations": st.integers(0, 2),
    "k": st.integers(0, 3),
    "dtype": st.sampled_from(DTYPES),
    "token_dtype": st.sampled_from(INDEX_DTYPES),
    "gap": st.integers(0, 2),
}


@pytest.mark.parametrize("backend", Backend)
def test_example_of_log_probabilities(backend: Backend) -> None:
    @settings(max_examples=60 if backend is Backend.TORCH else 25)
    @given(vocab=st.integers(1, 40) | st.sampled_from((127, 129, 700)), **cases)
    def agree(vocab: int, **shape: object) -> None:
        case = Case.of(vocab=vocab, **shape)
        check_example(case, case.run(backend))
        check_example(case, case.run(backend, case.sums()))

    agree()


@settings(max_examples=6)
@given(vocab=st.sampled_from((4095, 4097, 9001)), some_rows=st.sampled_from((0, 64)), **cases)
def test_torch_and_triton_agree_over_many_pieces(
    vocab: int, some_rows: int, **shape: object
) -> None:
    """With programs that read one block, and with programs that read several."""
    case = Case.of(vocab=vocab, **shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs_triton, "SOME_ROWS", some_rows)
        expected = case.run(Backend.TORCH)
        check_same(expected, case.run(Backend.TRITON))
    for backend in Backend:
        check_same(expected, case.run(backend, case.sums()))


def entries_of(backend: Backend, rows: list[list[float]], tokens: list[int], number: int):
    count = len(rows)
    return compute_logprobs(
        layout_of(0, count, 0),
        torch.tensor(rows, device=DEVICE),
        vector(tokens).unsqueeze(1),
        vector([1] * count),
        number,
        backend=backend,
    )


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("with_sums", [False, True])
def test_tokens_outside_the_vocabulary(backend: Backend, with_sums: bool) -> None:
    case = Case.of(3, 7, contexts=1, generations=3, k=2)
    counts = torch.full_like(case.counts, 3).clamp_max(case.counts.new_tensor([1, 3, 3, 3]))
    outside = torch.tensor([-1, 7, 99, 2**31 - 1], device=DEVICE).view(4, 1).expand(4, 3)
    case = case.replaced(tokens=outside, counts=counts, logits=case.logits.clone())
    case.logits[2, 3] = math.inf
    check_example(case, case.run(backend, case.sums() if with_sums else None))


@pytest.mark.parametrize("backend", Backend)
def test_logits_of_one_log_probability_keep_their_order(backend: Backend) -> None:
    """Next to a value of 4000 the other two have equal log-probabilities."""
    rows = [[0.125, 0.125 + 2**-20, 4000.0]]
    got = entries_of(backend, rows, [0], 3)
    assert got.top_ids[0, 0, :3].tolist() == [2, 1, 0]
    assert got.ranks.tolist() == [[3]]


def tied_rows(vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows whose n-th highest value occurs in many chunks, or does not exist."""
    noise = torch.Generator().manual_seed(vocab)
    few = torch.randint(0, 2, (vocab,), generator=noise).float()
    tenth = torch.full((vocab,), -1.5)
    tenth[torch.randperm(vocab, generator=noise)[:10]] = 3.0
    sparse = torch.full((vocab,), -math.inf)
    sparse[torch.randperm(vocab, generator=noise)[:5]] = torch.randn(5, generator=noise)
    rows = [
        torch.zeros(vocab),
        torch.full((vocab,), -2.5),
        few,
        torch.randint(0, 40, (vocab,), generator=noise) / 4,
        tenth,
        tenth.flip(0),
        sparse,
        torch.full((vocab,), -math.inf),
        torch.randn(vocab, generator=noise).to(torch.bfloat16).float(),
        torch.arange(vocab) / 64,
        torch.arange(vocab).flip(0) / 64,
    ]
    return torch.stack(rows).to(dtype)


@pytest.mark.thinned(cases=5)
@pytest.mark.parametrize("with_sums", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [7, 4096, 4500])
def test_ties_at_the_last_listed_token(vocab: int, dtype: torch.dtype, with_sums: bool) -> None:
    """Also tokens of the lowest ranks, for every number of listed tokens."""
    rows = tied_rows(vocab, dtype)
    rng = random.Random(vocab)
    for shift in range(2):
        requested = [(2 * place + shift) % (MAX_LOGPROBS + 1) for place in range(len(rows))]
        tokens = [rng.choice((0, vocab - 1, rng.randrange(vocab))) for _ in rows]
        case = Case(
            layout_of(0, len(rows), 0),
            strided(rows, shift),
            vector(tokens).unsqueeze(1),
            vector([1] * len(rows)),
            slot_rows([{"logprobs": number} for number in requested]),
            requested,
        )
        check_example(case, case.run(Backend.TRITON, case.sums() if with_sums else None))
        check_same(case.run(Backend.TORCH), case.run(Backend.TRITON))


@pytest.mark.parametrize("backend", Backend)
def test_sums_of_sampling_are_enough(backend: Backend) -> None:
    """Tokens that were sampled from the same rows, with options of every kind."""
    rng = random.Random(5)
    for dtype in DTYPES if backend is Backend.TORCH else DTYPES[1:2]:
        batch = Batch.of(9, 4500, contexts=2, generations=3, width=2, dtype=dtype, gap=1)
        requested = [-1, 3, 0, 20, 7]
        slots = batch.slots.slot_ids[: len(requested)]
        column(batch.slots, "logprobs")[slots] = vector(requested, torch.int32)
        with poisoned_memory():
            sums = RowSums.unwritten(batch.logits)
            sampled = batch.tokens(backend, sums=sums).clamp_min(0)
        tokens = torch.full((5, 2), POISON, dtype=torch.int32, device=DEVICE)
        tokens[:2, 0] = sampled[:2]
        tokens[2:] = sampled[2:].view(3, 2)
        counts = vector([1, 1, *(rng.randrange(1, 3) for _ in range(3))])
        case = Case(layout_of(2, 3, 1), batch.logits, tokens, counts, batch.slots, requested)
        got = case.run(backend, sums)
        check_same(case.run(Backend.TORCH), got)
        check_same(case.run(backend), got)


def test_rows_are_not_scanned_where_there_are_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_triton, "logprob_scan_kernel", SimpleNamespace())
    case = Case.of(3, 300)
    check_example(case, case.run(Backend.TRITON, case.sums()))
    with pytest.raises(TypeError, match="not subscriptable"):
        case.run(Backend.TRITON)


@pytest.mark.parametrize("backend", Backend)
def test_one_number_for_all(backend: Backend) -> None:
    rows = [[0.0, 3.0, 1.0], [5.0, 2.0, 4.0]]
    nothing = entries_of(backend, rows, [1, 2], -1)
    assert nothing.tokens.tolist() == [[-1], [-1]]
    assert nothing.entries.shape == (2, 1, ENTRY_WIDTH)
    alone = entries_of(backend, rows, [1, 2], 0)
    assert alone.ranks.tolist() == [[1], [2]]
    assert bool((alone.top_ids == -1).all())
    assert alone.values.flatten().tolist() == pytest.approx(
        torch.tensor(rows).log_softmax(1)[[0, 1], [1, 2]].tolist(), abs=1e-6
    )


@pytest.mark.gpu
@pytest.mark.parametrize("with_sums", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_captured_step_follows_its_inputs(dtype: torch.dtype, with_sums: bool) -> None:
    def fresh(seed: int) -> Case:
        return Case.of(seed, 129280, contexts=0, generations=8, k=3, dtype=dtype)

    case = fresh(8)
    sums = case.sums() if with_sums else None
    graph, got = captured(lambda: case.run(Backend.TRITON, sums))
    for seed in range(3):
        other = fresh(seed)
        for name in ("logits", "tokens", "counts"):
            getattr(case, name).copy_(getattr(other, name))
        case.slots.table.copy_(other.slots.table)
        case.slots.slot_ids.copy_(other.slots.slot_ids)
        if sums is not None:
            sums.tops.copy_(other.sums().tops)
            sums.masses.copy_(other.sums().masses)
        graph.replay()
        check_same(other.run(Backend.TORCH), got)
