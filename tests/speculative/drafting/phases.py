"""Thinking phases of slots, as a manager keeps them."""

from __future__ import annotations

import torch

from mtp_plugin.speculative.state import MTPHiddenStatesManager


def set_phases(manager: MTPHiddenStatesManager, phases: dict[int, bool]) -> None:
    """Slot -> whether it thinks; the delta in force follows."""
    for slot, thinks in phases.items():
        manager.thinking_pool[slot] = int(thinks)
        limit = manager.relaxed_limit_pool[slot]
        manager.mtp_relaxed_delta_pool[slot] = torch.where(torch.tensor(thinks), limit, 0.0)
