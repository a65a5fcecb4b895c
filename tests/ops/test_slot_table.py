"""`build_slot_rows`: the slot table of a host engine without one of its own."""

from __future__ import annotations

import math

import numpy as np
import torch

from mtp_plugin.ops.slot_table import build_slot_rows
from mtp_plugin.requests.seeds import seed_words
from tests.ops.on_device import DEVICE
from tests.ops.slots import held


def test_slot_rows_hold_the_options_of_their_request() -> None:
    seed = 2**64 - 3
    slots = build_slot_rows(
        [{"temperature": 0.5, "seed": seed, "stop_ids": [3, 4]}, {"seed": None, "number": 9}, {}],
        device=DEVICE,
    )
    assert slots.table.device.type == slots.slot_ids.device.type == DEVICE.type
    assert slots.slot_ids.tolist() == [0, 1, 2]
    assert [held(slots, i, "temperature") for i in range(3)] == [0.5, 0.0, 0.0]
    assert [held(slots, i, "number") for i in range(3)] == [0, 9, 2]
    assert held(slots, 0, "stop_ids")[:3] == [3, 4, -1]
    expected = [seed_words(seed, 0), seed_words(None, 9), seed_words(None, 2)]
    assert [tuple(held(slots, i, "seed")) for i in range(3)] == expected


def test_slot_rows_of_no_request() -> None:
    slots = build_slot_rows([], device=DEVICE)
    assert slots.table.shape == (0, slots.columns.width)
    assert slots.slot_ids.dtype == torch.int64


def test_slot_rows_take_numbers_of_any_type() -> None:
    options = {"top_k": 3.0, "temperature": np.float32(0.5), "top_p": math.inf, "seed": np.int64(7)}
    slots = build_slot_rows([options, {"top_k": True}], device=DEVICE)
    assert (held(slots, 0, "top_k"), held(slots, 1, "top_k")) == (3, 1)
    assert held(slots, 0, "temperature") == 0.5
    assert tuple(held(slots, 0, "seed")) == seed_words(7, 0)
