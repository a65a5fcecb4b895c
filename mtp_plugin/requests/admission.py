"""What a host's request asks for, and what of it its pieces do not give."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from numbers import Real
from typing import Any, NamedTuple

from mtp_plugin.requests.options import HOST_OPTIONS, OPTIONS, Option, is_greedy

_CONFIG = "config."


class HostAsks(NamedTuple):
    """One option of a host's request that changes something."""

    option: Option
    field: str  # where the request has it, as `Option.host` says it
    value: Any

    def __str__(self) -> str:
        if isinstance(self.value, bool) or not isinstance(self.value, Real):
            return self.field.removeprefix(_CONFIG)
        return f"{self.option.host[0].removeprefix(_CONFIG)}={self.value}"


def _rows() -> Iterator[Option]:
    """Rows that hosts have: first those of fields, then those of the sampling config."""
    ours = [row for row in OPTIONS.values() if row.host]
    yield from (row for row in (*HOST_OPTIONS, *ours) if not row.host[0].startswith(_CONFIG))
    yield from (row for row in (*ours, *HOST_OPTIONS) if row.host[0].startswith(_CONFIG))


_ROWS = tuple(_rows())


def host_options(request: Any) -> list[HostAsks]:
    """What a request, as TensorRT-LLM holds it, asks for, in a fixed order.

    Args:
        request: with ``sampling_config``, whose fields are numbers, lists of one or None, and with
            fields of its own; one that is not there asks for nothing.
    """
    config = getattr(request, "sampling_config", None)
    asked = [_asked(request, config, row) for row in _ROWS]
    return [one for one in asked if one is not None]


def unsupported_options(
    request: Any, *, always_greedy: bool = False, served: Collection[str] = ()
) -> list[str]:
    """Every option of a request, as TensorRT-LLM holds it, that would change its output.

    A temperature of 0, a top-k of 1, a top-p of 0, or none of these and no min-p: decoding is
    greedy, and how a token would be drawn does not matter.

    Args:
        request: as `host_options`.
        always_greedy: how a token would be drawn never matters.
        served: names of options that are given.

    Returns:
        ``name`` or ``name=value``, in a fixed order.
    """
    asked = host_options(request)
    ignores_draws = always_greedy or is_greedy({one.option.name: one.value for one in asked})
    return [
        str(one)
        for one in asked
        if one.option.name not in served and not (one.option.draws and ignores_draws)
    ]


def _asked(request: Any, config: Any, row: Option) -> HostAsks | None:
    """What the first field of a row that is there asks for, if anything."""
    for field in row.host:
        name = field.removeprefix(_CONFIG)
        value = getattr(request, field, None) if name == field else _first(config, name)
        if not _is_there(value):
            continue
        is_neutral = isinstance(value, Real) and row.is_neutral(value)
        if is_neutral or (row.host_neutral is not None and row.host_neutral(value)):
            return None
        return HostAsks(row, field, value)
    return None


def _first(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    if isinstance(value, (list, tuple)):
        return value[0] if value else None
    return value


def _is_there(value: Any) -> bool:
    return value is not None and not (hasattr(value, "__len__") and len(value) == 0)
