"""A host's resource manager that holds ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtp_plugin.errors import NoFreeSlotsError
from mtp_plugin.speculative.state import SlotStateManager


class ManagerBody:
    """What a host asks of its spec resource manager, answered by ours.

    Every other attribute is ours too, as pools that a host may read or replace.
    """

    mtp_plugin_manager: SlotStateManager
    mtp_plugin_no_slots: type[Exception] = NoFreeSlotsError
    mtp_plugin_ended = False
    """It was shut down, and no request came since."""

    def get_max_resource_count(self) -> int:
        """Requests that one batch may hold."""
        return self.mtp_plugin_manager.get_max_resource_count()

    def get_needed_resource_to_completion(self, request: Any) -> int:
        """Always 0."""
        return self.mtp_plugin_manager.get_needed_resource_to_completion(request)

    def add_dummy_requests(self, request_ids: Sequence[int]) -> None:
        """Slots for warm-up and padding.

        Raises:
            NoFreeSlotsError: no slot is left; the host's own where it has one, which it expects.
        """
        self.mtp_plugin_ended = False
        try:
            self.mtp_plugin_manager.add_dummy_requests(request_ids)
        except NoFreeSlotsError as error:
            raise self.mtp_plugin_no_slots(str(error)) from error

    def prepare_resources(self, scheduled_batch: Any) -> None:
        """Slots for requests on their first chunk."""
        self.mtp_plugin_ended = False  # hosts measure their memory, shut down, and go on
        self.mtp_plugin_manager.prepare_resources(scheduled_batch)

    def update_resources(self, scheduled_batch: Any, *_: Any) -> None:
        """Nothing moves on the host; managers of KV caches are told more, which some hosts tell all
        of them."""
        self.mtp_plugin_manager.update_resources(scheduled_batch)

    def free_resources(self, request: Any) -> None:
        """The request's slot back; an unknown request changes nothing."""
        self.mtp_plugin_manager.free_resources(request)

    def shutdown(self) -> None:
        """Every slot back."""
        self.mtp_plugin_manager.shutdown()
        self.mtp_plugin_ended = True

    def __getattr__(self, name: str) -> Any:
        if name == "mtp_plugin_manager":
            raise AttributeError(name)
        return getattr(self.mtp_plugin_manager, name)


def manager_class(base: type) -> type:
    """A subclass of a host's manager base."""
    return type("MTPPluginResourceManager", (ManagerBody, base), {"__module__": __name__})
