"""The Triton backend at real sizes against the sdpa backend in double precision, and in graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from mtp_plugin.hosts.embedded.attention import find_backend
from tests.hosts.embedded.attention.case import LAYER, Case, Heads
from tests.ops.on_device import DEVICE, read_back_forbidden
from tests.ops.top_k.launches import captured

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of values of unit variance, absolute; weights are rounded to the type before they multiply."""


def in_double(case: Case) -> torch.Tensor:
    """The step of the same rounded rows, gathered and attended in float64."""
    exact = dataclasses.replace(case, dtype=torch.float64)
    exact.projected = case.projected.double()
    exact.key_pool, exact.value_pool = case.key_pool.double(), case.value_pool.double()
    return exact.attend(find_backend("sdpa"))[0]


def assert_close(case: Case, output: torch.Tensor) -> None:
    alive = case.alive()
    assert alive.any()
    assert torch.isfinite(output).all()
    expected = in_double(case)[alive]
    torch.testing.assert_close(output[alive].double(), expected, rtol=0, atol=TOLERANCE[case.dtype])


def generations(batch: int, rows: int, longest: int, seed: int = 0, **options) -> Case:
    """Lengths from a few to ``longest``; some requests have fewer drafts than rows."""
    rng = torch.Generator().manual_seed(seed)
    kv_lens = (torch.randint(rows, longest, (batch,), generator=rng)).tolist()
    kv_lens[0] = longest
    absent = torch.randint(0, rows, (batch,), generator=rng).tolist()
    limits = [length - fewer for length, fewer in zip(kv_lens, absent, strict=True)]
    options = {"heads": Heads(32, 8, 128), "block_size": 32, "seed": seed, **options}
    return Case([rows] * batch, kv_lens, limits, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "longest", "rows"), [(1, 4000, 1), (8, 1000, 17), (48, 700, 4)])
def test_generations(batch: int, longest: int, rows: int, dtype: torch.dtype) -> None:
    case = generations(batch, rows, longest, dtype=dtype)
    assert_close(case, case.attend(find_backend("triton"))[0])


@pytest.mark.thinned("dtype")  # each case compiles two kernels of its own
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "group"), [(64, 16), (80, 1), (128, 5), (192, 1), (256, 5)])
def test_widths_and_groups(width: int, group: int, dtype: torch.dtype) -> None:
    chunk, history = 150, 70
    heads = Heads(2 * group, 2, width)
    lens = [chunk, chunk + history, 260, 33]
    mixed = Case([chunk, chunk, 4, 4], lens, lens, 2, heads=heads, block_size=16, dtype=dtype)
    assert_close(mixed, mixed.attend(find_backend("triton"))[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_prompts_with_generations(dtype: torch.dtype) -> None:
    chunks = [1500, 1, 37, 700]
    kv_lens = [1500, 801, 37, 2100, 900, 5, 333]
    case = Case(
        [*chunks, 4, 4, 4], kv_lens, kv_lens, 4, heads=Heads(16, 4, 128), block_size=32, dtype=dtype
    )
    assert_close(case, case.attend(find_backend("triton"))[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (64, 4)])
def test_in_a_cuda_graph(batch: int, rows: int, dtype: torch.dtype) -> None:
    """Captured once, replayed with other lengths, limits, tables, rows and pages."""
    blocks, width = batch * 32, 40
    sizes = {"dtype": dtype, "least_blocks": blocks, "least_width": width}
    mine = generations(batch, rows, 900, **sizes)
    metadata = mine.metadata(find_backend("triton"), check=False)
    metadata.is_cuda_graph = True

    def step() -> torch.Tensor:
        return metadata.attend(LAYER, mine.query, mine.key, mine.value)

    graph, output = captured(step)
    for seed, longest in ((1, 40), (2, 960), (3, 100)):
        other = generations(batch, rows, longest, seed, **sizes)
        assert (other.num_blocks, len(other.tables[0])) == (blocks, width)
        mine.projected.copy_(other.projected)
        other.load(metadata.pools, metadata)
        graph.replay()
        torch.cuda.synchronize()
        assert_close(other, output)
        again = output.clone()
        other.load(metadata.pools, metadata)
        with read_back_forbidden():
            eager = step()
        assert torch.equal(eager, again)


def test_pools_beyond_32_bits(device_memory: Callable[[int], None]) -> None:
    heads = Heads(8, 8, 128)
    num_blocks = 3 * 2**30 // (32 * 8 * 128)
    device_memory(40)
    case = Case([2, 2], [70, 90], [70, 90], heads=heads, block_size=32, dtype=torch.bfloat16)
    far = dataclasses.replace(case, least_blocks=num_blocks)
    used = sorted({block for table in far.tables for block in table if block != num_blocks})
    assert used[-1] * 32 * 8 * 128 > 2**31
    output = far.attend(find_backend("triton"))[0]
    near = dict(zip(used, range(len(used)), strict=True))
    assert DEVICE.type == "cuda"
    small = dataclasses.replace(case)
    small.projected = far.projected
    # the same pages in a pool where no offset is large
    small.tables = [[near.get(b, small.num_blocks) for b in table] for table in far.tables]
    for pool, source in ((small.key_pool, far.key_pool), (small.value_pool, far.value_pool)):
        for block, place in near.items():
            pool[place * 32 : place * 32 + 32] = source[block * 32 : block * 32 + 32]
    assert torch.equal(output, small.attend(find_backend("triton"))[0])
