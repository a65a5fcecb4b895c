"""The product of few rows: torch's linear, however the weight is cut; counters end at 0."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from mtp_plugin.errors import TensorContractError
from mtp_plugin.models.fused.gating.reference import silu_mul
from mtp_plugin.models.fused.skinny import launch
from mtp_plugin.models.fused.skinny.launch import SkinnyTiling
from tests.models.fused.closeness import FLOAT, HALF, KINDS, Kind, rolled, strided
from tests.ops.on_device import DEVICE
from tests.vocab_reduce.launches import poisoned_outputs


@pytest.fixture(scope="module")
def tickets() -> torch.Tensor:
    return launch.new_tickets(DEVICE)


@settings(max_examples=15)
@given(
    rows=st.sampled_from([0, 1, 5, 16, 17]),
    columns=st.integers(1, 70),
    width=st.sampled_from([16, 50, 64, 130]),
    split=st.integers(1, 5),
    gated=st.booleans(),
    biased=st.booleans(),
)
def test_kernel_on_random_shapes(
    tickets: torch.Tensor,
    rows: int,
    columns: int,
    width: int,
    split: int,
    gated: bool,
    biased: bool,
) -> None:
    tiling = SkinnyTiling(tile=32, block=32, split=split, stages=2)
    for kind in KINDS:
        x = rolled(rows, width, kind=kind)
        weight = rolled(2 * columns if gated else columns, width, kind=kind, seed=1, scale=0.2)
        bias = rolled(columns, kind=kind, seed=2) if biased and not gated else None
        with poisoned_outputs(launch):
            out = launch.skinny_linear(
                strided(x), weight, bias, tickets=tickets, gated=gated, tiling=tiling
            )
        expected = functional.linear(x, weight, bias)
        kind.assert_close(out, silu_mul(expected) if gated else expected)
        assert not tickets.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_its_own_tiling(tickets: torch.Tensor, kind: Kind, gated: bool) -> None:
    x, weight = (
        rolled(3, 2048, kind=kind, scale=0.1),
        rolled(72, 2048, kind=kind, seed=1, scale=0.1),
    )
    chosen = launch.tiling_for(36 if gated else 72, 2048, kind.dtype, gated=gated)
    assert (chosen.split > 1) is (kind is HALF)
    out = launch.skinny_linear(x, weight, tickets=tickets, gated=gated)
    expected = functional.linear(x, weight)
    kind.assert_close(out, silu_mul(expected) if gated else expected)


def test_splits_of_the_benchmark_shapes() -> None:
    """Enough programs for every multiprocessor, and none of them without work."""
    for columns, width, gated in [
        (6144, 4096, False),
        (4096, 4096, False),
        (11008, 4096, True),
        (4096, 11008, False),
        (129280, 4096, False),
    ]:
        cut = launch.tiling_for(columns, width, torch.bfloat16, gated=gated)
        tiles = -(-columns // (cut.tile // 2 if gated else cut.tile))
        blocks = -(-width // cut.block)
        assert tiles * cut.split >= 256
        assert (cut.split - 1) * -(-blocks // cut.split) < blocks
        assert tiles <= launch.MOST_TILES


@pytest.mark.parametrize(
    ("x", "weight", "options", "message"),
    [
        ((65, 8), (4, 8), {}, "x: expected up to 64 contiguous rows"),
        ((2, 8), (4, 9), {}, r"weight: expected contiguous torch.float32 \[columns, 8\]"),
        ((2, 8), (4, 8), {"bias": torch.ones(3)}, r"bias: expected \[4\], got \[3\]"),
        ((2, 8), (4, 8), {"bias": torch.ones(2), "gated": True}, "bias: expected none beside"),
    ],
)
def test_refusals(
    tickets: torch.Tensor, x: tuple[int, int], weight: tuple[int, int], options: dict, message: str
) -> None:
    operands = [torch.ones(shape, device=DEVICE) for shape in (x, weight)]
    with pytest.raises(TensorContractError, match=message):
        launch.skinny_linear(*operands, tickets=tickets, **options)


def test_too_few_tickets_are_refused() -> None:
    operands = [torch.ones(shape, device=DEVICE) for shape in ((1, 64), (96, 64))]
    tiling = SkinnyTiling(tile=32, block=32, split=2, stages=2)
    few = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(TensorContractError, match="tickets: expected int32 for 3 tiles"):
        launch.skinny_linear(*operands, tickets=few, tiling=tiling)


def test_equal_inputs_give_equal_bits(tickets: torch.Tensor) -> None:
    x, weight = rolled(4, 200, kind=FLOAT), rolled(40, 200, kind=FLOAT, seed=1)
    tiling = SkinnyTiling(tile=32, block=32, split=4, stages=2)
    first = launch.skinny_linear(x, weight, tickets=tickets, tiling=tiling)
    assert torch.equal(first, launch.skinny_linear(x, weight, tickets=tickets, tiling=tiling))
