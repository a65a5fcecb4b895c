"""Read a resource manager: the plugin's, or a host engine's own with fewer attributes."""

from __future__ import annotations

from typing import Any

import torch

from mtp_plugin.errors import ConfigError, MetadataError, expect, format_value
from mtp_plugin.requests.slots import slot_or_sentinel

TOKENS_POOL, STATES_POOL = "mtp_past_tokens_pool", "mtp_past_hidden_states_pool"


def manager_device(manager: Any) -> torch.device:
    """Return the device of the manager's pools; without any, CUDA where present, else CPU.

    Raises:
        ConfigError: the manager assigns no slots.
    """
    expect(
        manager is None or hasattr(getattr(manager, "slot_manager", None), "get_slot"),
        ConfigError,
        "mtp_hidden_states_manager: expected an object with slot_manager.get_slot(request_id), got "
        f"{format_value(manager)}",
    )
    device = getattr(manager, "device", None)
    if device is None:
        device = getattr(pool_of(manager, TOKENS_POOL), "device", None)
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def pool_of(manager: Any, name: str) -> torch.Tensor | None:
    """Return a pool with a row per slot; None if the manager has no such pool."""
    pool: torch.Tensor | None = getattr(manager, name, None)
    return pool


def manager_slot(manager: Any, request_id: int) -> int:
    """Return the request's row in the pools; padding rows have the sentinel, if there is one.

    Raises:
        MetadataError: the request has no slot.
    """
    slot = None
    if manager is not None:
        sentinel = getattr(manager, "sentinel_slot", None)
        slot = slot_or_sentinel(manager.slot_manager, request_id, sentinel)
    if slot is None:
        raise MetadataError(f"request {request_id} has no slot in the MTP manager")
    return int(slot)
