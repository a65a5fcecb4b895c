"""The kernel for long prompts on compute capability 9.0, against sdpa in double precision."""

from __future__ import annotations

import pytest
import torch
import triton

from mtp_plugin.hosts.embedded.attention import find_backend
from mtp_plugin.hosts.embedded.attention import triton as launch
from tests.hosts.embedded.attention.case import LAYER, Case, Heads
from tests.hosts.embedded.attention.test_on_gpu import assert_close
from tests.ops.on_device import DEVICE, read_back_forbidden
from tests.ops.top_k.launches import captured, poisoned_outputs

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16]
HEADS = Heads(8, 2, 128)


@pytest.fixture(autouse=True)
def _no_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the launch of the kernel for other GPUs, types and shapes."""
    if not launch._is_hopper(DEVICE):
        pytest.skip("needs compute capability 9.0")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        pytest.skip("needs Gluon of Triton 3.6")
    monkeypatch.setattr(launch, "paged_ragged_kernel", None)


def prompts(
    lens: list[int], cached: list[int], limits: dict[int, int] | None = None, **options
) -> Case:
    """Chunks after so many cached tokens, then three generations of 4 rows.

    Args:
        limits: number of KV rows that a chunk may use, where it has fewer than its length.
    """
    seq_lens = [*lens, 4, 4, 4]
    kv_lens = [rows + keys for rows, keys in zip(lens, cached, strict=True)] + [900, 5, 333]
    allowed = [(limits or {}).get(chunk, length) for chunk, length in enumerate(kv_lens)]
    options = {"heads": HEADS, "block_size": 32, "dtype": torch.bfloat16, **options}
    return Case(seq_lens, kv_lens, allowed, len(lens), **options)


def check(case: Case) -> None:
    """Compare live rows; padding rows are zero, and no row is left unwritten."""
    with poisoned_outputs(launch):
        output, _ = case.attend(find_backend("triton"))
    assert_close(case, output)
    assert (output[~case.alive()] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [8, 64, 256])
def test_page_sizes(block_size: int, dtype: torch.dtype) -> None:
    lens, cached = [700, 1, 130, 257], [0, 801, 300, 37]
    check(prompts(lens, cached, {0: 695}, block_size=block_size, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "cached"), [(1500, 0), (1100, 6000)])
def test_one_long_prompt(rows: int, cached: int, dtype: torch.dtype) -> None:
    check(prompts([rows], [cached], dtype=dtype))


def test_padding_rows() -> None:
    """Rows past a limit, chunks without KV rows, and rows before position 0."""
    lens, cached = [700, 300, 200, 90, 1], [0, 64, -40, -90, 5]
    case = prompts(lens, cached, {0: 311, 1: 0, 3: 0})
    assert (~case.alive()).sum() > 700
    check(case)


def test_replays_with_chunks_of_other_lengths() -> None:
    """Captured for one chunk with nearly all tokens; replayed with every token elsewhere."""
    sizes = {"least_blocks": 400, "least_width": 100}
    mine = prompts([1025, *[1] * 7], [0] * 8, dict.fromkeys(range(8), 0), **sizes)
    metadata = mine.metadata(find_backend("triton"), check=False)
    metadata.is_cuda_graph = True

    def step() -> torch.Tensor:
        return metadata.attend(LAYER, mine.query, mine.key, mine.value)

    graph, output = captured(step)
    for seed, (lens, cached, limits) in enumerate(
        [
            ([129] * 8, [300 * chunk for chunk in range(8)], {}),
            ([1, 1, 500, 3, 517, 1, 1, 8], [9, 2000, 70, 0, 33, 0, 0, 0], {5: 0, 6: 0, 7: 0}),
            ([1025, *[1] * 7], [2100, *range(7)], {}),
        ]
    ):
        other = prompts(lens, cached, limits, seed=seed + 1, **sizes)
        assert (other.num_blocks, len(other.tables[0])) == (400, 100)
        mine.projected.copy_(other.projected)
        other.load(metadata.pools, metadata)
        output.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_close(other, output)
        assert (output[~other.alive()] == 0).all()
        again = output.clone()
        other.load(metadata.pools, metadata)
        with read_back_forbidden():
            eager = step()
        assert torch.equal(eager, again)
