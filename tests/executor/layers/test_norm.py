"""Norms: story, transformers' class, reference and kernel agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRMSNorm

from mtp_plugin.errors import TensorContractError
from mtp_plugin.executor.layers.norm import launch, reference
from tests.executor.layers import stories
from tests.executor.layers.closeness import FLOAT, KINDS, Kind, rolled, strided
from tests.kernels.top_k.launches import poisoned_outputs
from tests.speculative.ops.on_device import DEVICE

EPS = 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 33, 64, 520])
def test_reference_is_transformers(kind: Kind, width: int) -> None:
    x, weight = rolled(3, width, kind=kind), rolled(width, kind=kind, seed=1)
    norm = Glm4MoeRMSNorm(width, eps=EPS).to(DEVICE, kind.dtype)
    norm.weight.data = weight
    assert torch.equal(reference.rms_norm(x, weight, EPS), norm(x))


def test_reference_is_the_story() -> None:
    x, weight = rolled(2, 7, kind=FLOAT), rolled(7, kind=FLOAT, seed=1)
    told = [stories.rms_norm(row, weight.tolist(), EPS) for row in x.tolist()]
    FLOAT.assert_close(reference.rms_norm(x, weight, EPS), torch.tensor(told, device=DEVICE))


@settings(max_examples=20)
@given(rows=st.integers(0, 4), width=st.integers(1, 70), seed=st.integers(0, 99))
def test_kernel_on_random_shapes(rows: int, width: int, seed: int) -> None:
    for kind in KINDS:
        x, residual = (rolled(rows, width, kind=kind, seed=seed + i) for i in range(2))
        weight = rolled(width, kind=kind, seed=seed + 2)
        with poisoned_outputs(launch):
            alone = launch.rms_norm(strided(x), weight, EPS)
            normed, total = launch.add_rms_norm(strided(x), strided(residual, 5), weight, EPS)
        expected = reference.add_rms_norm(x, residual, weight, EPS)
        kind.assert_close(alone, reference.rms_norm(x, weight, EPS))
        kind.assert_close(normed, expected[0])
        assert torch.equal(total, expected[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("embedding_first", [True, False])
@pytest.mark.parametrize("gathers", [True, False])
def test_join(kind: Kind, embedding_first: bool, gathers: bool) -> None:
    width = 70
    embedding = rolled(11 if gathers else 4, width, kind=kind)
    column = torch.tensor([[10, 99], [0, 99], [3, 99], [3, 99]], dtype=torch.int32, device=DEVICE)
    ids = column[:, 0] if gathers else None
    hidden = rolled(4, width, kind=kind, seed=1)
    weights = [rolled(width, kind=kind, seed=seed) for seed in (2, 3)]
    eps = {"embedding_eps": 1e-6, "hidden_eps": 1e-2}
    with poisoned_outputs(launch):
        joined = launch.join_norms(
            embedding, ids, strided(hidden), *weights, **eps, embedding_first=embedding_first
        )
    expected = reference.join_norms(
        embedding, ids, hidden, *weights, **eps, embedding_first=embedding_first
    )
    kind.assert_close(joined, expected)
    embedded = embedding if ids is None else embedding[ids.long()]
    halves = [
        reference.rms_norm(embedded, weights[0], 1e-6),
        reference.rms_norm(hidden, weights[1], 1e-2),
    ]
    assert torch.equal(expected, torch.cat(halves if embedding_first else halves[::-1], dim=1))


def test_a_row_of_nan_stays_alone() -> None:
    x = rolled(3, 40, kind=FLOAT)
    x[1, 7] = torch.nan
    weight = rolled(40, kind=FLOAT, seed=1)
    normed, total = launch.add_rms_norm(x, x, weight, EPS)
    expected, _ = reference.add_rms_norm(x, x, weight, EPS)
    assert normed[1].isnan().all()
    FLOAT.assert_close(normed[::2], expected[::2])
    assert total[1].isnan().sum() == 1


@pytest.mark.parametrize(
    ("x", "residual", "message"),
    [
        ((2, 5), (2, 4), r"x: expected \[rows, 4\]"),
        ((2, 4), (3, 4), r"residual: expected torch.float32 \[2, 4\] like x"),
        ((2, 4), (2, 5), r"residual: expected \[rows, 4\]"),
        ((4,), (2, 4), "x: expected"),
    ],
)
def test_refusals(x: tuple[int, ...], residual: tuple[int, ...], message: str) -> None:
    weight = torch.ones(4, device=DEVICE)
    with pytest.raises(TensorContractError, match=message):
        launch.add_rms_norm(
            torch.ones(x, device=DEVICE), torch.ones(residual, device=DEVICE), weight, EPS
        )


def test_join_refuses_another_number_of_rows() -> None:
    rows, weight = torch.ones(3, 4, device=DEVICE), torch.ones(4, device=DEVICE)
    with pytest.raises(TensorContractError, match="one row of 4 for each of 2 embeddings"):
        launch.join_norms(
            rows[:2],
            None,
            rows,
            weight,
            weight,
            embedding_eps=EPS,
            hidden_eps=EPS,
            embedding_first=True,
        )
