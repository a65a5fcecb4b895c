"""Logits processing before sampling: example, torch and Triton agree."""

from __future__ import annotations

import math
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
from mtp_plugin.ops.step import StepLayout
from tests.op_arguments import check_arguments, storage
from tests.ops.bits import same_bits
from tests.ops.logits_processing import example
from tests.ops.logits_processing.example import LogitsOptions, Place
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


# --- single rows ---


def one(
    logits_options: LogitsOptions,
    row: list[float],
    backend: Backend,
    *,
    drafts: torch.Tensor | None = None,
    column: int = 0,
) -> list[int]:
    """The ids that a greedy request's rows draw; as many rows as drafts in front, and one."""
    pools, columns = pools_of([logits_options], len(row), random.Random(0))
    slots = slots_of([Options(temperature=0.0)], random.Random(0))
    write(slots, [{**columns_of(logits_options), **columns[0]}])
    width = 1 if drafts is None else drafts.shape[1] + 1 - column
    rows = LogitRows(0, width, vector([5]), None, column, drafts)
    logits = torch.tensor([row] * width, device=DEVICE)
    tokens = sample_tokens(logits, rows, replace(slots, pools=pools), backend=backend)
    before = [[]] if drafts is None else [drafts[0, : column + i].tolist() for i in range(width)]
    for i, token in enumerate(tokens.tolist()):
        expected = example.edited(row, Place(logits_options, 0, before[i]))
        assert expected.index(max(expected)) == token or (
            token == -1 and max(expected) == -math.inf
        )
    return tokens.tolist()


BOTH = pytest.mark.parametrize("backend", Backend)


@BOTH
@pytest.mark.parametrize("place", [5, 2500])
def test_drafts_count_in_every_piece_of_a_program(
    backend: Backend, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "SCAN_BLOCKS_PROCESSED", ((0, 4),))
    row = [0.0] * 4096
    row[place], row[3000] = 9.0, 8.0
    drafts = vector([place]).view(1, 1)
    assert one(LogitsOptions(counts={}, presence=5.0), row, backend, drafts=drafts) == [place, 3000]


INF, NAN = math.inf, math.nan
FALLING = [float(100 - token) for token in range(70)]
RISING = [float(token) for token in range(70)]
COUNTED = {0: 65535, 1: 1, 2: 65535}
NEGATIVE = LogitsOptions(counts=COUNTED, frequency=-3e38, presence=-3e38, repetition=1e-30)
SEEN = LogitsOptions(counts={}, seen={1}, repetition=2.0, presence=50.0, frequency=50.0)
THRICE = LogitsOptions(counts={1: 3}, presence=1.0, frequency=0.5)
FULL = LogitsOptions(counts={1: 65534}, frequency=1.0)
EMPTY = LogitsOptions(counts={}, frequency=1.0)
ROWS: dict[str, list[tuple[LogitsOptions, list[float], list[int]]]] = {
    "bias": [
        (LogitsOptions(bias={2: 1.5}), [1.0, 2.0, 1.0], [2]),
        (LogitsOptions(bias={1: -1.0}), [1.0, 2.0, 1.0], [0]),  # the first of equals
    ],
    "no bias or penalty changes masked values": [
        (LogitsOptions(bias={0: 3e38, 2: 3e38}), [-INF, 0.0, NAN], [1]),
        (LogitsOptions(bias={0: INF, 1: -9.0, 2: INF}), [-INF, 0.0, NAN], [1]),
        (LogitsOptions(bias={0: NAN, 1: -9.0}), [5.0, 0.0, -INF], [1]),
        (NEGATIVE, [-INF, 0.0, NAN], [1]),
        (replace(NEGATIVE, allowed={1}), [9.0, -9.0, 9.0], [1]),
        (LogitsOptions(allowed={1}, bias={0: INF, 2: 9.0}), [9.0, -9.0, 9.0], [1]),
        # a penalty that float32 holds as 0
        (LogitsOptions(counts=COUNTED, repetition=1e-60), [-INF, 0.0, -INF], [1]),
    ],
    "all tokens are masked": [
        (LogitsOptions(allowed={1}), [1.0, -INF, 1.0], [-1]),
        (LogitsOptions(allowed=()), [1.0, 2.0], [-1]),
        (LogitsOptions(bias={0: -INF, 1: -INF}), [1.0, 2.0], [-1]),
    ],
    "infinity, also of quotients": [
        (LogitsOptions(counts={1: 3}, presence=9.0, repetition=2.0), [1e9, INF, INF], [1]),
        (LogitsOptions(allowed={0, 2}), [9.0, INF, 1.0], [0]),
        (LogitsOptions(counts={1: 1}, repetition=1e-38), [5.0, 4.0, 1.0], [1]),
        (LogitsOptions(counts={1: 1}, repetition=0.5), [3.2e38, 3e38, 1.0], [1]),
    ],
    "allowed ids": [
        (LogitsOptions(allowed={31, 3}), RISING, [31]),
        (LogitsOptions(allowed={63, 32}), RISING, [63]),
        (LogitsOptions(allowed=range(70)), RISING, [69]),
    ],
    "repetition applies to seen tokens, other penalties to counted ones": [
        (SEEN, [3.0, 5.0, -9.0], [0]),
        (SEEN, [2.0, 5.0, -9.0], [1]),  # 2.5, from which nothing is subtracted
        (SEEN, [-7.0, -4.0, -9.0], [0]),  # -8
        (THRICE, [2.0, 5.0, 2.6], [2]),  # 2.5
        (THRICE, [2.0, 5.0, 2.4], [1]),
        (replace(FULL, counts={1: 32768}), [-32768.5, 0.0], [1]),
    ],
}
AFTER_DRAFTS = [
    # every draft before a row counts
    (LogitsOptions(counts={}, presence=40.0), FALLING, [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6]),
    (LogitsOptions(counts={}, repetition=8.0), FALLING, [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6]),
    (EMPTY, [0.0, 1.5, 0.2], [1, 0, 1, 2**32 + 1], [1, 1, 1, 2, 2]),
    # without counts drafts are not even read
    (LogitsOptions(bias={}), [0.0, 1.5, 0.2], [1, 0, 1, 2**32 + 1], [1] * 5),
    # counts saturate at 16 bits
    (FULL, [-65534.5, 0.0, -65535.5], [1, 1, 1], [1, 0, 0, 0]),
    (FULL, [-65535.5, 0.0], [1, 1, 1], [1, 1, 1, 1]),
]


