"""Call a user's stop callback and check its result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from numbers import Integral
from typing import Any

from mtp_plugin.errors import describe_error, format_value

MAX_UNKNOWN = 10
"""Maximum number of unexpected ids that are reported."""
MAX_DECISIONS = 10_000
"""Maximum number of ids in a result."""

StopAnswer = Collection[int] | Mapping[int, int] | None
"""Ids of requests to stop after their last token, or a mapping of ids to the number of tokens to
keep; None: stop none."""

StopCallback = Callable[[Sequence[int]], StopAnswer]
"""Called once per step with the ids of its unfinished requests and of those that just finished by a
token, in batch order."""


@dataclass(frozen=True)
class StopDecisions:
    """The checked result of a stop callback."""

    keep: Mapping[int, int] = field(default_factory=dict)
    """Requests to stop -> number of output tokens to keep."""
    wrong: Mapping[int, str] = field(default_factory=dict)
    """Requests with an invalid decision -> the reason."""
    unknown: tuple[str, ...] = ()
    """Messages about ids that are not in the step."""


def call_stop_callback(
    callback: StopCallback, outputs: Mapping[int, tuple[int, int]]
) -> StopDecisions:
    """Call a stop callback and check its result.

    A callback that raises, or returns neither ids nor counts, fails for all requests of the call.

    Args:
        outputs: request id -> number of output tokens before the step, and now.
    """
    try:
        answer = callback(list(outputs))
    except Exception as error:
        return _failed(outputs, describe_error(error))
    if answer is None:
        return StopDecisions()
    if isinstance(answer, (str, bytes)) or not isinstance(answer, Collection):
        return _failed(
            outputs, f"expected ids, or a mapping of ids to counts, got {type(answer).__name__}"
        )
    keep: dict[int, int] = {}
    wrong: dict[int, str] = {}
    unknown: list[str] = []
    try:
        num_decisions = len(answer)
        decisions = list(islice(_decisions(answer), MAX_DECISIONS))
    except Exception as error:  # as of tensors without a dimension
        return _failed(outputs, describe_error(error))
    if num_decisions > MAX_DECISIONS:
        return _failed(outputs, f"expected at most {MAX_DECISIONS} ids, got {num_decisions}")
    for request_id, count in decisions:
        if not _is_integer(request_id) or request_id not in outputs:
            among = ", ".join(map(str, outputs))
            unknown.append(
                f"stop_callback: expected ids among {among}, got {format_value(request_id)}"
            )
            continue
        before, now = outputs[request_id]
        count = now if count is _ALL else count
        if _is_integer(count) and before <= count <= now:
            keep[int(request_id)] = int(count)
        else:
            wrong[int(request_id)] = (
                f"stop_callback: expected {before} to {now} tokens of the output to keep, got "
                f"{format_value(count)}"
            )
    more = len(unknown) - MAX_UNKNOWN
    if more > 0:
        unknown[MAX_UNKNOWN:] = [f"stop_callback: and {more} more unexpected ids"]
    return StopDecisions(keep, wrong, tuple(unknown))


_ALL = object()


def _decisions(answer: Collection[Any]) -> Iterator[tuple[Any, Any]]:
    if isinstance(answer, Mapping):
        yield from answer.items()
    else:
        yield from ((request_id, _ALL) for request_id in answer)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _failed(outputs: Mapping[int, tuple[int, int]], why: str) -> StopDecisions:
    return StopDecisions(wrong=dict.fromkeys(outputs, f"stop_callback: {why}"))
