"""Logits processing before sampling: example, torch and Triton agree."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.logit_rows import processing as reference
from mtp_plugin.ops.sampling import Role, sample_tokens
from mtp_plugin.ops.sampling import sample_triton as launch
from tests.op_arguments import check_arguments, storage
from tests.ops.bits import same_bits
from tests.ops.logits_processing.example import LogitsOptions
from tests.ops.logits_processing.pools import pools_of
from tests.ops.on_device import DEVICE, INDEX_DTYPES, vector
from tests.ops.sampling.cases import slots_of
from tests.ops.sampling.example import Options
from tests.ops.sampling.margins import Comparison
from tests.ops.sampling.processed_rows import EditedBatch, columns_of, loaded, write
from tests.ops.top_k.rows import DTYPES

batches = {
    "seed": st.integers(0, 2**31),
    "contexts": st.integers(0, 2),
    "generations": st.integers(0, 2),
    "width": st.integers(1, 3),
    "dtype": st.sampled_from(DTYPES),
    "index_dtype": st.sampled_from(INDEX_DTYPES),
    "gap": st.integers(0, 2),
    "role": st.sampled_from(Role),
    "ahead": st.booleans(),
    "cut": st.booleans(),
    "drafts": st.sampled_from([True, True, False]),
}


@settings(max_examples=32)
@given(
    vocab=st.sampled_from((1, 2, 7, 31, 32, 33, 127)),
    **{**batches, "width": st.integers(1, 7)},  # more drafts than are loaded at once
)
def test_values_equal_the_example(vocab: int, **shape: Any) -> None:
    """Bit for bit, except for the sign of zero."""
    case = EditedBatch.of(vocab=vocab, greedy=True, **shape)
    expected = case.processed().logits
    rows, slots = case.batch.rows, case.batch.slots
    kept = [storage(tensor) for tensor in (slots.table, case.logits, *vars(slots.pools).values())]
    values = reference.process_logits(case.logits, rows, slots, vocab_ids=case.batch.vocab_ids)
    assert values.dtype == torch.float32
    assert torch.equal(values, expected)
    if len(expected):
        assert torch.equal(loaded(case), expected)
    if len(expected) and case.batch.vocab_ids is None:
        assert torch.equal(loaded(case, by_block=True), expected)
    for tensor, held in zip(
        (slots.table, case.logits, *vars(slots.pools).values()), kept, strict=True
    ):
        assert same_bits(storage(tensor), held)


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_example_torch_and_triton_agree(greedy: bool) -> None:
    comparison = Comparison()

    @settings(max_examples=16)
    @given(
        vocab=st.sampled_from((1, 2, 7, 31, 33, 127)),
        pools=st.sampled_from([True, True, True, True, False]),
        **batches,
    )
    def agree(vocab: int, **shape: Any) -> None:
        case = EditedBatch.of(vocab=vocab, greedy=greedy, **shape)
        expected = case.example()
        for backend in Backend:
            tokens = case.tokens(backend)
            if greedy:
                assert tokens.tolist() == expected
            comparison.compare(case, expected, tokens)

    agree()
    assert comparison.rows["all"] > 60
    comparison.check()


@pytest.mark.thinned
@pytest.mark.parametrize("parts", [1, 4])
def test_torch_and_triton_agree_over_many_chunks(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program reads one piece or more, as it does of many rows."""
    monkeypatch.setattr(launch, "_plan", launch._plan.__wrapped__)  # keeps none
    monkeypatch.setattr(launch, "SCAN_BLOCKS_PROCESSED", ((0, parts),))
    comparison = Comparison()

    @settings(max_examples=6)
    @given(vocab=st.sampled_from((1023, 4096, 4099, 9001)), greedy=st.booleans(), **batches)
    def agree(vocab: int, **shape: Any) -> None:
        case = EditedBatch.of(vocab=vocab, **shape)
        expected = case.tokens(Backend.TORCH).tolist()
        comparison.compare(case, expected, case.tokens(Backend.TRITON))

    agree()
    assert comparison.rows["all"] > 5
    comparison.check()


BOTH = pytest.mark.parametrize("backend", Backend)


@BOTH
def test_counts_saturate_at_16_bits(backend: Backend) -> None:
    """Drafts add nothing to a full count."""
    logits_options = LogitsOptions(counts={1: 65534}, frequency=1.0)
    pools, columns = pools_of([logits_options], 2, random.Random(0))
    slots = slots_of([Options(temperature=0.0)], random.Random(0))
    write(slots, [{**columns_of(logits_options), **columns[0]}])
    rows = LogitRows(0, 4, vector([5]), drafts=vector([[1, 1, 1]]))
    logits = torch.tensor([[-65535.5, 0.0]] * 4, device=DEVICE)
    tokens = sample_tokens(logits, rows, replace(slots, pools=pools), backend=backend)
    assert tokens.tolist() == [1] * 4


# --- arguments ---


@BOTH
@pytest.mark.parametrize("cut", [False, True])
def test_arguments(backend: Backend, cut: bool) -> None:
    batch = EditedBatch.of(5, 7, greedy=False, cut=cut, ahead=True).batch
    pools = batch.slots.pools
    assert pools is not None
    finite = replace(pools, bias=pools.bias.nan_to_num(nan=0.25))
    arguments = {
        "logits": batch.logits.nan_to_num(nan=0.25),
        "rows": batch.rows,
        "slots": replace(batch.slots, pools=finite),
        "vocab_ids": batch.vocab_ids,
    }
    gaps = "row-contiguous"
    refused = {"slots.table": gaps, "rows.drafts": "row-contiguous", "logits": "row-contiguous"}
    refused |= {f"slots.pools.{name}": f"pools.{name}" for name in vars(pools)}
    refused |= {"vocab_ids": "expected contiguous torch.int32"} if cut else {}
    names = ("slots.table", "slots.slot_ids", *(f"slots.pools.{name}" for name in vars(pools)))
    free = {f"{name}: shorter" for name in names} | {"rows.drafts: list"}
    check_arguments(sample_tokens, arguments, refused=refused, free=free, backend=backend)


# each pair of dtypes compiles the sampling kernels anew, which takes longer than all launches
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("vocab", "cut", "dtype", "draft_dtype"),
    [
        pytest.param(151936, True, torch.bfloat16, torch.int64, id="cut-151936"),
        pytest.param(151936, False, torch.float16, torch.int32, id="whole-151936"),
        pytest.param(32000, False, torch.float32, torch.int64, id="whole-32000"),
    ],
)
def test_real_vocabularies(
    vocab: int, cut: bool, dtype: torch.dtype, draft_dtype: torch.dtype
) -> None:
    comparison = Comparison()
    shape: dict[str, Any] = {"cut": cut, "dtype": dtype, "generations": 5, "width": 4}
    for seed in range(4):
        case = EditedBatch.of(seed, vocab, greedy=seed % 2 == 0, draft_dtype=draft_dtype, **shape)
        if not cut:
            result = reference.process_logits(case.logits, case.batch.rows, case.batch.slots)
            assert torch.equal(loaded(case), result)
            assert torch.equal(loaded(case, by_block=True), result)
        expected = case.tokens(Backend.TORCH).tolist()
        comparison.compare(case, expected, case.tokens(Backend.TRITON))
    comparison.check()
