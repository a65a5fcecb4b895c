"""Resource managers of the executor loop, and the allocator of sequence slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtp_plugin.requests.slots import SlotManager
from mtp_plugin.speculative.host import ResourceManager


class SeqSlotManager:
    """Allocates each running request's sequence slot: its row in the sampler's store."""

    def __init__(self, num_slots: int) -> None:
        self.slots = SlotManager(num_slots)

    def get_max_resource_count(self) -> int:
        """Number of sequence slots."""
        return self.slots.max_num_requests

    def get_needed_resource_to_completion(self, request: Any) -> int:  # noqa: ARG002
        """One slot per request."""
        return 1

    def add_dummy_requests(self, request_ids: Sequence[int]) -> None:
        """Do nothing: padding rows never reach the sampler."""

    def prepare_resources(self, scheduled_batch: Any) -> None:
        """Allocate a slot for every request that has none."""
        for request in scheduled_batch.all_requests():
            request.py_seq_slot = self.slots.add_slot(request.request_id)

    def update_resources(self, scheduled_batch: Any) -> None:
        """Do nothing: slots do not change while a request runs."""

    def free_resources(self, request: Any) -> None:
        """Free the request's slot."""
        self.slots.remove_slot(request.request_id)
        request.py_seq_slot = None

    def shutdown(self) -> None:
        """Free all slots."""
        self.slots.shutdown()


class ResourceManagers:
    """Resource managers, prepared in order and freed in reverse; the KV cache is the last one."""

    def __init__(self, managers: dict[str, ResourceManager]) -> None:
        self.managers = managers

    def prepare_resources(self, scheduled_batch: Any) -> None:
        """Called before each step."""
        for manager in self.managers.values():
            manager.prepare_resources(scheduled_batch)

    def update_resources(self, scheduled_batch: Any) -> None:
        """Called after the results of a step were processed."""
        for manager in self.managers.values():
            manager.update_resources(scheduled_batch)

    def free_resources(self, request: Any) -> None:
        """Called when a request finishes or is paused."""
        for manager in reversed(list(self.managers.values())):
            manager.free_resources(request)

    def shutdown(self) -> None:
        """Called when the executor is shut down."""
        for manager in self.managers.values():
            manager.shutdown()
