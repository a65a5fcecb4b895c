"""The gated activation: story, reference and kernel agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.executor.layers.mlp import launch, reference
from tests.executor.layers import stories
from tests.executor.layers.closeness import FLOAT, KINDS, rolled, strided
from tests.kernels.top_k.launches import poisoned_outputs
from tests.speculative.ops.on_device import DEVICE


def test_reference_is_the_story() -> None:
    rows = rolled(3, 10, kind=FLOAT)
    told = [stories.silu_mul(row) for row in rows.tolist()]
    FLOAT.assert_close(reference.silu_mul(rows), torch.tensor(told, device=DEVICE))


@settings(max_examples=20)
@given(
    rows=st.integers(0, 3), width=st.sampled_from([1, 31, 96, 1024, 1500]), seed=st.integers(0, 99)
)
def test_kernel_on_random_shapes(rows: int, width: int, seed: int) -> None:
    for kind in KINDS:
        both = rolled(rows, 2 * width, kind=kind, seed=seed, scale=3)
        with poisoned_outputs(launch):
            active = launch.silu_mul(strided(both))
        kind.assert_close(active, reference.silu_mul(both))


def test_large_gates_do_not_overflow() -> None:
    rows = torch.tensor([[-200.0, 200.0, 0.0, 2.0, 3.0, 4.0]], device=DEVICE)
    expected = torch.tensor([[0.0, 600.0, 0.0]], device=DEVICE)
    FLOAT.assert_close(launch.silu_mul(rows), expected)


@pytest.mark.parametrize("shape", [(2, 5), (4,)])
def test_refusals(shape: tuple[int, ...]) -> None:
    with pytest.raises(TensorContractError, match=r"gate_up: expected \[T, 2 \* width\]"):
        launch.silu_mul(torch.ones(shape, device=DEVICE))
