"""The first pass: example, torch reference and Triton agree, every element is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.draft_inputs import (
    DraftWindows,
    History,
    advance_and_build_inputs,
    build_reused_inputs,
    draft_inputs_triton,
)
from mtp_plugin.ops.step import DrafterInputs
from tests.ops.bits import same_bits
from tests.ops.draft_inputs.batches import (
    FLOATS,
    Batch,
    Pools,
    Request,
    assert_same_first,
    batches,
    make_batch,
    real_batch,
)
from tests.ops.letters import ids
from tests.ops.on_device import (
    DEVICE,
    POISON,
    forbid_launches,
    poisoned,
    read_back_forbidden,
)
from tests.ops.top_k.launches import captured

both = pytest.mark.parametrize("backend", Backend)


def assert_same_pools(mine: Pools, theirs: Pools) -> None:
    for name, one, other in zip(("tokens", "states"), mine, theirs, strict=True):
        assert same_bits(one, other), name


@both
def test_letters(backend: Backend) -> None:
    """K = 3: the prompt `p q r | s` returned `t`; the step read `t u v w` and returned `u x`."""
    generation = Request(ids("pqrs" + "tuvw"), 4, ids("ux"), 0, 0)
    context = Request(ids("pqr" + "s"), 3, [], ids("t")[0], 2)
    batch = Batch(3, [context], [generation], hidden=2)
    first, _ = batch.vanilla(backend, window=4)
    assert first.ids[:7].tolist() == ids("rst" + "stux")
    assert first.positions.tolist() == [1, 2, 3, 2, 3, 4, 5]
    assert first.last_rows.tolist() == [2, 6]
    assert first.kv_lens[:2].tolist() == [4, 6]
    reused = batch.reused(backend)
    assert reused.ids.tolist() == ids("t" + "uxxx")
    assert reused.last_rows.tolist() == [0, 2]
    assert reused.next_positions.tolist() == [4, 6]
    assert reused.kv_lens[:2].tolist() == [5, 7]


@settings(max_examples=80)
@given(
    batch=batches,
    exact=st.booleans(),
    floor=st.sampled_from([None, 9]),
    spare_rows=st.sampled_from([0, 0, 2]),
)
def test_layers_of_their_own(batch: Batch, exact: bool, floor: int | None, spare_rows: int) -> None:
    window = batch.k + int(exact)
    before = {name: value.clone() for name, value in batch.inputs().items()}
    first, pools = batch.vanilla(Backend.TORCH, window, floor, spare_rows=spare_rows)
    expected = batch.expected(window)
    lens = torch.tensor([len(rows) for rows in expected], dtype=torch.int64)
    assert first.ids.dtype == torch.int32
    assert first.ids.shape == (int(lens.sum()) + batch.k - 1,)
    assert first.states.shape == (int(lens.sum()) + spare_rows, batch.hidden)
    batch.assert_rows(first, expected)
    batch.assert_history(pools)
    assert first.last_rows.tolist() == (lens.cumsum(0) - 1).tolist()
    # cached by then: all of a prompt, all before the newest token of a generation
    cached = [len(r.tokens) for r in batch.contexts]
    cached += [max(r.start + len(r.emitted), floor or 0) for r in batch.generations]
    assert first.kv_lens[: len(expected)].tolist() == cached
    kernels, kernel_pools = batch.vanilla(Backend.TRITON, window, floor, spare_rows=spare_rows)
    assert_same_first(kernels, first)
    assert kernels.states.shape == first.states.shape
    assert_same_pools(kernel_pools, pools)
    # elements after the rows are not written
    assert (kernels.ids[int(lens.sum()) :] == POISON).all()
    for name, value in batch.inputs().items():
        assert same_bits(value, before[name]), name


@settings(max_examples=60)
@given(batch=batches, max_position=st.sampled_from([None, 6]), floor=st.sampled_from([None, 9]))
def test_a_reused_layer(batch: Batch, max_position: int | None, floor: int | None) -> None:
    """Positions and states are the step's own, and are not written."""
    before = {name: value.clone() for name, value in batch.inputs().items()}
    first = batch.reused(Backend.TORCH, max_position, floor)
    batch.assert_rows(first, batch.expected_reused())
    ends = [len(r.tokens) for r in batch.contexts]
    ends += [r.start + len(r.emitted) for r in batch.generations]
    capped = [end if max_position is None else min(end, max_position) for end in ends]
    assert first.next_positions.tolist() == capped
    num_contexts = len(batch.contexts)
    cached = [end + 1 for end in ends[:num_contexts]]
    cached += [max(end + 1, floor or 0) for end in ends[num_contexts:]]
    assert first.kv_lens[: len(ends)].tolist() == cached
    kernels = batch.reused(Backend.TRITON, max_position, floor)
    assert_same_first(kernels, first)
    for returned in (first, kernels):
        assert returned.positions is batch.positions
        assert returned.states is batch.hidden_states
    for name, value in batch.inputs().items():
        assert same_bits(value, before[name]), name


