"""The gated activation: torch's own functions, torch and kernel agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.hosts.embedded.layers.mlp import silu_mul
from mtp_plugin.ops.backend import Backend
from tests.hosts.embedded.layers.closeness import FLOAT, KINDS, rolled, strided
from tests.op_arguments import check_strided_arguments, poisoned_memory
from tests.ops.on_device import DEVICE


@pytest.mark.parametrize("backend", Backend)
def test_silu_mul_is_a_gate_times_the_rest(backend: Backend) -> None:
    rows = rolled(3, 10, kind=FLOAT)
    expected = torch.nn.functional.silu(rows[:, :5]) * rows[:, 5:]
    FLOAT.assert_close(silu_mul(rows, backend=backend), expected)


@settings(max_examples=20)
@given(
    rows=st.integers(0, 3), width=st.sampled_from([1, 31, 96, 1024, 1500]), seed=st.integers(0, 99)
)
def test_torch_and_kernel_agree(rows: int, width: int, seed: int) -> None:
    for kind in KINDS:
        both = rolled(rows, 2 * width, kind=kind, seed=seed, scale=3)
        with poisoned_memory():
            active = silu_mul(strided(both), backend=Backend.TRITON)
        kind.assert_close(active, silu_mul(both, backend=Backend.TORCH))


@pytest.mark.parametrize("backend", Backend)
def test_large_gates_do_not_overflow(backend: Backend) -> None:
    rows = torch.tensor([[-200.0, 200.0, 0.0, 2.0, 3.0, 4.0]], device=DEVICE)
    expected = torch.tensor([[0.0, 600.0, 0.0]], device=DEVICE)
    FLOAT.assert_close(silu_mul(rows, backend=backend), expected)


@pytest.mark.parametrize("backend", Backend)
def test_strided_arguments(backend: Backend) -> None:
    refused = {"gate_up": "gate_up: expected row-contiguous"}
    arguments = {"gate_up": rolled(3, 10, kind=FLOAT)}
    check_strided_arguments(silu_mul, arguments, refused=refused, backend=backend)
