"""Which slot a request has."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from typing import Any, Protocol

import torch

from mtp_plugin.errors import MetadataError, NoFreeSlotsError, expect_int
from mtp_plugin.requests.states import is_graph_dummy_id


class SlotManager:
    """Hands out slots 0, 1, 2, ...; a freed slot is the next candidate again, lowest first.

    Args:
        num_slots: how many slots can be taken at a time.
    """

    def __init__(self, num_slots: int) -> None:
        num_slots = expect_int("num_slots", num_slots, 0, error=MetadataError)
        self.max_num_requests = num_slots
        self.slot_mapping: dict[int, int] = {}
        self.free_slots: list[int] = list(range(num_slots))

    def get_slot(self, request_id: int) -> int | None:
        """The request's slot, or None."""
        return self.slot_mapping.get(request_id)

    def add_slot(self, request_id: int) -> int:
        """Take a slot for the request; one that has a slot keeps it.

        Raises:
            NoFreeSlotsError: every slot is taken.
            MetadataError: the id is no integer.
        """
        request_id = expect_int("request_id", request_id, error=MetadataError)
        slot = self.slot_mapping.get(request_id)
        if slot is not None:
            return slot
        if not self.free_slots:
            raise NoFreeSlotsError(
                f"No free slots: all {self.max_num_requests} are taken, request {request_id} "
                f"needs one"
            )
        # one operation: a signal's handler that raises between two would lose the slot
        lowest = map(heapq.heappop, repeat(self.free_slots))
        self.slot_mapping.update(zip((request_id,), lowest, strict=False))
        return self.slot_mapping[request_id]

    def remove_slot(self, request_id: int) -> None:
        """Give the request's slot back; an unknown id changes nothing."""
        if request_id in self.slot_mapping:
            taken = map(self.slot_mapping.pop, (request_id,))
            # one operation, as above
            deque(map(heapq.heappush, (self.free_slots,), taken), maxlen=0)

    def fill_slot_id_tensor(self, requests: Sequence[Any], tensor: torch.Tensor) -> None:
        """Write the slot of every request into ``tensor`` [len(requests)].

        Raises:
            NoFreeSlotsError: a request has no slot.
        """
        for row, request in enumerate(requests):
            slot = self.get_slot(request.request_id)
            if slot is None:
                raise NoFreeSlotsError(f"request {request.request_id} has no slot")
            tensor[row] = slot

    def shutdown(self) -> None:
        """Give every slot back."""
        for request_id in list(self.slot_mapping):
            self.remove_slot(request_id)


class SlotSource(Protocol):
    """Answers which slot a request has."""

    def get_slot(self, request_id: int) -> int | None: ...


def slot_or_sentinel(slots: SlotSource, request_id: int, sentinel: int | None) -> int | None:
    """The request's slot; of an id that pads a graph, the sentinel; None: it has none."""
    slot = slots.get_slot(request_id)
    if slot is not None:
        return slot
    number = expect_int("request_id", request_id, error=MetadataError)
    return sentinel if is_graph_dummy_id(number) else None