@both
def test_kv_lengths_are_given_where_the_host_has_some(backend: Backend) -> None:
    batch = make_batch(3, 3, 1, 2, 16)
    history = History(*batch.pools(), batch.slot_ids)
    step = batch.layout, batch.rows, batch.accepted, batch.num_accepted
    assert build_reused_inputs(*step, max_position=None, backend=backend).kv_lens is None
    step = batch.layout, history, batch.rows, batch.num_accepted, batch.last_tokens
    windows = DraftWindows(4, batch.history_lens)
    assert advance_and_build_inputs(*step, windows, backend=backend).kv_lens is None


@both
def test_an_empty_batch(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_launches(monkeypatch, draft_inputs_triton)
    batch = Batch(3, [], [], hidden=8)
    first, pools = batch.vanilla(backend, 4, spare_rows=1)
    assert (first.ids.shape, first.states.shape) == ((2,), (1, 8))
    assert first.positions.shape == first.last_rows.shape == (0,)
    assert_same_pools(pools, batch.pools())
    reused = batch.reused(backend)
    assert reused.ids.shape == reused.next_positions.shape == reused.last_rows.shape == (0,)


@both
@pytest.mark.parametrize("window", [3, 4])
def test_requests_without_output(backend: Backend, window: int) -> None:
    """Without a finite logit the request fails; its rows are still valid inputs."""
    batch = make_batch(3, 3, 1, 6, 8, stops=True)
    assert any(not request.emitted for request in batch.generations)
    first, pools = batch.vanilla(backend, window)
    batch.assert_history(pools)
    assert (first.ids[: first.positions.shape[0]] >= 0).all()
    assert (first.positions >= 0).all()
    assert torch.isfinite(first.states).all()
    expected, expected_pools = batch.vanilla(Backend.TORCH, window)
    assert_same_first(first, expected)
    assert_same_pools(pools, expected_pools)
    assert_same_first(batch.reused(backend), batch.reused(Backend.TORCH))


@both
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_padding_rows_may_share_a_slot(backend: Backend, dtype: torch.dtype) -> None:
    for seed in range(4):
        batch = make_batch(seed, 3, seed % 2, 5, 24, sharing=3, dtype=dtype)
        first, pools = batch.vanilla(backend, 4)
        expected, _ = batch.vanilla(Backend.TORCH, 4)
        assert_same_first(first, expected, slice(0, first.positions.shape[0] - 3 * 4))
        assert (first.ids[: first.positions.shape[0]] != POISON).all()
        batch.assert_history(pools)


@pytest.mark.parametrize(
    "pool_dtype",
    # Triton's interpreter truncates, so this needs a device
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)],
    ids=str,
)
def test_states_are_rounded_once(pool_dtype: torch.dtype) -> None:
    """Values of many bits into a pool of another type, and out of it again."""
    dtype = torch.bfloat16 if pool_dtype == torch.float32 else torch.float32
    batch = make_batch(5, 3, 2, 3, 40, dtype=dtype, pool_dtype=pool_dtype)
    rng = torch.Generator().manual_seed(1)
    for tensor in (batch.hidden_states, batch.states_pool):
        noise = torch.randn(tensor.shape, generator=rng).to(tensor.dtype)
        tensor.copy_(noise.to(torch.bfloat16) if tensor is batch.states_pool else noise)
    first, pools = batch.vanilla(Backend.TRITON, 4)
    expected, expected_pools = batch.vanilla(Backend.TORCH, 4)
    assert_same_first(first, expected)
    assert_same_pools(pools, expected_pools)


