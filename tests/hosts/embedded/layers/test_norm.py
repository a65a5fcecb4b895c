"""Norms: transformers' class, torch and kernels agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRMSNorm

from mtp_plugin.hosts.embedded.layers.norm import Norm, add_rms_norm, join_norms, rms_norm
from mtp_plugin.ops.backend import Backend
from tests.hosts.embedded.layers.closeness import FLOAT, KINDS, Kind, rolled, strided
from tests.op_arguments import check_strided_arguments, poisoned_memory
from tests.ops.on_device import DEVICE

EPS = 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [33, 520])
def test_torch_is_transformers(kind: Kind, width: int) -> None:
    x, weight = rolled(3, width, kind=kind), rolled(width, kind=kind, seed=1)
    norm = Glm4MoeRMSNorm(width, eps=EPS).to(DEVICE, kind.dtype)
    norm.weight.data = weight
    assert torch.equal(rms_norm(x, weight, EPS, backend=Backend.TORCH), norm(x))


@settings(max_examples=20)
@given(rows=st.integers(0, 4), width=st.integers(1, 70), seed=st.integers(0, 99))
def test_torch_and_kernel_agree(rows: int, width: int, seed: int) -> None:
    for kind in KINDS:
        x, residual = (rolled(rows, width, kind=kind, seed=seed + i) for i in range(2))
        weight = rolled(width, kind=kind, seed=seed + 2)
        apart = strided(x), strided(residual, 5)
        with poisoned_memory():
            alone = rms_norm(apart[0], weight, EPS, backend=Backend.TRITON)
            normed, total = add_rms_norm(*apart, weight, EPS, backend=Backend.TRITON)
        expected = add_rms_norm(x, residual, weight, EPS, backend=Backend.TORCH)
        kind.assert_close(alone, rms_norm(x, weight, EPS, backend=Backend.TORCH))
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
    hidden = strided(rolled(4, width, kind=kind, seed=1))
    weights = [rolled(width, kind=kind, seed=seed) for seed in (2, 3)]
    norms = Norm(weights[0], 1e-6), Norm(weights[1], 1e-2)
    given = embedding, ids, hidden, *norms
    expected = join_norms(*given, embedding_first=embedding_first, backend=Backend.TORCH)
    with poisoned_memory():
        joined = join_norms(*given, embedding_first=embedding_first, backend=Backend.TRITON)
    kind.assert_close(joined, expected)
    embedded = embedding if ids is None else embedding[ids.long()]
    halves = [
        rms_norm(embedded, weights[0], 1e-6, backend=Backend.TORCH),
        rms_norm(hidden, weights[1], 1e-2, backend=Backend.TORCH),
    ]
    assert torch.equal(expected, torch.cat(halves if embedding_first else halves[::-1], dim=1))


@pytest.mark.parametrize("backend", Backend)
def test_nan_stays_in_its_row(backend: Backend) -> None:
    x, weight = rolled(3, 40, kind=FLOAT), rolled(40, kind=FLOAT, seed=1)
    expected, _ = add_rms_norm(x, x, weight, EPS, backend=Backend.TORCH)
    x[1, 7] = torch.nan
    normed, total = add_rms_norm(x, x, weight, EPS, backend=backend)
    assert normed[1].isnan().all()
    FLOAT.assert_close(normed[::2], expected[::2])
    assert total[1].isnan().sum() == 1


def joined(**change: Any) -> dict[str, Any]:
    """Arguments of a joined norm."""
    return {
        "embedding": rolled(6, 4, kind=FLOAT),
        "ids": torch.tensor([5, 0, 2], device=DEVICE),
        "hidden": rolled(3, 4, kind=FLOAT, seed=1),
        "embedding_norm": Norm(rolled(4, kind=FLOAT, seed=2), EPS),
        "hidden_norm": Norm(rolled(4, kind=FLOAT, seed=3), EPS),
        "embedding_first": True,
        **change,
    }


@pytest.mark.parametrize("backend", Backend)
def test_strided_arguments(backend: Backend) -> None:
    rows, weight = "x: expected row-contiguous", "weight: expected contiguous"
    given = {"x": rolled(3, 5, kind=FLOAT), "weight": rolled(5, kind=FLOAT, seed=1)}
    others: dict[str, Any] = {"eps": EPS, "backend": backend}
    check_strided_arguments(rms_norm, given, refused={"x": rows, "weight": weight}, **others)
    check_strided_arguments(
        add_rms_norm,
        given | {"residual": rolled(3, 5, kind=FLOAT, seed=2)},
        refused={
            "x": rows,
            "weight": weight,
            "residual": "residual: expected row-contiguous torch.float32",
        },
        **others,
    )
    check_strided_arguments(
        join_norms,
        joined(),
        refused={
            "embedding": "embedding: expected row-contiguous",
            "hidden": "hidden: expected row-contiguous",
            "embedding_norm.weight": "embedding_norm.weight: expected contiguous",
            "hidden_norm.weight": "hidden_norm.weight: expected contiguous",
        },
        backend=backend,
    )
