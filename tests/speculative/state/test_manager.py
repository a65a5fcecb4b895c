"""The resource managers: their slots, dummies and the sentinel, and the pools of past pairs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.errors import ConfigError, MetadataError, NoFreeSlotsError
from mtp_plugin.requests.states import CUDA_GRAPH_DUMMY_REQUEST_ID
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker
from mtp_plugin.speculative.host import DecodingOptions, ResourceManager
from mtp_plugin.speculative.state import MTPHiddenStatesManager, SlotStateManager
from mtp_plugin.speculative.verification import make_modes
from tests.speculative.state.cases import RELAXED, Request, batch, make, soil

# --- construction ---


def test_pools_and_names() -> None:
    manager = MTPHiddenStatesManager(
        config=MTPDecodingConfig(num_nextn_predict_layers=3),
        dtype=torch.bfloat16,
        hidden_size=8,
        max_num_requests=4,
        device="cpu",
        sa_manager=None,  # another version's argument
    )
    assert isinstance(manager, ResourceManager)
    assert manager.num_nextn_predict_layers == 3
    assert (manager.dtype, manager.hidden_size, manager.max_num_requests) == (torch.bfloat16, 8, 4)
    rows = manager.mtp_past_hidden_states_pool.shape[0]
    assert manager.mtp_past_hidden_states_pool.shape == (rows, 3, 8)
    assert manager.mtp_past_hidden_states_pool.dtype == torch.bfloat16
    assert manager.mtp_past_tokens_pool.shape == (rows, 3)
    assert manager.mtp_past_tokens_pool.dtype == torch.int32
    assert not manager.use_relaxed_acceptance_for_thinking
    assert not hasattr(manager, "mtp_relaxed_delta_pool")
    assert not manager.mtp_past_hidden_states_pool.any()
    assert manager.get_max_resource_count() == 4
    assert manager.get_needed_resource_to_completion(Request(1)) == 0


@pytest.mark.parametrize(
    ("config", "k"),
    [
        (SimpleNamespace(max_draft_len=3, num_nextn_predict_layers=1), 3),
        (SimpleNamespace(max_draft_len=1, num_nextn_predict_layers=3), 1),
        (SimpleNamespace(max_draft_len=None, num_nextn_predict_layers=3), 3),
        (SimpleNamespace(num_nextn_predict_layers=2), 2),
    ],
)
def test_pools_are_as_wide_as_workers_draft(config: Any, k: int) -> None:
    """A host may keep the checkpoint's number of layers under the older name of K."""
    manager = make(config)
    assert manager.num_nextn_predict_layers == k
    assert manager.mtp_past_tokens_pool.shape[1] == k
    assert manager.mtp_past_hidden_states_pool.shape[1] == k
    for worker in (MTPWorker, MTPEagleWorker):
        assert worker(config, device="cpu").max_draft_len == k


@pytest.mark.parametrize("max_num_requests", [1, 2, 5, 64])
@pytest.mark.parametrize("num_seq_slots", [None, 3, 200])
def test_slots_cover_all_who_may_need_one(max_num_requests: int, num_seq_slots: int | None) -> None:
    """A full batch, its replacement under overlap, dummies; then the sentinel."""
    manager = make(max_num_requests=max_num_requests, num_seq_slots=num_seq_slots)
    sequences = max(num_seq_slots or 2 * max_num_requests, max_num_requests)
    manager.prepare_resources(batch(*(Request(i) for i in range(sequences))))
    dummies = [10_000 + i for i in range(max_num_requests)]
    manager.add_dummy_requests(dummies)
    slots = [manager.slot_manager.get_slot(i) for i in [*range(sequences), *dummies]]
    assert len(set(slots)) == sequences + max_num_requests
    rows = manager.mtp_past_tokens_pool.shape[0]
    assert manager.sentinel_slot == rows - 1
    assert manager.sentinel_slot not in slots
    assert rows >= sequences + max_num_requests + 1


