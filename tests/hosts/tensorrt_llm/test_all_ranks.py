"""A rank that has not got the plugin is named by those that have."""

from __future__ import annotations

from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mtp_plugin.errors import HostError
from mtp_plugin.hosts.tensorrt_llm import ranks
from mtp_plugin.hosts.tensorrt_llm.ranks import expect_everywhere


class Send:
    """A send that completes when its message has been received."""

    def __init__(self, box: deque[Any], message: Any) -> None:
        self.box, self.message = box, message
        self.is_complete = False

    def test(self) -> tuple[bool, None]:
        self.is_complete = not any(message is self for message in self.box)
        return self.is_complete, None


class Mail:
    """Ranks of one process, with mpi4py's names."""

    def __init__(self, rank: int, size: int, boxes: dict[tuple[int, int], deque[Any]]) -> None:
        self.rank, self.size, self.boxes = rank, size, boxes
        self.sends: list[Send] = []

    def Get_rank(self) -> int:  # noqa: N802
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        return self.size

    def isend(self, obj: Any, dest: int, tag: int) -> Send:  # noqa: ARG002
        box = self.boxes[self.rank, dest]
        send = Send(box, obj)
        box.append(send)
        self.sends.append(send)
        return send

    def iprobe(self, source: int, tag: int) -> bool:  # noqa: ARG002
        return bool(self.boxes[source, self.rank])

    def recv(self, *, source: int, tag: int) -> Any:  # noqa: ARG002
        return self.boxes[source, self.rank].popleft().message


def run(texts: dict[int, str], size: int) -> list[str]:
    """What every rank that says something ends with."""
    boxes: dict[tuple[int, int], deque[Any]] = defaultdict(deque)

    def one(rank: int) -> str:
        mail = Mail(rank, size, boxes)
        try:
            expect_everywhere(texts[rank], mail, timeout_s=0.5)
        except HostError as error:
            incomplete = [send for send in mail.sends if not send.is_complete]
            assert all(send in ranks._unfinished_sends for send in incomplete)
            return str(error)
        assert all(send.is_complete for send in mail.sends)
        return "fine"

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, sorted(texts)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_have_it(size: int) -> None:
    assert run(dict.fromkeys(range(size), "line 1.2, {}"), size) == ["fine"] * size


def test_slow_sends_complete_before_the_exchange_returns() -> None:
    class Slow(Send):
        polls = 0

        def test(self) -> tuple[bool, None]:
            self.polls += 1
            return self.polls > 3 and super().test()[0], None

    boxes: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
    mail = Mail(0, 2, boxes)
    boxes[1, 0].append(Send(boxes[1, 0], "line 1.2, {}"))
    sends: list[Slow] = []

    def isend(obj: Any, dest: int, tag: int) -> Slow:  # noqa: ARG001 - received at once
        sends.append(Slow(deque(), obj))
        return sends[-1]

    mail.isend = isend  # type: ignore[method-assign]
    expect_everywhere("line 1.2, {}", mail, timeout_s=30)
    assert [(send.is_complete, send.polls) for send in sends] == [(True, 4)]


def test_one_has_not() -> None:
    assert run({0: "line 1.2, {}", 1: "line 1.2, {}", 3: "line 1.2, {}"}, 4) == [
        f"rank {rank} of 4: rank 2 did not load mtp_plugin within 0.5 s; every rank needs it: see "
        "--custom_module_dirs or TRTLLM_MTP_PLUGIN in mtp_plugin/hosts/tensorrt_llm/README.md"
        for rank in (0, 1, 3)
    ]


def test_one_has_other_options() -> None:
    mine, other = "line 1.2, {}", "line 1.2, {'seed': 3}"

    def message(rank: int, who: str, expected: str, got: str) -> str:
        return (
            f"rank {rank} of 3: mtp_plugin has other options on {who}: expected {expected}, got "
            f"{got}"
        )

    assert run({0: mine, 1: other, 2: mine}, 3) == [
        message(0, "rank 1", mine, other),
        message(1, "ranks 0, 2", other, mine),
        message(2, "rank 1", mine, other),
    ]
