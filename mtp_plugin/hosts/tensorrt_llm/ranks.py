"""How this process was reached: every rank says so once, and has the plugin from then on."""

from __future__ import annotations

import logging
import time
from importlib import import_module
from typing import Any, Protocol

from mtp_plugin.errors import HostError, expect

_PACKAGE = "mtp_plugin.hosts.tensorrt_llm"

_logger = logging.getLogger("mtp_plugin")
_ways: list[str] = []

TIMEOUT_S = 120.0
"""Seconds that ranks may be apart when they build their models."""
_PAUSE_S = 0.01
_TAG = 20371


def reached_by(way: str) -> None:
    """Install the plugin in this process, unless it is; tell once which way reached it.

    Args:
        way: ``config`` (its unpickling), ``custom module`` or ``sitecustomize``.

    Raises:
        MTPPluginError: as ``install`` does.
    """
    if _ways:
        return
    package = import_module(_PACKAGE)
    if not package.is_installed():
        package.install()
    _ways.append(way)
    _logger.info("TensorRT-LLM: this process has the plugin, reached by: %s", way)


def first_way() -> str | None:
    """What reached this process; None: nothing but calls by hand."""
    return _ways[0] if _ways else None


class Communicator(Protocol):
    """What is used of mpi4py's."""

    def Get_rank(self) -> int: ...  # noqa: N802 - mpi4py's names

    def Get_size(self) -> int: ...  # noqa: N802

    def isend(self, obj: Any, dest: int, tag: int) -> Any: ...

    def iprobe(self, source: int, tag: int) -> bool: ...

    def recv(self, *, source: int, tag: int) -> Any: ...


def expect_everywhere(told: str, ranks: Communicator, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until every other rank has said what this one says: it has the plugin, and the same.

    Call it on every rank, where a rank without the plugin is not waited for by anybody else.

    Args:
        told: the line and the options of this rank.

    Raises:
        HostError: ranks that said nothing in time, or something else.
    """
    me, count = ranks.Get_rank(), ranks.Get_size()
    waiting = {rank for rank in range(count) if rank != me}
    sent = [ranks.isend(told, dest=rank, tag=_TAG) for rank in sorted(waiting)]
    others: dict[int, str] = {}
    end = time.monotonic() + timeout_s
    while waiting:
        for rank in sorted(waiting):
            if ranks.iprobe(source=rank, tag=_TAG):
                others[rank] = ranks.recv(source=rank, tag=_TAG)
        waiting -= others.keys()
        expect(
            not waiting or time.monotonic() < end,
            HostError,
            f"rank {me} of {count}: {_of(waiting)} did not load mtp_plugin within {timeout_s:g} s; "
            "every rank needs it: see --custom_module_dirs or TRTLLM_MTP_PLUGIN in "
            "mtp_plugin/hosts/tensorrt_llm/README.md",
        )
        if waiting:
            time.sleep(_PAUSE_S)
    del sent  # kept alive until they have arrived
    different = {rank for rank, other in others.items() if other != told}
    first = min(different, default=me)
    expect(
        not different,
        HostError,
        f"rank {me} of {count}: mtp_plugin is set up otherwise on {_of(different)}: expected "
        f"{told}, got {others.get(first)}",
    )


def _of(ranks: set[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
