"""Checks that the functions share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mtp_plugin.errors import TensorContractError, expect_int, format_value
from mtp_plugin.hosts.megatron.types import KVBlockState
from mtp_plugin.ops.checks import AtLeast, expect_tensor

INDEX_DTYPES = frozenset({torch.int32, torch.int64})
FLAG_DTYPES = INDEX_DTYPES | {torch.bool}


def expect_vector(
    name: str,
    value: object,
    entries: int,
    device: torch.device,
    dtypes: frozenset[torch.dtype] = INDEX_DTYPES,
) -> torch.Tensor:
    """Return ``value`` if it is a contiguous vector of at least so many entries."""
    # the general check is only for the message: a call makes many of these
    if (
        isinstance(value, torch.Tensor)
        and value.dtype in dtypes
        and value.dim() == 1
        and value.shape[0] >= entries
        and value.device == device
        and value.is_contiguous()
    ):
        return value
    return expect_tensor(
        name, value, dtype=dtypes, shape=(AtLeast(entries),), device=device, contiguous=True
    )


def expect_table(
    name: str, value: object, rows: int, width: int | AtLeast, device: torch.device
) -> torch.Tensor:
    """Return ``value`` if it is a table of dense rows, at least so many."""
    shape = (AtLeast(rows), width)
    return expect_tensor(
        name, value, dtype=INDEX_DTYPES, shape=shape, device=device, contiguous="rows"
    )


def expect_kv(kv: KVBlockState, num_requests: int, device: torch.device) -> None:
    for name, value in vars(kv).items():
        if name == "kv_block_ids":
            expect_table(name, value, num_requests, AtLeast(1), device)
        else:
            expect_vector(name, value, num_requests, device)


def expect_active(
    active: int | torch.Tensor | None, num_requests: int, device: torch.device
) -> int | torch.Tensor:
    """Return the number of active requests: an integer, or one of ``device``; None: all."""
    name = "num_active_requests"
    if active is None:
        return num_requests
    if not isinstance(active, torch.Tensor):
        return expect_int(name, active)
    expect_tensor(name, active, dtype=INDEX_DTYPES, device=device)
    if active.numel() != 1:
        raise TensorContractError(f"{name}: expected one integer, got {list(active.shape)}")
    return active


def outputs(
    out: object,
    expected: Sequence[tuple[str, tuple[int, ...], torch.dtype]],
    device: torch.device,
) -> tuple[torch.Tensor, ...]:
    """Return the tensors of ``out`` if they are as ``expected``, or new ones if it is None."""
    if out is None:
        return tuple(torch.empty(shape, dtype=dtype, device=device) for _, shape, dtype in expected)
    if not isinstance(out, (tuple, list)) or len(out) != len(expected):
        names = ", ".join(name for name, _, _ in expected)
        raise TensorContractError(f"out: expected ({names}), got {format_value(out)}")
    for (name, shape, dtype), tensor in zip(expected, out, strict=True):
        if not (
            isinstance(tensor, torch.Tensor)
            and tensor.dtype is dtype
            and tensor.shape == shape
            and tensor.device == device
            and tensor.is_contiguous()
        ):
            expect_tensor(
                f"out, {name}", tensor, dtype=dtype, shape=shape, device=device, contiguous=True
            )
    return tuple(out)


def released_shape(num_requests: int, num_drafts: int, block_size: int) -> tuple[int, ...]:
    """The shape of the blocks that a rewind releases."""
    crossable = -(-num_drafts // block_size)
    return (num_requests, crossable) if crossable > 1 else (num_requests,)
