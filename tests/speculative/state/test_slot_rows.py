"""The values of a slot: whose they are, in which columns, and at what cost."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mtp_plugin.errors import NoFreeSlotsError
from mtp_plugin.hosts.embedded.request import LlmRequest
from mtp_plugin.requests.columns import POOL_ROWS, REQUEST_COLUMNS, SlotColumn, TableColumns
from mtp_plugin.requests.options import MAX_BAD_WORD_LEN, SamplingParams
from mtp_plugin.requests.states import CUDA_GRAPH_DUMMY_REQUEST_ID
from mtp_plugin.requests.stopping import MAX_STOP_IDS
from mtp_plugin.speculative.host import DecodingOptions
from mtp_plugin.speculative.state import MTPHiddenStatesManager, SlotStateManager, SlotTable
from mtp_plugin.speculative.state import slot_table as slot_table_module
from mtp_plugin.speculative.verification import make_modes
from tests.speculative.state.cases import BEGIN, END, RELAXED, Request, batch, make, soil

CPU = torch.device("cpu")
SOILED = 777


class Copies:
    """Counts copies from the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        move = slot_table_module.to_device

        def counted(*args: Any) -> torch.Tensor:
            self.count += 1
            return move(*args)

        monkeypatch.setattr(slot_table_module, "to_device", counted)


