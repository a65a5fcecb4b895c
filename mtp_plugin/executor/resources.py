"""The ordered managers that the loop drives, and the sequence slots of the sampler's store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtp_plugin.requests.slots import SlotManager
from mtp_plugin.speculative.host import ResourceManager


class SeqSlotManager:
    """Gives every running request the row of the sampler's store that its tokens go through."""

    def __init__(self, num_slots: int) -> None:
        self.slots = SlotManager(num_slots)

    def get_max_resource_count(self) -> int:
        """Sequence slots."""
        return self.slots.max_num_requests

    def get_needed_resource_to_completion(self, request: Any) -> int:  # noqa: ARG002
        """One."""
        return 1

    def add_dummy_requests(self, request_ids: Sequence[int]) -> None:
        """Padding rows never reach the sampler."""

    def prepare_resources(self, scheduled_batch: Any) -> None:
        """A slot for every request that has none."""
        for request in scheduled_batch.all_requests():
            request.py_seq_slot = self.slots.add_slot(request.request_id)

    def update_resources(self, scheduled_batch: Any) -> None:
        """Slots do not change while a request runs."""

    def free_resources(self, request: Any) -> None:
        """Give the request's slot back."""
        self.slots.remove_slot(request.request_id)
        request.py_seq_slot = None

    def shutdown(self) -> None:
        """Give every slot back."""
        self.slots.shutdown()


class ResourceManagers:
    """Managers in order: they prepare in it and free against it, the KV cache prepares last."""

    def __init__(self, managers: dict[str, ResourceManager]) -> None:
        self.managers = managers

    def prepare_resources(self, scheduled_batch: Any) -> None:
        """Before a step."""
        for manager in self.managers.values():
            manager.prepare_resources(scheduled_batch)

    def update_resources(self, scheduled_batch: Any) -> None:
        """After a step's results were handled."""
        for manager in self.managers.values():
            manager.update_resources(scheduled_batch)

    def free_resources(self, request: Any) -> None:
        """When a request ends or is paused."""
        for manager in reversed(list(self.managers.values())):
            manager.free_resources(request)

    def shutdown(self) -> None:
        """When the executor ends."""
        for manager in self.managers.values():
            manager.shutdown()
