"""Shared by the tests of op arguments: strided tensors, wrong tensors and poisoned memory."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from mtp_plugin.errors import TensorContractError
from tests.ops.bits import same_bits
from tests.ops.top_k.launches import poison

GAP = 3
"""Every stride of a strided tensor is so many times that of a contiguous one."""


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The values of `tensor` with poisoned gaps between all its elements."""
    if tensor.dim() == 0:
        return tensor.clone()
    poison = True if tensor.dtype == torch.bool else 77
    wide = torch.full(
        [size * GAP for size in tensor.shape], poison, dtype=tensor.dtype, device=tensor.device
    )
    view = wide[tuple(slice(None, None, GAP) for _ in tensor.shape)]
    view.copy_(tensor)
    return view


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Tensors that torch allocates without a value start poisoned."""

    def poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **options: poison(allocate(*args, **options))

    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like"):
            patch.setattr(torch, name, poisoning(getattr(torch, name)))
        yield


def check_strided_arguments(
    op: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    refused: Mapping[str, str] | None = None,
    **others: Any,
) -> None:
    """Check that `op` gives the same results with each tensor strided, and writes nothing else.

    Tensors are values of `arguments`, or fields of dataclasses in it; then they are named
    `argument.field`. Results and changed arguments are compared bit for bit.

    Args:
        refused: tensors that must be refused instead, and a part of the error message.
        others: further arguments, passed unchanged.
    """
    refused = dict(refused or {})
    expected = run_op(op, arguments, others)
    names = list(tensor_names(arguments))
    unknown = sorted(set(refused) - set(names))
    assert not unknown, f"no tensor arguments: {unknown}, there are {names}"
    for name in names:
        changed = changed_arguments(arguments, name, strided)
        if name in refused:
            with pytest.raises(TensorContractError, match=re.escape(refused[name])):
                run_op(op, changed, others)
            continue
        got = run_op(op, changed, others)
        assert len(got) == len(expected), name
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other), name


WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "type": lambda t: t.int() if t.is_floating_point() else t.float(),
    "dimensions": lambda t: t.unsqueeze(0),
    "shorter": lambda t: t[:-1],
    "elsewhere": lambda t: t.to("meta"),
    "list": lambda t: t.tolist(),
}
"""Changes of a tensor that an op refuses."""


def check_wrong_arguments(
    op: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    free: Collection[str] = (),
    **others: Any,
) -> None:
    """Check that `op` refuses each tensor with each change of `WRONG`, and then writes nothing.

    The message names a tensor of another type or rank; another size or device may also be reported
    as that of a second tensor.

    Args:
        free: changes that the op accepts, as `argument.field` or `argument.field: change`.
        others: further arguments, passed unchanged.
    """
    problems = []
    for name in tensor_names(arguments):
        for kind, change in WRONG.items():
            if name in free or f"{name}: {kind}" in free:
                continue
            copies = {argument: _copied(value) for argument, value in arguments.items()}
            message = _refusal(op, copies, name, change, others)
            field = name.rpartition(".")[2].replace("_", "[_ ]")
            if message is None:
                problems.append(f"{name}: {kind} is accepted")
            elif kind not in ("shorter", "elsewhere") and not re.search(field, message):
                problems.append(f"{name}: {kind}: {message}")
            elif not all(map(same_bits, _tensors(copies), _tensors(arguments))):
                problems.append(f"{name}: {kind} is refused after a write")
    assert not problems, "\n".join(problems)


def _refusal(
    op: Callable[..., Any],
    arguments: Mapping[str, Any],
    name: str,
    change: Callable[[torch.Tensor], Any],
    others: Mapping[str, Any],
) -> str | None:
    """The message with which `op` refuses a changed tensor, or None."""
    try:
        op(**changed_arguments(arguments, name, change), **others)
    except TensorContractError as error:
        return str(error)
    return None


def check_arguments(
    op: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    refused: Mapping[str, str] | None = None,
    free: Collection[str] = (),
    **others: Any,
) -> None:
    """:func:`check_strided_arguments` and :func:`check_wrong_arguments`."""
    check_strided_arguments(op, arguments, refused=refused, **others)
    check_wrong_arguments(op, arguments, free=free, **others)


def run_op(
    op: Callable[..., Any], arguments: Mapping[str, Any], others: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Return all results and changed arguments, contiguous; the gaps must not be written."""
    given = {name: _copied(value) for name, value in arguments.items()}
    gaps = [(t, _gaps(t)) for t in _tensors(given)]
    result = op(**given, **others)
    if isinstance(result, AbstractContextManager):
        with result as inner:
            inside = [tensor.clone() for tensor in _tensors(inner)]
        found = inside + list(_tensors(given))
    else:
        found = [*_tensors(result), *_tensors(given)]
    for tensor, before in gaps:
        assert torch.equal(_gaps(tensor), before), "written between the elements of an argument"
    return [tensor.clone().contiguous() for tensor in found]


def _gaps(tensor: torch.Tensor) -> torch.Tensor:
    """The storage of a strided tensor, with its own elements set to 0."""
    whole = storage(tensor)
    own = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    own.zero_()
    return whole


def storage(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole storage of a tensor."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return whole.set_(tensor.untyped_storage()).clone()


def _copied(value: Any) -> Any:
    """A copy with memory of its own and the same strides."""
    if isinstance(value, torch.Tensor):
        return storage(value).as_strided(value.shape, value.stride(), value.storage_offset())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: _copied(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init
        }
        return dataclasses.replace(value, **fields)
    return copy.deepcopy(value)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


def tensor_names(arguments: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            yield prefix + name
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            yield from tensor_names(fields, f"{prefix}{name}.")


def changed_arguments(
    arguments: Mapping[str, Any], name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    first, _, rest = name.partition(".")
    value = arguments[first]
    if rest:
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        inner = changed_arguments(fields, rest, change)
        part = rest.partition(".")[0]
        changed = dataclasses.replace(value, **{part: inner[part]})
    else:
        changed = change(value)
    return {**arguments, first: changed}