class Operations(TorchDispatchMode):
    """Counts the operations that a device would run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    return Copies(monkeypatch)


def strict(max_num_requests: int = 2) -> SlotStateManager:
    modes = make_modes(DecodingOptions(max_draft_len=2), CPU)
    return SlotStateManager(modes, max_num_requests, device="cpu")


def shown(manager: SlotStateManager, slot: int) -> dict[str, Any]:
    """The columns of a slot."""
    return {
        column.name: manager.table.column(column.name)[slot].tolist()
        for column in manager.table.columns.columns
    }


def empty(manager: SlotStateManager) -> list[int]:
    return manager.table.columns.row({})


def padded(*stop_ids: int) -> list[int]:
    return [*stop_ids, *[-1] * (MAX_STOP_IDS - len(stop_ids))]


MANAGERS = pytest.mark.parametrize(
    "make_manager", [strict, make, lambda: make(RELAXED)], ids=["slots", "pairs", "relaxed"]
)

# --- the table ---

COLUMNS = (
    SlotColumn("delta", float, 0.5),
    SlotColumn("count", int, 3),
    SlotColumn("wide", float, -1.0, 3),
)
floats = st.floats(-(2.0**100), 2.0**100, width=32)
slot_values = st.fixed_dictionaries(
    {},
    optional={
        "number": st.integers(0, 2**31 - 1),
        "min_tokens": st.integers(0, 2**40),
        "temperature": st.floats(0, 100, width=32),
        "top_k": st.integers(0, 500),
        "presence_penalty": floats,
        "thinking_token_budget": st.integers(0, 500),
        "logprobs": st.integers(0, 20),
        "count_row": st.integers(0, 9),
        "recent": st.lists(st.integers(-1, 500), max_size=MAX_BAD_WORD_LEN),
        "num_thinking": st.integers(0, 9),
        "seed": st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=2),
        "stop_ids": st.lists(st.integers(0, 500), max_size=MAX_STOP_IDS),
        "delta": floats,
        "wide": st.lists(floats, max_size=3),
    },
)


def bits(value: float) -> int:
    return struct.unpack("i", struct.pack("f", value))[0]


def logit_change(values: dict[str, Any]) -> int:
    """1: logits processing changes the logits, 0: it does not."""
    return int("count_row" in values or bits(values.get("presence_penalty", 0.0)) != 0)


def format_value(values: dict[str, Any]) -> list[int]:
    """A row, number by number."""
    wide = [*values.get("wide", ()), *[-1.0] * 3][:3]
    return [
        values.get("number", 0),
        values.get("prompt_len", 0),
        min(values.get("min_tokens", 0), 2**31 - 1),
        values.get("thinking_token_budget", -1),
        bits(values.get("temperature", 0.0)),
        values.get("top_k", 0),
        bits(values.get("top_p", 1.0)),
        bits(values.get("min_p", 0.0)),
        bits(values.get("repetition_penalty", 1.0)),
        bits(values.get("presence_penalty", 0.0)),
        bits(values.get("frequency_penalty", 0.0)),
        values.get("logprobs", -1),
        values.get("top_p_mass", 0),
        *values.get("seed", (0, 0)),
        *(values.get(name, -1) for name in POOL_ROWS),
        logit_change(values),
        *[*values.get("recent", ()), *[-1] * MAX_BAD_WORD_LEN][:MAX_BAD_WORD_LEN],
        values.get("num_thinking", -1),
        values.get("end_progress", 0),
        *padded(*values.get("stop_ids", ())),
        bits(values.get("delta", 0.5)),
        values.get("count", 3),
        *map(bits, wide),
    ]


@settings(max_examples=20)
@given(steps=st.lists(st.dictionaries(st.integers(0, 5), slot_values, min_size=1), max_size=4))
def test_a_table_holds_what_was_written_last(steps: list[dict[int, dict[str, Any]]]) -> None:
    table, rows = SlotTable(6, COLUMNS, CPU), [format_value({}) for _ in range(6)]
    assert table.rows.tolist() == rows
    for values in steps:
        places = table.write(values)
        assert (places.dtype, places.tolist()) == (torch.int64, list(values))
        for slot, row in values.items():
            rows[slot] = format_value(row)
        assert table.rows.tolist() == rows


def test_a_column_is_a_view() -> None:
    table = SlotTable(2, COLUMNS, CPU)
    table.write({1: {"delta": 0.25, "wide": [1.5, 2.5], "stop_ids": [7]}})
    assert table.column("delta").tolist() == [0.5, 0.25]
    assert table.column("wide").tolist() == [[-1.0] * 3, [1.5, 2.5, -1.0]]
    assert table.column("stop_ids").tolist() == [padded(), padded(7)]
    table.column("delta")[0] = 2.0
    assert table.rows[0, table.columns.offset("delta")] == bits(2.0)
    assert table.rows.is_contiguous()


def test_rows_of_a_step_are_read_where_they_lie() -> None:
    table = SlotTable(4, COLUMNS, CPU)
    table.write({slot: {"delta": slot + 0.5, "count": slot} for slot in range(4)})
    slots = torch.tensor([3, 9, 0, 9, 2])[::2]
    rows = table.rows_of(slots)
    assert rows.table is table.rows
    assert rows.slot_ids is slots
    assert rows.read("count", slice(0, 3)).tolist() == [3, 0, 2]
    assert rows.read("delta", slice(1, 3)).tolist() == [0.5, 2.5]
    assert rows.read("wide", slice(2, 3)).tolist() == [[-1.0] * 3]


def test_numbers_that_no_column_holds() -> None:
    columns = TableColumns((*REQUEST_COLUMNS, *COLUMNS))
    count, delta = columns.offset("count"), columns.offset("delta")
    assert columns.row({"count": 2**40})[count] == 2**31 - 1
    assert columns.row({"count": -(2**40)})[count] == -(2**31)
    assert columns.row({"delta": float("inf")})[delta] == bits(3.4028234e38)


# --- the cost ---


@MANAGERS
@pytest.mark.parametrize("count", [1, 2, 4])
def test_one_copy_for_all_who_get_a_slot(make_manager: Any, count: int, copies: Copies) -> None:
    manager = make_manager()
    manager.prepare_resources(batch(*(Request(i, [1, BEGIN]) for i in range(count))))
    assert copies.count == 1
    assert len(manager.slot_manager.slot_mapping) == count


@MANAGERS
def test_more_requests_are_no_more_work_for_the_device(make_manager: Any) -> None:
    counts = []
    for number in (1, 4):
        manager = make_manager()
        with Operations() as operations:
            manager.prepare_resources(batch(*(Request(i, [1, BEGIN]) for i in range(number))))
        counts.append(operations.count)
    assert counts[0] == counts[1] > 0


@MANAGERS
def test_a_batch_without_a_new_request_costs_nothing(make_manager: Any, copies: Copies) -> None:
    manager, going = make_manager(), Request(1, is_first_context_chunk=False)
    manager.prepare_resources(batch(Request(1)))
    before = copies.count
    with Operations() as operations:
        manager.prepare_resources(batch())
        manager.prepare_resources(batch(going))
        manager.update_resources(batch(going))
        manager.free_resources(going)
        manager.add_dummy_requests([CUDA_GRAPH_DUMMY_REQUEST_ID])
    assert (operations.count, copies.count - before) == (0, 0)


def test_tokens_are_read_only_where_a_mode_needs_them() -> None:
    """A host's request copies its whole prompt to answer."""

    class Silent(Request):
        def get_tokens(self, _: int) -> list[int]:
            raise AssertionError("they are not read")

    strict().prepare_resources(batch(Silent(1, py_orig_prompt_len=9)))
    with pytest.raises(AssertionError, match="they are not read"):
        make(RELAXED).prepare_resources(batch(Silent(1, py_orig_prompt_len=9)))