def test_live_and_in_flight_hold_slots_together() -> None:
    """Two full batches hold slots at a time; a third meets a named error."""
    manager = make(max_num_requests=2)
    for start in (0, 2):
        manager.prepare_resources(batch(Request(start), Request(start + 1)))
    spare = manager.slot_manager.max_num_requests - 4
    manager.prepare_resources(batch(*(Request(100 + i) for i in range(spare))))
    with pytest.raises(NoFreeSlotsError, match="No free slots"):
        manager.prepare_resources(batch(Request(999)))


def test_a_manager_of_slots_alone() -> None:
    modes = make_modes(DecodingOptions(max_draft_len=2), torch.device("cpu"))
    manager = SlotStateManager(modes, 3, device="cpu")
    assert isinstance(manager, ResourceManager)
    assert manager.modes == modes
    assert manager.table.rows.shape == (manager.num_rows, manager.table.columns.width)
    assert manager.bytes_per_slot() == 4 * manager.table.columns.width
    assert not any(isinstance(value, torch.Tensor) for value in vars(manager).values())
    with pytest.raises(
        ConfigError, match="SlotStateManager: max_num_requests: expected an integer"
    ):
        SlotStateManager(modes, 0, device="cpu")


def test_bytes_per_slot_are_those_of_the_pools() -> None:
    """What views show is counted once."""
    for manager in (make(), make(RELAXED)):
        kept = [value for value in vars(manager).values() if isinstance(value, torch.Tensor)]
        storages = [tensor.untyped_storage() for tensor in [*kept, manager.table.rows]]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        assert manager.bytes_per_slot() * manager.num_rows == sum(sizes.values())


# --- the life of a slot ---


def test_a_first_chunk_gets_a_slot_and_a_later_one_keeps_it() -> None:
    manager = make()
    manager.prepare_resources(batch(Request(4), Request(9)))
    assert [manager.slot_manager.get_slot(i) for i in (4, 9)] == [0, 1]
    manager.mtp_past_tokens_pool[1] = 5
    manager.prepare_resources(batch(Request(9, is_first_context_chunk=False)))
    assert manager.slot_manager.get_slot(9) == 1
    assert manager.mtp_past_tokens_pool[1].tolist() == [5, 5]
    manager.update_resources(batch())
    assert manager.mtp_past_tokens_pool[1].tolist() == [5, 5]


def test_two_live_requests_with_one_id_are_refused() -> None:
    """They would share a slot and its options."""
    manager = make(max_num_requests=4)
    first, second = Request(7, state=SimpleNamespace(name="GENERATION_IN_PROGRESS")), Request(7)
    manager.prepare_resources(batch(first))
    with pytest.raises(MetadataError, match=r"^request 7: another live request has this id"):
        manager.prepare_resources(batch(Request(8), second))
    assert manager.slot_manager.slot_mapping == {7: 0, 8: 1}
    with pytest.raises(MetadataError, match=r"^request 9: another live request has this id"):
        manager.prepare_resources(batch(Request(9), Request(9)))
    first.state.name = "CONTEXT_INIT"
    manager.prepare_resources(batch(first))  # starts over after preemption
    first.state.name = "GENERATION_COMPLETE"
    manager.prepare_resources(batch(second))
    manager.free_resources(second)
    manager.prepare_resources(batch(Request(7)))


class WithoutWeakReferences:
    """A request that no weak reference can refer to."""

    __slots__ = ("_request",)

    def __init__(self, *args: Any, **fields: Any) -> None:
        self._request = Request(*args, **fields)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


@pytest.mark.parametrize("kind", [Request, WithoutWeakReferences])
def test_freeing_a_refused_request_keeps_the_slot_of_the_live_one(kind: Any) -> None:
    manager = make(max_num_requests=4)
    state = SimpleNamespace(name="GENERATION_IN_PROGRESS")
    first, second, third = kind(7, state=state), kind(7), kind(7)
    manager.prepare_resources(batch(first))
    with pytest.raises(MetadataError, match="another live request"):
        manager.prepare_resources(batch(second))
    manager.free_resources(second)
    assert manager.slot_of(7) == 0
    state.name = "GENERATION_COMPLETE"
    manager.prepare_resources(batch(third))
    manager.free_resources(first)  # hosts may free a finished request a step late
    assert manager.slot_of(7) == 0
    manager.free_resources(third)
    assert manager.slot_manager.slot_mapping == {}
    manager.prepare_resources(batch(second))  # the refused one, again
    manager.free_resources(second)
    assert manager.slot_manager.slot_mapping == {}
    assert manager._held == {}