# --- on a device, with real shapes ---

REAL = [
    pytest.param(0, 4, 3, 4096, id="4x4096-k3"),
    pytest.param(3, 64, 7, 7168, id="3+64x7168-k7"),
    pytest.param(8, 256, 3, 7168, id="8+256x7168-k3"),
    pytest.param(0, 1024, 1, 4096, id="1024x4096-k1"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("contexts", "generations", "k", "hidden"), REAL)
@pytest.mark.parametrize("exact", [False, True], ids=["trtllm", "exact"])
def test_real_shapes(contexts: int, generations: int, k: int, hidden: int, exact: bool) -> None:
    batch = real_batch(7, contexts, generations, k, hidden)
    expected, expected_pools = batch.vanilla(Backend.TORCH, k + exact)
    for _ in range(3):
        first, pools = batch.vanilla(Backend.TRITON, k + exact)
        assert_same_first(first, expected)
        assert_same_pools(pools, expected_pools)
    assert_same_first(batch.reused(Backend.TRITON, 9), batch.reused(Backend.TORCH, 9))


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    """Prompts, history before chunks and generations in one step."""
    batch = real_batch(2, 4, 16, 3, 4096)
    assert any(batch.history_lens)
    pools = batch.pools()
    for _ in range(2):  # the first call compiles
        with read_back_forbidden():
            batch.vanilla(Backend.TRITON, 4, pools=pools)
            batch.reused(Backend.TRITON, 9)


@pytest.mark.gpu
@pytest.mark.parametrize("vanilla", [False, True], ids=["reused", "vanilla"])
@pytest.mark.parametrize(
    ("generations", "k", "hidden"), [(1, 3, 7168), (256, 3, 4096), (33, 7, 7168)]
)
def test_in_a_cuda_graph(generations: int, k: int, hidden: int, vanilla: bool) -> None:
    """Captured once, replayed with other requests in other slots."""
    mine = real_batch(1, 0, generations, k, hidden)
    pools = mine.pools()

    def step() -> DrafterInputs:
        if vanilla:
            return mine.vanilla(Backend.TRITON, k + 1, pools=pools)[0]
        return mine.reused(Backend.TRITON, 9)

    graph, outputs = captured(step)
    for seed in (10, 20):
        other = real_batch(seed, 0, generations, k, hidden)
        for name, value in mine.inputs().items():
            value.copy_(other.inputs()[name])
        mine.slot_ids.copy_(other.slot_ids)
        for pool, fresh in zip(pools, other.pools(), strict=True):
            pool.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        if vanilla:
            expected, expected_pools = other.vanilla(Backend.TORCH, k + 1)
            assert_same_pools(pools, expected_pools)
        else:
            expected = other.reused(Backend.TORCH, 9)
        assert_same_first(outputs, expected)


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device_memory: Callable[[int], None]) -> None:
    """Pools and states so large that their last rows start after 2**31 elements."""
    device_memory(24)
    k, hidden = 3, 7168
    near = real_batch(4, 2, 3, k, hidden)
    far = replace(near)
    rows = near.hidden_states.shape[0]
    stride = 2**31 // (rows - 2) + 8
    wide = torch.empty(rows * stride, dtype=torch.bfloat16, device=DEVICE)
    far.hidden_states = wide.as_strided((rows, hidden), (stride, 1))
    far.hidden_states.copy_(near.hidden_states)
    num_slots = 2**31 // (k * hidden) + 16
    shift = num_slots - near.num_slots
    tokens = poisoned(num_slots, k, dtype=torch.int32)
    states = torch.empty(num_slots, k, hidden, dtype=torch.bfloat16, device=DEVICE)
    tokens[shift:], states[shift:] = near.pools()
    far.slot_ids = near.slot_ids + shift
    assert shift * k * hidden > 2**30
    assert (num_slots - 1) * k * hidden > 2**31
    first, pools = far.vanilla(Backend.TRITON, 4, pools=(tokens, states))
    expected, expected_pools = near.vanilla(Backend.TORCH, 4)
    assert_same_first(first, expected)
    assert_same_pools((pools[0][shift:], pools[1][shift:]), expected_pools)
