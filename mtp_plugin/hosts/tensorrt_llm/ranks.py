"""Install the plugin in ranks, and check that all ranks have it with the same options."""

from __future__ import annotations

import logging
import time
from importlib import import_module
from typing import Any, Protocol

from mtp_plugin.errors import HostError, expect

_PACKAGE = "mtp_plugin.hosts.tensorrt_llm"

_logger = logging.getLogger("mtp_plugin")
_loaded_by: list[str] = []

TIMEOUT_S = 120.0
"""Maximum time between the first and the last rank that builds its model."""
_PAUSE_S = 0.01
_TAG = 20371
_unfinished_sends: list[Any] = []
"""Requests that had not completed at the timeout: MPI still reads the buffers that they own."""


def install_once(source: str) -> None:
    """Install the plugin in this process if it is not; log once how it was loaded.

    Args:
        source: ``config`` (its unpickling), ``custom module`` or ``sitecustomize``.

    Raises:
        MTPPluginError: as ``install`` does.
    """
    if _loaded_by:
        return
    package = import_module(_PACKAGE)
    if not package.is_installed():
        package.install()
    _loaded_by.append(source)
    _logger.info("TensorRT-LLM: this process has the plugin, loaded by: %s", source)


def loaded_by() -> str | None:
    """Return how the plugin was loaded first; None: by a call of ``install``."""
    return _loaded_by[0] if _loaded_by else None


class SendRequest(Protocol):
    """The part of ``mpi4py.MPI.Request`` that is used here."""

    def test(self) -> tuple[bool, Any]: ...


class Communicator(Protocol):
    """The part of ``mpi4py.MPI.Comm`` that is used here."""

    def Get_rank(self) -> int: ...  # noqa: N802 - mpi4py's names

    def Get_size(self) -> int: ...  # noqa: N802

    def isend(self, obj: Any, dest: int, tag: int) -> SendRequest: ...

    def iprobe(self, source: int, tag: int) -> bool: ...

    def recv(self, *, source: int, tag: int) -> Any: ...


def expect_everywhere(own: str, ranks: Communicator, timeout_s: float = TIMEOUT_S) -> None:
    """Exchange the plugin's options with every other rank, and expect the same ones there.

    Call it on every rank at the same point. A rank without the plugin sends nothing and is named
    in the error of the others.

    Args:
        own: API version and options of this rank.

    Raises:
        HostError: ranks sent nothing within ``timeout_s``, or have other options.
    """
    me, count = ranks.Get_rank(), ranks.Get_size()
    waiting = {rank for rank in range(count) if rank != me}
    sends = {rank: ranks.isend(own, dest=rank, tag=_TAG) for rank in sorted(waiting)}
    others: dict[int, str] = {}
    end = time.monotonic() + timeout_s
    while waiting or sends:
        for rank in sorted(waiting):
            if ranks.iprobe(source=rank, tag=_TAG):
                others[rank] = ranks.recv(source=rank, tag=_TAG)
        waiting -= others.keys()
        sends = {rank: send for rank, send in sends.items() if not send.test()[0]}
        late = waiting | sends.keys()
        if late and time.monotonic() >= end:
            _unfinished_sends.extend(sends.values())
            raise HostError(
                f"rank {me} of {count}: {_of(late)} did not load mtp_plugin within {timeout_s:g} "
                "s; every rank needs it: see --custom_module_dirs or TRTLLM_MTP_PLUGIN in "
                "mtp_plugin/hosts/tensorrt_llm/README.md"
            )
        if late:
            time.sleep(_PAUSE_S)
    different = {rank for rank, other in others.items() if other != own}
    first = min(different, default=me)
    expect(
        not different,
        HostError,
        f"rank {me} of {count}: mtp_plugin has other options on {_of(different)}: expected "
        f"{own}, got {others.get(first)}",
    )


def _of(ranks: set[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