def test_another_object_with_the_id_frees_the_slot() -> None:
    manager = make(max_num_requests=1)
    for number in range(6):
        manager.prepare_resources(batch(Request(number)))
        manager.free_resources(Request(number))
        assert manager.slot_manager.slot_mapping == {}


def test_dummies_may_repeat_an_id() -> None:
    manager = make()
    for _ in range(2):
        manager.add_dummy_requests([0])
        manager.prepare_resources(batch(Request(0, is_dummy=True)))


def test_free_is_idempotent_and_knows_no_strangers() -> None:
    manager = make(RELAXED)
    manager.prepare_resources(batch(Request(1), Request(2)))
    manager.free_resources(Request(77))
    assert manager.slot_manager.slot_mapping == {1: 0, 2: 1}
    manager.free_resources(Request(1))
    manager.prepare_resources(batch(Request(3)))
    manager.free_resources(Request(1))
    assert manager.slot_manager.slot_mapping == {2: 1, 3: 0}


def test_giving_a_slot_back_writes_nothing() -> None:
    """What is handed out is written then; a step in flight may still have the slot."""
    manager = make(RELAXED)
    manager.prepare_resources(batch(Request(1), Request(2)))
    soil(manager)
    manager.free_resources(Request(1))
    manager.shutdown()
    assert (manager.mtp_past_tokens_pool == -777).all()
    assert manager.mtp_past_hidden_states_pool.isnan().all()
    assert (manager.table.rows == 777).all()


def test_replaced_pools_are_read_afresh() -> None:
    manager = make()
    tokens = torch.full((2, 2), -777, dtype=torch.int32)
    states = torch.full((2, 2, 4), torch.nan)
    manager.mtp_past_tokens_pool, manager.mtp_past_hidden_states_pool = tokens, states
    manager.prepare_resources(batch(Request(1)))
    assert tokens.tolist() == [[0, 0], [-777, -777]]
    assert not states[0].any()


def test_dummies() -> None:
    """Warm-up dummies get slots of their own, graph-padding ids none: theirs is the sentinel."""
    manager = make()
    soil(manager)
    manager.add_dummy_requests([5, CUDA_GRAPH_DUMMY_REQUEST_ID, CUDA_GRAPH_DUMMY_REQUEST_ID - 3])
    assert manager.slot_manager.get_slot(5) == 0
    assert not manager.mtp_past_tokens_pool[0].any()
    assert manager.slot_manager.get_slot(CUDA_GRAPH_DUMMY_REQUEST_ID) is None
    manager.free_resources(Request(CUDA_GRAPH_DUMMY_REQUEST_ID))
    manager.free_resources(Request(5))
    assert len(manager.slot_manager.free_slots) == manager.slot_manager.max_num_requests


def test_a_padding_id_that_a_host_gave_a_slot_gives_it_back() -> None:
    manager = make()
    manager.slot_manager.add_slot(CUDA_GRAPH_DUMMY_REQUEST_ID)
    manager.add_dummy_requests([CUDA_GRAPH_DUMMY_REQUEST_ID])
    assert manager.slot_manager.get_slot(CUDA_GRAPH_DUMMY_REQUEST_ID) is None
    assert len(manager.slot_manager.free_slots) == manager.slot_manager.max_num_requests


def test_shutdown_gives_every_slot_back() -> None:
    manager = make()
    manager.prepare_resources(batch(Request(1), Request(2)))
    manager.shutdown()
    assert len(manager.slot_manager.free_slots) == manager.slot_manager.max_num_requests
    assert manager.slot_manager.get_slot(1) is None
