"""Checks after the traffic of a soak test."""

from __future__ import annotations

import gc
import math
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mtp_plugin.hosts.embedded import LLM
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats

MAX_DEVICE_GROWTH = 16 * 2**20
"""Maximum growth in bytes since the warm-up, without requests both times."""
MAX_HOST_GROWTH = 128 * 2**20
"""Maximum growth in bytes since the first third; libraries cache data per shape."""
MAX_DRIFT = 0.05
"""Maximum relative deviation of a third's acceptance length from the whole run's, if the sampling
error is smaller."""
STANDARD_ERRORS = 4.0
LEAST_REQUESTS = 10
"""Minimum number of finished requests for a third to be checked."""


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    name: str
    holds: bool
    found: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Memory:
    """Allocated bytes of this process."""

    device: int
    host: int

    @staticmethod
    def now(device: torch.device) -> Memory:
        """Measure after a garbage collection."""
        gc.collect()
        held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        return Memory(held, _resident_bytes())


def _resident_bytes() -> int:
    file = Path("/proc/self/statm")
    if not file.is_file():  # only on Linux
        return 0
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def leak_checks(llm: LLM) -> list[Check]:
    """Check blocks, slots and requests of an executor without requests."""
    blocks = llm.blocks
    found = [
        Check(
            "KV blocks",
            blocks.num_free_blocks == blocks.num_blocks,
            f"{blocks.num_free_blocks} of {blocks.num_blocks} free",
        ),
        _slot_check("sequence slots", llm.seq_slots.slots),
    ]
    manager = getattr(llm.pieces.manager, "slot_manager", None)
    if manager is not None:
        found.append(_slot_check("history slots", manager))
    found.append(Check("requests", not llm.executor.has_work, f"has work: {llm.executor.has_work}"))
    return found


def _slot_check(name: str, slots: Any) -> Check:
    held, free = len(slots.slot_mapping), len(set(slots.free_slots))
    whole = held == 0 and free == slots.max_num_requests
    return Check(name, whole, f"{held} held, {free} of {slots.max_num_requests} free")


def memory_checks(warm: Memory, first_third: Memory, drained: Memory) -> list[Check]:
    """Check the growth of device memory since the warm-up, of host memory since the first third."""
    return [
        Check(name, grown <= most, f"{grown / 2**20:+.1f} MiB, at most {most / 2**20:.0f}")
        for name, grown, most in (
            ("device memory", drained.device - warm.device, MAX_DEVICE_GROWTH),
            ("host memory", drained.host - first_third.host, MAX_HOST_GROWTH),
        )
    ]


class Thirds:
    """Acceptance by third of the run, to detect drift."""

    def __init__(self, draft_len: int) -> None:
        self.stats = [AcceptanceStats(draft_len) for _ in range(3)]
        self._lengths: list[list[float]] = [[], [], []]

    def add(self, third: int, stats: AcceptanceStats) -> None:
        """Count a finished request that was allowed to draft."""
        if stats.steps:
            self.stats[third].merge(stats)
            self._lengths[third].append(stats.acceptance_length)

    def check(self) -> Check:
        """Check that each third is close to the whole run."""
        whole = AcceptanceStats(self.stats[0].max_draft_len)
        for stats in self.stats:
            whole.merge(stats)
        means = [f"{stats.acceptance_length:.3f}" for stats in self.stats]
        holds = True
        for stats, lengths in zip(self.stats, self._lengths, strict=True):
            if len(lengths) < LEAST_REQUESTS:
                continue
            error = statistics.stdev(lengths) / math.sqrt(len(lengths))
            most = max(MAX_DRIFT * whole.acceptance_length, STANDARD_ERRORS * error)
            holds &= abs(stats.acceptance_length - whole.acceptance_length) <= most
        return Check("acceptance length by third", holds, " / ".join(means))
