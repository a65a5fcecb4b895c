"""The rotation of heads: transformers' functions, torch and kernel agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.glm4_moe import modeling_glm4_moe as glm

from mtp_plugin.errors import TensorContractError
from mtp_plugin.hosts.embedded.layers import rotary_triton
from mtp_plugin.hosts.embedded.layers.norm import rms_norm
from mtp_plugin.hosts.embedded.layers.rotary import Angles, HeadLayout, HeadNorms, rotate
from mtp_plugin.ops.backend import Backend
from tests.hosts.embedded.layers.closeness import FLOAT, KINDS, Kind, rolled, strided
from tests.op_arguments import check_strided_arguments
from tests.ops.on_device import DEVICE, forbid_launches

POSITIONS = [0, 8, 3, 8, 5]


def angles_of(kind: Kind, n: int, indexed: bool = True) -> Angles:
    rows = 9 if indexed else len(POSITIONS)
    turn = 3 * rolled(rows, n, kind=FLOAT, seed=9)
    index = torch.tensor([[p, 99] for p in POSITIONS], device=DEVICE)[:, 0] if indexed else None
    return Angles(turn.cos().to(kind.dtype), turn.sin().to(kind.dtype), n, index)


def norms_of(kind: Kind, head_dim: int) -> HeadNorms:
    weights = [rolled(head_dim, kind=kind, seed=seed) for seed in (5, 6)]
    return HeadNorms(*weights, q_eps=1e-6, k_eps=1e-2)


def rows_of(kind: Kind, layout: HeadLayout, seed: int = 0) -> torch.Tensor:
    return rolled(len(POSITIONS), layout.width, kind=kind, seed=seed)


def heads_normed(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm(heads.flatten(0, 1), weight, eps, backend=Backend.TORCH).view_as(heads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normed", [True, False])
def test_torch_is_transformers(kind: Kind, normed: bool) -> None:
    layout, n = HeadLayout(num_q_heads=4, num_kv_heads=2, head_dim=16), 4
    angles, norms, rows = angles_of(kind, n), norms_of(kind, 16), rows_of(kind, layout)
    queries, keys, values = (heads.clone() for heads in layout.split(rows))
    if normed:
        queries = heads_normed(queries, norms.q_weight, norms.q_eps)
        keys = heads_normed(keys, norms.k_weight, norms.k_eps)
    both = [torch.cat([table[POSITIONS]] * 2, dim=-1) for table in (angles.cos, angles.sin)]
    expected = glm.apply_rotary_pos_emb(queries, keys, *both)
    rotate(rows, layout, angles, norms if normed else None, backend=Backend.TORCH)
    turned = layout.split(rows)
    assert torch.equal(turned[0], expected[0])
    assert torch.equal(turned[1], expected[1])
    assert torch.equal(turned[2], values)


@settings(max_examples=25)
@given(
    q_heads=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    n=st.integers(1, 9),
    rest=st.integers(0, 5),
    normed=st.booleans(),
    indexed=st.booleans(),
)
def test_torch_and_kernel_agree(
    q_heads: int, kv_heads: int, n: int, rest: int, normed: bool, indexed: bool
) -> None:
    layout = HeadLayout(q_heads, kv_heads, 2 * n + rest)
    for kind in KINDS:
        norms = norms_of(kind, layout.head_dim) if normed else None
        angles = angles_of(kind, n, indexed)
        rows, expected = strided(rows_of(kind, layout)), rows_of(kind, layout)
        rotate(rows, layout, angles, norms, backend=Backend.TRITON)
        rotate(expected, layout, angles, norms, backend=Backend.TORCH)
        kind.assert_close(rows, expected)
        assert torch.equal(layout.split(rows)[2], layout.split(rows_of(kind, layout))[2])


@pytest.mark.parametrize("backend", Backend)
def test_positions_beyond_the_table_take_its_ends(backend: Backend) -> None:
    layout, n = HeadLayout(1, 1, 6), 3
    angles = angles_of(FLOAT, n)
    beyond = replace(angles, index=torch.tensor([-4, 9, 99, 8, 0], device=DEVICE))
    ends = replace(angles, index=torch.tensor([0, 8, 8, 8, 0], device=DEVICE))
    rows, expected = rows_of(FLOAT, layout), rows_of(FLOAT, layout)
    rotate(rows, layout, beyond, None, backend=backend)
    rotate(expected, layout, ends, None, backend=backend)
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("backend", Backend)
def test_no_rows(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_launches(monkeypatch, rotary_triton)
    layout = HeadLayout(1, 1, 6)
    angles = replace(angles_of(FLOAT, 3), index=torch.empty(0, dtype=torch.int64, device=DEVICE))
    rotate(torch.empty(0, layout.width, device=DEVICE), layout, angles, None, backend=backend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_angles": 4}, "num_angles: expected an integer in 1..3, got 4"),
        ({"sin": torch.zeros(8, 3)}, "sin: expected 9 rows .* as cos has, got 8"),
    ],
)
def test_angles_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    layout = HeadLayout(1, 1, 6)
    angles = replace(angles_of(FLOAT, 3), **change)
    with pytest.raises(TensorContractError, match=message):
        rotate(rows_of(FLOAT, layout), layout, angles, None, backend=Backend.TORCH)


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("indexed", [True, False])
def test_strided_arguments(indexed: bool, backend: Backend) -> None:
    layout, n = HeadLayout(2, 1, 8), 3
    angles = angles_of(FLOAT, n, indexed)
    if angles.index is not None:
        angles = replace(angles, index=angles.index.contiguous())
    check_strided_arguments(
        rotate,
        {"qkv": rows_of(FLOAT, layout), "angles": angles, "norms": norms_of(FLOAT, 8)},
        refused={
            "qkv": "qkv: expected row-contiguous",
            "angles.cos": "cos: expected row-contiguous",
            "angles.sin": "sin: expected row-contiguous",
        },
        layout=layout,
        backend=backend,
    )
