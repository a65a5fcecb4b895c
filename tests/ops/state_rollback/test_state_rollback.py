"""State rollback: example, torch reference and Triton agree."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops import state_rollback_triton
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.state_rollback import mamba_state_selective_copy
from tests.hosts.megatron.batches import random_decodes
from tests.op_arguments import check_arguments
from tests.ops.bits import same_bits
from tests.ops.on_device import (
    DEVICE,
    INDEX_DTYPES,
    forbid_launches,
    poisoned,
    replay_in_graph,
    vector,
)
from tests.ops.state_rollback import example
from tests.ops.state_rollback.example import Row

both = pytest.mark.parametrize("backend", Backend)

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.bool,
    torch.complex128,
)


def random_states(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits, NaN among them; a bool is 0 or 1."""
    item = torch.empty((), dtype=dtype).element_size()
    top = 2 if dtype == torch.bool else 256
    return torch.randint(0, top, (*shape, item), dtype=torch.uint8).view(dtype).squeeze(-1)


def as_lists(states: torch.Tensor, leading: int) -> list:
    """Nested lists over the leading dimensions; a state is the list of its bytes."""
    flat = states.cpu().unsqueeze(-1).contiguous().view(torch.uint8)
    size = math.prod(flat.shape[leading:])
    return flat.reshape(*flat.shape[:leading], size).tolist()


def roll_back(
    backend: Backend,
    intermediate: torch.Tensor,
    current: torch.Tensor,
    rows: list[Row],
    num_layers: int,
    dtype: torch.dtype = torch.int64,
) -> None:
    mamba_state_selective_copy(
        intermediate,
        current,
        vector((0 if row.is_decode else 1 for row in rows), torch.int32),
        vector((row.slot for row in rows), dtype),
        vector((row.accepted for row in rows), dtype),
        num_layers,
        backend=backend,
    )


