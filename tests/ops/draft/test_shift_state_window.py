"""Shifted state windows: example, torch reference and Triton agree, also in one buffer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.ops import draft_triton
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.draft import shift_state_window
from tests.op_arguments import check_arguments
from tests.ops.bits import same_bits
from tests.ops.on_device import DEVICE, forbid_launches, replay_in_graph, vector

both = pytest.mark.parametrize("backend", Backend)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def filled(rows: int, hidden: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    states = torch.randn(rows, hidden, generator=rng).to(DEVICE, dtype)
    states[torch.rand(rows, hidden, generator=rng).to(DEVICE) < 0.05] = torch.nan
    return states


def last_rows_of(lens: list[int]) -> torch.Tensor:
    return vector(lens).cumsum(0) - 1


def forbid_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_triton, "shift_state_window_reference", None)


@settings(max_examples=40)
@given(
    lens=st.lists(st.sampled_from([1, 1, 1, 2, 4]), max_size=9) | st.just([1] * 300),
    depth=st.integers(0, 3),
    gap=st.integers(0, 3),
    hidden=st.sampled_from([1, 7, 64, 129]),
    dtype=st.sampled_from(FLOATS),
    source=st.sampled_from(FLOATS),
    alias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_kernel_equals_torch_bit_for_bit(
    lens, depth, gap, hidden, dtype, source, alias, seed
) -> None:
    """Sequences of a single row: the row that one writes is the row that the next reads.

    300 of them need two chunks of requests.
    """
    offset, num_rows = depth + 1, sum(lens)
    states = filled(num_rows + 4, hidden + gap, dtype, seed)
    expected = states.clone()
    # of few bits: the interpreter cuts where a device rounds
    other = filled(num_rows, hidden, torch.float32, seed + 1).mul(8).round().to(source)
    last_rows = last_rows_of(lens)
    for buffer, backend in ((states, Backend.TRITON), (expected, Backend.TORCH)):
        window = buffer[:, :hidden]
        outputs = window[depth : depth + num_rows] if alias else other
        with pytest.MonkeyPatch.context() as patch:
            forbid_the_fallback(patch)
            shift_state_window(window, outputs, last_rows, offset, backend=backend)
    assert same_bits(states, expected)


def assert_converted(outputs: torch.Tensor, target: torch.dtype) -> None:
    states, last_rows = filled(8, 50, target, 2), vector([1, 2, 5])
    expected = states.clone()
    shift_state_window(states, outputs, last_rows, 2, backend=Backend.TRITON)
    shift_state_window(expected, outputs, last_rows, 2, backend=Backend.TORCH)
    assert same_bits(states, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_other_types_are_rounded_as_torch_rounds(source: torch.dtype, target: torch.dtype) -> None:
    outputs = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    assert_converted(outputs.to(DEVICE, source), target)


COUNT = 300
"""Requests of two chunks."""


def odd_views(states: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs in the memory of ``states`` that are not its window, or not contiguous rows."""
    hidden = states.shape[1]
    return {
        "ahead": states[3 : 3 + COUNT],
        "every other row": states[::2][:COUNT],
        "columns for rows": states.view(-1)[: COUNT * hidden].view(hidden, COUNT).t(),
        "one column": states[:COUNT, :1].expand(COUNT, hidden),
        "one row": states[COUNT : COUNT + 1].expand(COUNT, hidden),
    }


@pytest.mark.parametrize("name", list(odd_views(torch.zeros(2 * COUNT, 8))))
def test_any_other_overlap_is_right_too(name: str) -> None:
    states = filled(2 * COUNT, 8, torch.float32, 3)
    expected = states.clone()
    last_rows = torch.arange(COUNT, device=DEVICE)
    shift_state_window(states, odd_views(states)[name], last_rows, 1, backend=Backend.TRITON)
    shift_state_window(expected, odd_views(expected)[name], last_rows, 1, backend=Backend.TORCH)
    assert same_bits(states, expected)


@both
def test_nothing_to_move(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_launches(monkeypatch, draft_triton)
    states = filled(4, 8, torch.float32, 1)
    before = states.clone()
    shift_state_window(states, states[:1], vector([]), 1, backend=backend)
    shift_state_window(states[:, :0], states[:2, :0], vector([0]), 1, backend=backend)
    assert same_bits(states, before)


@both
def test_arguments(backend: Backend) -> None:
    arguments = {
        "states": filled(7, 20, torch.float32, 1).nan_to_num(),
        "outputs": filled(5, 20, torch.float32, 2).nan_to_num(),
        "last_rows": vector([1, 2, 4]),
    }
    free = {f"{name}: {kind}" for name in arguments for kind in ("shorter", "elsewhere")}
    free |= {f"{name}: type" for name in ("states", "outputs")}
    check_arguments(shift_state_window, arguments, free=free, offset=2, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize("alias", [False, True])
@pytest.mark.parametrize("lens", [[4], [1] * 8, [4] * 64, [1] * 256, [1] * 1000, [1, 4] * 128])
def test_real_shapes(lens: list[int], alias: bool) -> None:
    """Repeated, since a race between chunks or warps does not always show."""
    hidden, num_rows, depth = 7168, sum(lens), 1
    last_rows = last_rows_of(lens)
    other = filled(num_rows, hidden, torch.bfloat16, 5)
    start = filled(num_rows + 2, hidden, torch.bfloat16, 4)
    expected = start.clone()
    read = expected[depth : depth + num_rows] if alias else other
    shift_state_window(expected, read, last_rows, depth + 1, backend=Backend.TORCH)
    for _ in range(20):
        states = start.clone()
        read = states[depth : depth + num_rows] if alias else other
        shift_state_window(states, read, last_rows, depth + 1, backend=Backend.TRITON)
        assert same_bits(states, expected)


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    """Two depths captured, replayed over other states and other rows; nothing is allocated."""
    hidden, rows = 4096, 64
    states = filled(rows + 2, hidden, torch.bfloat16, 6)
    last_rows = last_rows_of([1] * 32)
    fresh, other_rows = filled(rows + 2, hidden, torch.bfloat16, 7), last_rows_of([2] * 32)

    def step() -> None:
        for depth in (0, 1):
            window = states[depth : depth + rows]
            shift_state_window(states, window, last_rows, depth + 1, backend=Backend.TRITON)

    def change() -> None:
        states.copy_(fresh)
        last_rows.copy_(other_rows)

    replay_in_graph(step, change)
    for depth in (0, 1):
        window = fresh[depth : depth + rows]
        shift_state_window(fresh, window, other_rows, depth + 1, backend=Backend.TORCH)
    assert same_bits(states, fresh)


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device_memory: Callable[[int], None]) -> None:
    stride, hidden = 2**29 + 8, 4096
    device_memory(12)
    near = filled(6, hidden, torch.bfloat16, 8)
    far = torch.empty(6 * stride, dtype=torch.bfloat16, device=DEVICE).as_strided(
        (6, hidden), (stride, 1)
    )
    far.copy_(near)
    last_rows = vector([0, 1, 4])
    for states, backend in ((far, Backend.TRITON), (near, Backend.TORCH)):
        shift_state_window(states, states[:5], last_rows, 1, backend=backend)
    assert same_bits(far, near)
