"""TensorRT-LLM resource manager that delegates to ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtp_plugin.errors import NoFreeSlotsError
from mtp_plugin.speculative.state import SlotStateManager


class ManagerBody:
    """Interface of the host's spec resource manager, delegated to `mtp_plugin_manager`.

    All other attributes are ours as well, such as pools that a host may read or replace.
    """

    mtp_plugin_manager: SlotStateManager
    mtp_plugin_no_slots: type[Exception] = NoFreeSlotsError
    mtp_plugin_ended = False
    """It was shut down and has received no request since."""

    def get_max_resource_count(self) -> int:
        """Maximum number of requests in a batch."""
        return self.mtp_plugin_manager.get_max_resource_count()

    def get_needed_resource_to_completion(self, request: Any) -> int:
        """Return 0."""
        return self.mtp_plugin_manager.get_needed_resource_to_completion(request)

    def add_dummy_requests(self, request_ids: Sequence[int]) -> None:
        """Allocate slots for warm-up and padding requests.

        Raises:
            NoFreeSlotsError: no slot is free; the host's own class where it has one.
        """
        self.mtp_plugin_ended = False
        try:
            self.mtp_plugin_manager.add_dummy_requests(request_ids)
        except NoFreeSlotsError as error:
            raise self.mtp_plugin_no_slots(str(error)) from error

    def prepare_resources(self, scheduled_batch: Any) -> None:
        """Allocate slots for requests with their first chunk."""
        self.mtp_plugin_ended = False  # hosts shut down after profiling memory, then continue
        self.mtp_plugin_manager.prepare_resources(scheduled_batch)

    def update_resources(self, scheduled_batch: Any, *_: Any) -> None:
        """Do nothing on the host. Some API versions pass the further arguments of KV cache managers
        to all managers."""
        self.mtp_plugin_manager.update_resources(scheduled_batch)

    def free_resources(self, request: Any) -> None:
        """Free the slot of a request; unknown requests are ignored."""
        self.mtp_plugin_manager.free_resources(request)

    def shutdown(self) -> None:
        """Free all slots."""
        self.mtp_plugin_manager.shutdown()
        self.mtp_plugin_ended = True

    def __getattr__(self, name: str) -> Any:
        if name == "mtp_plugin_manager":
            raise AttributeError(name)
        return getattr(self.mtp_plugin_manager, name)


def manager_class(base: type) -> type:
    """Return a subclass of the host's base class of resource managers."""
    return type("MTPPluginResourceManager", (ManagerBody, base), {"__module__": __name__})
