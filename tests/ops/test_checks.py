"""Checks of tensors and integers."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from mtp_plugin.errors import RequestError, TensorContractError, expect_int
from mtp_plugin.ops.checks import FLOATS, INTEGERS, SIGNED, AtLeast, expect_tensor

ROWS = torch.zeros(2, 6, dtype=torch.int32)[:, :3]
COMPLEX = torch.ones(2, dtype=torch.complex64)


@pytest.mark.parametrize(
    "description",
    [
        {},
        {"dtype": torch.int32, "shape": (2, 3), "device": torch.device("cpu")},
        {"dtype": INTEGERS, "shape": (AtLeast(2), "V"), "contiguous": "rows"},
    ],
)
def test_expect_tensor_returns_what_fits(description) -> None:
    assert expect_tensor("rows", ROWS, **description) is ROWS


@pytest.mark.parametrize(
    ("value", "description", "message"),
    [
        ([1, 2], {}, "rows: expected tensor, got [1, 2]"),
        (None, {"dtype": INTEGERS}, "rows: expected integer tensor, got None"),
        (ROWS.byte(), {"dtype": SIGNED}, "rows: expected signed integer tensor, got torch.uint8"),
        (COMPLEX.conj().imag, {}, "torch.float32 [2] on cpu, a view with the negative bit; call"),
        (COMPLEX.conj(), {}, "[2] on cpu, a view with the conjugate bit; call resolve_conj()"),
        (
            np.zeros((20, 7)),
            {"dtype": FLOATS},
            "tensor, got numpy.ndarray float64 [20, 7]; pass torch.as_tensor(...)",
        ),
        (ROWS, {"dtype": FLOATS}, "rows: expected floating-point tensor, got torch.int32 [2, 3]"),
        (ROWS.bool(), {"dtype": INTEGERS}, "expected integer tensor, got torch.bool [2, 3] on cpu"),
        (ROWS, {"shape": ("R",)}, "rows: expected tensor [R], got torch.int32 [2, 3] on cpu"),
        (ROWS, {"shape": (2, 4)}, "rows: expected tensor [2, 4], got torch.int32 [2, 3]"),
        (ROWS, {"shape": (AtLeast(3), "V")}, "rows: expected tensor [>= 3, V], got"),
        (ROWS, {"device": torch.device("meta")}, "rows: expected tensor on meta, got"),
        (ROWS, {"contiguous": True}, "expected contiguous tensor, got torch.int32 [2, 3] with"),
        (ROWS.T, {"contiguous": "rows"}, "expected row-contiguous tensor, got"),
        (
            ROWS,
            {"dtype": {torch.int64, torch.bool}},
            "rows: expected torch.bool or torch.int64 tensor, got",
        ),
    ],
)
def test_expect_tensor_refuses_by_name(value, description, message) -> None:
    with pytest.raises(TensorContractError, match=re.escape(message)):
        expect_tensor("rows", value, **description)


@pytest.mark.parametrize("value", [3, np.int64(3), torch.tensor(3)])
def test_expect_int_returns_an_int(value) -> None:
    number = expect_int("top_k", value, 1, 3)
    assert number == 3
    assert type(number) is int


@pytest.mark.parametrize(
    ("value", "limits", "message"),
    [
        (True, {}, "top_k: expected an integer, got True"),
        (1.0, {"minimum": 0}, "top_k: expected an integer >= 0, got 1.0"),
        ("3", {"maximum": 4}, "top_k: expected an integer <= 4, got '3'"),
        (5, {"minimum": 0, "maximum": 4}, "top_k: expected an integer in 0..4, got 5"),
        (torch.zeros(2), {}, "top_k: expected an integer, got tensor("),
    ],
)
def test_expect_int_refuses_by_name(value, limits, message) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        expect_int("top_k", value, **limits, error=RequestError)