@both
@given(
    kinds=st.lists(st.booleans(), min_size=1, max_size=5),
    num_padding=st.integers(0, 2),
    num_drafts=st.integers(0, 3),
    shape=st.sampled_from([(), (1,), (3,), (4, 8), (2, 3, 5)]),
    dtype=st.sampled_from(DTYPES),
    index_dtype=st.sampled_from(INDEX_DTYPES),
    gap=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
def test_any_states(
    backend: Backend,
    kinds: list[bool],
    num_padding: int,
    num_drafts: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    index_dtype: torch.dtype,
    gap: int,
    seed: int,
) -> None:
    """Requests in any slots, spare slots and layers, gaps between slots, counts of all sizes."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    num_slots = len(kinds) + 2
    slots = rng.sample(range(num_slots), len(kinds))
    rows = [
        Row(kind, slot, rng.randint(0, num_drafts)) for kind, slot in zip(kinds, slots, strict=True)
    ] + [Row(True, -1, 0)] * num_padding
    pool = random_states(dtype, 3, num_slots + gap, num_drafts + 1 + gap, *shape).to(DEVICE)
    intermediate = pool[:, :num_slots, : num_drafts + 1]
    current = random_states(dtype, 2, num_slots + gap, *shape).to(DEVICE)[:, :num_slots]
    before = as_lists(intermediate, 3)
    expected = as_lists(current, 2)
    example.roll_back(before, expected, rows, 2)

    roll_back(backend, intermediate, current, rows, 2, index_dtype)
    assert as_lists(current, 2) == expected
    assert as_lists(intermediate, 3) == before


@both
def test_state_equals_a_replay_of_the_accepted_tokens(backend: Backend) -> None:
    """Scenario R42: accepted counts 0..K in one batch, with a prefill and a padded row."""
    rng = random.Random(42)
    num_layers, num_drafts = 2, 3
    decodes = random_decodes(rng, 20, num_drafts)
    accepted = [request.num_accepted() - 1 for request in decodes]
    assert set(accepted) == {0, 1, 2, 3}
    start = [[[slot + layer, 7] for slot in range(23)] for layer in range(num_layers)]
    slots = rng.sample(range(22), len(decodes))

    intermediate = poisoned(num_layers, 23, num_drafts + 1, 2)
    replayed = [list(layer) for layer in start]
    for layer in range(num_layers):
        for slot, request, matches in zip(slots, decodes, accepted, strict=True):
            state = start[layer][slot]
            for column, token in enumerate(request.read):
                state = example.read(state, token)
                intermediate[layer, slot, column] = vector(state)
                if column <= matches:
                    replayed[layer][slot] = state

    rows = [Row(True, slot, n) for slot, n in zip(slots, accepted, strict=True)]
    rows += [Row(False, 22, 0), Row(True, -1, 2)]
    current = vector(start)
    roll_back(backend, intermediate, current, rows, num_layers)
    assert torch.equal(current, vector(replayed))


@both
def test_rows_that_share_a_slot(backend: Backend) -> None:
    """A prefill row does not undo a decode row; rows out of range copy nothing."""
    intermediate = vector(range(3 * 4)).view(1, 3, 4).clone()
    current = vector([[100, 101, 102]])
    rows = [
        Row(False, 1, 0),
        Row(True, 1, 2),
        Row(True, 1, 2),
        Row(False, 1, 3),
        Row(True, 3, 0),
        Row(True, -1, 0),
        Row(True, 0, 4),
        Row(True, 2, -1),
    ]
    roll_back(backend, intermediate, current, rows, 1)
    assert torch.equal(current, vector([[100, 6, 102]]))


@both
def test_status_of_64_bits_is_not_truncated(backend: Backend) -> None:
    current, zero = vector([[7]]), vector([0])
    status = vector([2**32], torch.int64)
    states = vector([[[5]]])
    mamba_state_selective_copy(states, current, status, zero, zero, 1, backend=backend)
    assert current.tolist() == [[7]]


@both
def test_a_state_of_several_chunks(backend: Backend) -> None:
    """More than one program per state, the last one partly filled."""
    size = 16 * 1024 // 4 * 2 + 5
    intermediate = torch.arange(2 * 3 * size, device=DEVICE).view(1, 3, 2, size).to(torch.float32)
    current = torch.full((1, 3, size), torch.nan, device=DEVICE)
    roll_back(backend, intermediate, current, [Row(True, 2, 1), Row(True, 0, 0)], 1)
    assert torch.equal(current[0, 2], intermediate[0, 2, 1])
    assert torch.equal(current[0, 0], intermediate[0, 0, 0])
    assert current[0, 1].isnan().all()


@both
@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_states_at_odd_addresses(backend: Backend, offset: int) -> None:
    """The words are as wide as address, strides and size allow."""
    torch.manual_seed(offset)
    size = 12
    memory = random_states(torch.int8, 2 * 3 * size + offset).to(DEVICE)
    intermediate = memory[offset:].view(1, 2, 3, size)
    current = torch.zeros(1, 2, size, dtype=torch.int8, device=DEVICE)
    roll_back(backend, intermediate, current, [Row(True, 1, 2)], 1)
    assert torch.equal(current[0, 1], intermediate[0, 1, 2])
    assert not current[0, 0].any()


@both
def test_nothing_to_copy_launches_nothing(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_launches(monkeypatch, state_rollback_triton)
    row = [Row(True, 0, 1)]
    current = poisoned(1, 2, 4)
    roll_back(backend, poisoned(1, 2, 3, 4), current, [], 1)
    roll_back(backend, poisoned(1, 2, 3, 4), current, row, 0)
    roll_back(backend, poisoned(1, 2, 3, 0), poisoned(1, 2, 0), row, 1)
    roll_back(backend, poisoned(1, 0, 3, 4), poisoned(1, 0, 4), row, 1)
    assert torch.equal(current, poisoned(1, 2, 4))


def test_only_the_kernel_needs_dense_states() -> None:
    intermediate = vector(range(2 * 3 * 4)).view(1, 2, 3, 2, 2).transpose(3, 4)
    current = poisoned(1, 2, 2, 2)
    rows = [Row(True, 1, 0)]
    with pytest.raises(TensorContractError, match=r"intermediate_states: .*dense .*\[1, 2\]"):
        roll_back(Backend.TRITON, intermediate, current, rows, 1)
    with pytest.raises(TensorContractError, match=r"current_states: .*dense"):
        roll_back(Backend.TRITON, intermediate.contiguous(), current.transpose(2, 3), rows, 1)
    roll_back(Backend.TORCH, intermediate, current, rows, 1)
    assert torch.equal(current[0, 1], intermediate[0, 1, 0])


@both
@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_arguments(backend: Backend, shape: tuple[int, ...]) -> None:
    """Gaps between states are accepted; inside a state the kernel refuses them."""
    torch.manual_seed(len(shape))
    arguments = {
        "intermediate_states": random_states(torch.int16, 2, 3, 4, *shape).to(DEVICE),
        "current_states": random_states(torch.int16, 2, 3, *shape).to(DEVICE),
        "prefill_status": vector([0, 1, 0]),
        "state_idx": vector([2, 1, 0]),
        "accepted_counts": vector([1, 2, 3]),
        "num_layers": 2,
    }
    names = "prefill_status", "state_idx", "accepted_counts"
    refused = {name: f"{name}: expected contiguous" for name in names}
    if shape and backend is Backend.TRITON:
        states = "intermediate_states", "current_states"
        refused |= {name: f"{name}: expected states of dense dimensions" for name in states}
    free = {f"{name}: shorter" for name in names}
    # another type or rank is one that the other states do not have
    free |= {f"intermediate_states: {kind}" for kind in ("type", "dimensions")}
    check_arguments(
        mamba_state_selective_copy, arguments, refused=refused, free=free, backend=backend
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((64, 64, 4), torch.float32), ((64, 128, 8), torch.bfloat16), ((4, 1538), torch.bfloat16)],
    ids=["ssm_64KB", "ssm_128KB", "conv"],
)
def test_graph_replays_with_changed_counts(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    num_layers, num_slots, num_drafts = 4, 64, 3
    intermediate = torch.randn(num_layers, num_slots, num_drafts + 1, *shape, device=DEVICE)
    intermediate = intermediate.to(dtype)
    current = torch.randn(num_layers, num_slots, *shape, device=DEVICE).to(dtype)
    status = torch.zeros(50, dtype=torch.int32, device=DEVICE)
    slots, counts = torch.arange(50, device=DEVICE), torch.zeros_like(status)
    arguments = intermediate, current, status, slots, counts, num_layers
    expected = torch.randn_like(current)

    def change() -> None:
        status.copy_(torch.arange(50) % 5 == 0)
        slots.copy_(torch.randperm(num_slots)[:50])
        slots[7] = -1
        counts.copy_(torch.randint(0, num_drafts + 1, (50,)))
        current.copy_(expected)

    replay_in_graph(lambda: mamba_state_selective_copy(*arguments, backend=Backend.TRITON), change)
    rows = status, slots, counts
    mamba_state_selective_copy(intermediate, expected, *rows, num_layers, backend=Backend.TORCH)
    assert same_bits(current, expected)


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    """The last slot of the last layer begins more than 2**32 elements into the buffer."""
    intermediate = torch.zeros(3, 512, 3, 2**20, dtype=torch.int8, device=DEVICE)
    current = torch.zeros(3, 512, 2**20, dtype=torch.int8, device=DEVICE)
    assert intermediate.numel() > 2**32
    intermediate[2, 511, 2] = 7
    roll_back(Backend.TRITON, intermediate, current, [Row(True, 511, 2)], 3)
    assert (current[2, 511] == 7).all()
    assert not current[:2].any()
    assert not current[2, :511].any()