# --- whose values ---


@MANAGERS
def test_rows_of_other_slots_are_left_alone(make_manager: Any) -> None:
    manager = make_manager()
    manager.slot_manager.add_slot(50)
    manager.table.rows.fill_(SOILED)
    manager.prepare_resources(batch(Request(4), Request(9)))
    manager.add_dummy_requests([70])
    width = manager.table.columns.width
    rows = manager.table.rows.tolist()
    assert [slot for slot, row in enumerate(rows) if row != [SOILED] * width] == [1, 2, 3]


@MANAGERS
def test_a_reused_slot_holds_nothing_of_the_request_before(make_manager: Any) -> None:
    manager, fresh = make_manager(), make_manager()
    manager.prepare_resources(batch(Request(1, [BEGIN], py_end_id=2, py_stop_ids=(3, 4))))
    if isinstance(manager, MTPHiddenStatesManager):
        soil(manager)
    manager.table.rows.fill_(SOILED)
    manager.free_resources(Request(1))
    for each in (manager, fresh):
        each.prepare_resources(batch(Request(2, [5], py_end_id=9)))
    assert shown(manager, 0) == shown(fresh, 0)
    assert shown(manager, 0)["stop_ids"] == padded(9)
    if isinstance(manager, MTPHiddenStatesManager):
        assert not manager.mtp_past_hidden_states_pool[0].any()
        assert not manager.mtp_past_tokens_pool[0].any()


@MANAGERS
def test_dummies_and_the_sentinel_hold_empty_rows(make_manager: Any) -> None:
    manager = make_manager()
    nothing = empty(manager)
    assert manager.table.rows.tolist() == [nothing] * manager.num_rows
    manager.prepare_resources(batch(Request(1, [BEGIN], py_end_id=3)))
    manager.free_resources(Request(1))
    manager.add_dummy_requests([70, CUDA_GRAPH_DUMMY_REQUEST_ID])
    for request_id in (70, CUDA_GRAPH_DUMMY_REQUEST_ID):
        assert manager.table.rows[manager.slot_of(request_id)].tolist() == nothing
    assert manager.slot_of(CUDA_GRAPH_DUMMY_REQUEST_ID) == manager.sentinel_slot


@MANAGERS
def test_requests_before_the_one_without_a_slot_have_their_rows(make_manager: Any) -> None:
    """A step that fails leaves no slot with another request's row."""
    manager = make_manager()
    spare = manager.slot_manager.max_num_requests
    for request_id in range(spare - 2):
        manager.slot_manager.add_slot(1000 + request_id)
    manager.table.rows.fill_(SOILED)
    requests = [Request(i, py_end_id=i) for i in (1, 2, 3)]
    with pytest.raises(NoFreeSlotsError):
        manager.prepare_resources(batch(*requests))
    assert manager.slot_manager.get_slot(3) is None
    for request_id in (1, 2):
        row = shown(manager, manager.slot_of(request_id))
        assert (row["number"], row["stop_ids"]) == (request_id, padded(request_id))


def test_a_request_that_cannot_be_read_gets_no_slot() -> None:
    class Broken(Request):
        def get_tokens(self, _: int) -> list[int]:
            raise OSError("gone")

    manager = make(RELAXED)
    with pytest.raises(OSError, match="gone"):
        manager.prepare_resources(batch(Request(1, [BEGIN]), Broken(2)))
    assert manager.slot_manager.slot_mapping == {1: 0}
    assert shown(manager, 0)["thinking"] == 1


# --- values of options ---


def request(params: SamplingParams, prompt: list[int], request_id: int = 7) -> LlmRequest:
    return LlmRequest(request_id, prompt, params, end_ids=(2,), max_draft_len=2, max_seq_len=64)