@BOTH
@pytest.mark.parametrize("name", ROWS)
def test_single_rows(name: str, backend: Backend) -> None:
    for logits_options, row, expected in ROWS[name]:
        assert one(logits_options, row, backend) == expected


@BOTH
def test_rows_after_drafts(backend: Backend) -> None:
    for logits_options, row, drafts, expected in AFTER_DRAFTS:
        given = vector(drafts).unsqueeze(0)
        assert one(logits_options, row, backend, drafts=given) == expected
    given = vector([1, 0, 1, 2**32 + 1]).unsqueeze(0)
    assert one(EMPTY, [0.0, 1.5, 0.2], backend, drafts=given, column=3) == [2, 2]


@BOTH
def test_reduced_vocabulary_uses_target_ids(backend: Backend) -> None:
    logits_options = LogitsOptions(bias={40: 5.0}, allowed={40, 7}, counts={7: 1}, frequency=1.0)
    pools, columns = pools_of([logits_options], 50, random.Random(0))
    slots = slots_of([Options(temperature=0.0)], random.Random(0))
    write(slots, [{**columns_of(logits_options), **columns[0]}])
    slots = replace(slots, pools=pools)
    logits = torch.tensor([[9.0, 4.0, 1.0]], device=DEVICE)
    rows = LogitRows(0, 1, vector([5]))
    for ids, expected in (([3, 7, 40], 40), ([3, 7, 41], 7), ([3, 8, 41], -1)):
        cut = vector(ids, torch.int32)
        assert sample_tokens(logits, rows, slots, vocab_ids=cut, backend=backend).tolist() == [
            expected
        ]


@BOTH
def test_rows_of_drafts(backend: Backend) -> None:
    """They count the drafts before them, for contexts too."""
    logits_options = [LogitsOptions(counts={}, frequency=2.0), LogitsOptions()]
    pools, columns = pools_of(logits_options, 4, random.Random(0))
    slots = slots_of([Options(temperature=0.0)] * 2, random.Random(1))
    write(slots, [{**columns_of(a), **c} for a, c in zip(logits_options, columns, strict=True)])
    layout = StepLayout((2,), 1, 1, vector([2]), vector([0, 1, 5, 6]))
    drafts = vector([3, 2, 1, 3, 2, 1]).reshape(2, 3)
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 2, device=DEVICE)
    for column, expected in ((0, [3, 3]), (1, [2, 3]), (2, [1, 3])):
        rows = LogitRows.of_drafts(layout, vector([1, 2]), column, drafts)
        tokens = sample_tokens(logits, rows, replace(slots, pools=pools), backend=backend)
        assert tokens.tolist() == expected


@BOTH
def test_contexts_have_no_draft_before_them(backend: Backend) -> None:
    """Also in batches without generations."""
    logits_options = LogitsOptions(counts={}, frequency=2.0)
    pools, columns = pools_of([logits_options], 4, random.Random(0))
    slots = slots_of([Options(temperature=0.0)], random.Random(1))
    write(slots, [{**columns_of(logits_options), **columns[0]}])
    drafts = torch.full((1, 3), 3, device=DEVICE)[:0]
    rows = LogitRows(1, 1, vector([4]), None, 3, drafts)
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]], device=DEVICE)
    assert sample_tokens(logits, rows, replace(slots, pools=pools), backend=backend).tolist() == [3]


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
