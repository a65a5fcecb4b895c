"""The rotation of heads: story, transformers' functions, reference and kernel agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.glm4_moe import modeling_glm4_moe as glm

from mtp_plugin.errors import TensorContractError
from mtp_plugin.executor.layers.norm import reference as norms_reference
from mtp_plugin.executor.layers.rotary import launch, reference
from mtp_plugin.executor.layers.rotary.contract import Angles, HeadLayout, HeadNorms
from tests.executor.layers import stories
from tests.executor.layers.closeness import FLOAT, KINDS, Kind, rolled, strided
from tests.speculative.ops.on_device import DEVICE

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


def test_reference_is_the_story() -> None:
    layout, n = HeadLayout(num_q_heads=2, num_kv_heads=1, head_dim=8), 3
    angles, norms, rows = angles_of(FLOAT, n), norms_of(FLOAT, 8), rows_of(FLOAT, layout)
    told = []
    for row, place in zip(rows.tolist(), POSITIONS, strict=True):
        heads = [row[i : i + 8] for i in range(0, len(row), 8)]
        weights = [norms.q_weight.tolist()] * 2 + [norms.k_weight.tolist()]
        normed = [
            stories.rms_norm(head, weight, eps)
            for head, weight, eps in zip(heads, weights, (1e-6, 1e-6, 1e-2), strict=False)
        ]
        cos, sin = angles.cos[place].tolist(), angles.sin[place].tolist()
        turned = [stories.rotate(head, cos, sin) for head in normed]
        told.append([value for head in [*turned, heads[3]] for value in head])
    reference.rotate(rows, layout, angles, norms)
    FLOAT.assert_close(rows, torch.tensor(told, device=DEVICE))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normed", [True, False])
def test_reference_is_transformers(kind: Kind, normed: bool) -> None:
    layout, n = HeadLayout(num_q_heads=4, num_kv_heads=2, head_dim=16), 4
    angles, norms, rows = angles_of(kind, n), norms_of(kind, 16), rows_of(kind, layout)
    queries, keys, values = (heads.clone() for heads in layout.split(rows))
    if normed:
        queries = norms_reference.rms_norm(queries, norms.q_weight, norms.q_eps)
        keys = norms_reference.rms_norm(keys, norms.k_weight, norms.k_eps)
    both = [torch.cat([table[POSITIONS]] * 2, dim=-1) for table in (angles.cos, angles.sin)]
    expected = glm.apply_rotary_pos_emb(queries, keys, *both)
    reference.rotate(rows, layout, angles, norms if normed else None)
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
def test_kernel_on_random_shapes(
    q_heads: int, kv_heads: int, n: int, rest: int, normed: bool, indexed: bool
) -> None:
    layout = HeadLayout(q_heads, kv_heads, 2 * n + rest)
    for kind in KINDS:
        norms = norms_of(kind, layout.head_dim) if normed else None
        angles = angles_of(kind, n, indexed)
        rows, expected = strided(rows_of(kind, layout)), rows_of(kind, layout)
        launch.rotate(rows, layout, angles, norms)
        reference.rotate(expected, layout, angles, norms)
        kind.assert_close(rows, expected)
        assert torch.equal(layout.split(rows)[2], layout.split(rows_of(kind, layout))[2])


def test_positions_beyond_the_table_take_its_ends() -> None:
    layout, n = HeadLayout(1, 1, 6), 3
    angles = angles_of(FLOAT, n)
    beyond = replace(angles, index=torch.tensor([-4, 9, 99, 8, 0], device=DEVICE))
    ends = replace(angles, index=torch.tensor([0, 8, 8, 8, 0], device=DEVICE))
    for op in (launch, reference):
        rows, expected = rows_of(FLOAT, layout), rows_of(FLOAT, layout)
        op.rotate(rows, layout, beyond)
        op.rotate(expected, layout, ends)
        assert torch.equal(rows, expected)


def test_no_rows() -> None:
    layout = HeadLayout(1, 1, 6)
    angles = replace(angles_of(FLOAT, 3), index=torch.empty(0, dtype=torch.int64, device=DEVICE))
    launch.rotate(torch.empty(0, layout.width, device=DEVICE), layout, angles)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_angles": 4}, "angles: expected up to 3 of them for heads of 6, got 4"),
        ({"index": torch.zeros(2, dtype=torch.int64)}, r"index: expected \[5\], got \[2\]"),
        ({"cos": torch.zeros(9, 2)}, "cos: expected torch.float32 rows of at least 3 angles"),
        ({"sin": torch.zeros(9, 3, dtype=torch.float64)}, "sin: expected torch.float32 rows"),
    ],
)
def test_refusals(change: dict, message: str) -> None:
    layout = HeadLayout(1, 1, 6)
    for op in (launch, reference):
        with pytest.raises(TensorContractError, match=message):
            op.rotate(rows_of(FLOAT, layout), layout, replace(angles_of(FLOAT, 3), **change))


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(TensorContractError, match=r"qkv: expected \[T, 18\]"):
        launch.rotate(torch.zeros(5, 17, device=DEVICE), HeadLayout(1, 1, 6), angles_of(FLOAT, 3))