def test_options_are_in_their_columns() -> None:
    manager = strict()
    params = SamplingParams(max_new_tokens=30, min_tokens=9, stop_token_ids=(5, 6))
    manager.prepare_resources(batch(request(params, [1, 2, 3])))
    assert shown(manager, 0) == {
        "number": 7,
        "prompt_len": 3,
        "min_tokens": 9,
        "thinking_token_budget": -1,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": -1,
        "top_p_mass": 0,
        "seed": [0, 0],
        **dict.fromkeys(POOL_ROWS, -1),
        "logit_change": 0,
        "recent": [-1] * MAX_BAD_WORD_LEN,
        "num_thinking": -1,
        "end_progress": 0,
        "stop_ids": padded(2, 5, 6),
        "verification": 0,
        "draft_sampling": 0,
    }
    in_front = [column.name for column in REQUEST_COLUMNS]
    assert list(shown(manager, 0))[: len(in_front)] == in_front


@pytest.mark.parametrize("frees", [True, False])
def test_a_preempted_request_keeps_the_length_of_its_prompt(frees: bool) -> None:
    """It reads prompt and output again; tokens are counted from where its output began. A host may
    leave it its slot, whose row is written again."""
    manager, preempted = strict(), request(SamplingParams(min_tokens=4), [1, 2, 3])
    manager.prepare_resources(batch(preempted))
    before = shown(manager, 0)
    if frees:
        manager.free_resources(preempted)
    for token in (4, 5):
        preempted.add_new_token(token)
    preempted.pause()
    manager.table.rows.fill_(SOILED)
    manager.prepare_resources(batch(preempted))
    assert shown(manager, 0) == before


def test_lengths_and_numbers_of_a_host() -> None:
    """Without the prompt's length, the number of tokens counts."""
    manager = strict(max_num_requests=3)
    number = 2**40 + 5
    manager.prepare_resources(
        batch(
            Request(1, [1, 2, 3]),
            Request(2, [1, 2, 3], py_orig_prompt_len=2),
            Request(number, sampling_config=SimpleNamespace(min_length=[6])),
        )
    )
    rows = [shown(manager, slot) for slot in range(3)]
    assert [row["prompt_len"] for row in rows] == [3, 2, 1]
    assert [row["number"] for row in rows] == [1, 2, 5]
    assert [row["min_tokens"] for row in rows] == [0, 0, 6]


# --- relaxed acceptance ---


@pytest.mark.parametrize(
    ("tokens", "thinks"),
    [
        ([1, 2], False),
        ([1, BEGIN, 2], True),
        ([BEGIN, END, 2], False),
        ([END, 1, BEGIN], True),
        ([BEGIN, END, BEGIN, 3, END], False),
    ],
)
def test_the_phase_is_that_of_the_whole_prompt(tokens: list[int], thinks: bool) -> None:
    manager = make(RELAXED)
    manager.table.rows.fill_(SOILED)
    manager.prepare_resources(batch(Request(1, tokens)))
    row = shown(manager, 0)
    assert (row["thinking"], row["relaxed_topk"], row["relaxed_limit"]) == (thinks, 5, 0.25)
    assert row["mtp_relaxed_delta_pool"] == (0.25 if thinks else 0.0)


def test_a_preempted_request_thinks_on() -> None:
    """Its emitted tokens come back as part of the prompt."""
    manager = make(RELAXED)
    one = Request(1, [1, 2])
    manager.prepare_resources(batch(one))
    manager.free_resources(one)
    one.tokens += [BEGIN, 4]
    manager.prepare_resources(batch(one))
    assert shown(manager, 0)["thinking"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_delta_pool_that_a_host_put_in_its_place(dtype: torch.dtype) -> None:
    """It gets the values, wherever it lies; its other rows are the host's."""
    manager = make(RELAXED)
    pool = torch.full((manager.num_rows, 3), 7.0, dtype=dtype)[:, 1]
    manager.mtp_relaxed_delta_pool = pool
    manager.prepare_resources(batch(Request(1, [BEGIN]), Request(2, [END])))
    assert pool.tolist() == [0.25, 0.0, *[7.0] * (manager.num_rows - 2)]
    manager.free_resources(Request(1))
    manager.add_dummy_requests([70])
    assert pool[:3].tolist() == [0.0, 0.0, 7.0]
