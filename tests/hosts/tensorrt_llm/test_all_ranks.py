"""A rank that has not got the plugin is named by those that have."""

from __future__ import annotations

from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mtp_plugin.errors import HostError
from mtp_plugin.hosts.tensorrt_llm.ranks import expect_everywhere


class Mail:
    """Ranks of one process, with mpi4py's names."""

    def __init__(self, rank: int, size: int, boxes: dict[tuple[int, int], deque[Any]]) -> None:
        self.rank, self.size, self.boxes = rank, size, boxes

    def Get_rank(self) -> int:  # noqa: N802
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        return self.size

    def isend(self, obj: Any, dest: int, tag: int) -> None:  # noqa: ARG002
        self.boxes[self.rank, dest].append(obj)

    def iprobe(self, source: int, tag: int) -> bool:  # noqa: ARG002
        return bool(self.boxes[source, self.rank])

    def recv(self, *, source: int, tag: int) -> Any:  # noqa: ARG002
        return self.boxes[source, self.rank].popleft()


def run(told: dict[int, str], size: int) -> list[str]:
    """What every rank that says something ends with."""
    boxes: dict[tuple[int, int], deque[Any]] = defaultdict(deque)

    def one(rank: int) -> str:
        try:
            expect_everywhere(told[rank], Mail(rank, size, boxes), timeout_s=0.5)
        except HostError as error:
            return str(error)
        return "fine"

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, sorted(told)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_have_it(size: int) -> None:
    assert run(dict.fromkeys(range(size), "line 1.2, {}"), size) == ["fine"] * size


def test_one_has_not() -> None:
    assert run({0: "line 1.2, {}", 1: "line 1.2, {}", 3: "line 1.2, {}"}, 4) == [
        f"rank {rank} of 4: rank 2 did not load mtp_plugin within 0.5 s; every rank needs it: see "
        "--custom_module_dirs or TRTLLM_MTP_PLUGIN in mtp_plugin/hosts/tensorrt_llm/README.md"
        for rank in (0, 1, 3)
    ]


def test_one_has_other_options() -> None:
    mine, other = "line 1.2, {}", "line 1.2, {'seed': 3}"

    def told(rank: int, who: str, expected: str, got: str) -> str:
        return (
            f"rank {rank} of 3: mtp_plugin is set up otherwise on {who}: expected {expected}, got "
            f"{got}"
        )

    assert run({0: mine, 1: other, 2: mine}, 3) == [
        told(0, "rank 1", mine, other),
        told(1, "ranks 0, 2", other, mine),
        told(2, "rank 1", mine, other),
    ]
