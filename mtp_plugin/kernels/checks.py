"""Checks of tensors that ops share."""

from __future__ import annotations

import torch

from mtp_plugin.errors import TensorContractError

INTEGERS = frozenset({torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8})


def is_integral(tensor: torch.Tensor) -> bool:
    """Whether the tensor holds whole numbers; flags are none."""
    return tensor.dtype in INTEGERS


def expect_integers(
    name: str, tensor: torch.Tensor, size: int, device: torch.device, *, at_least: bool = False
) -> None:
    """Check a vector of whole numbers, of any stride.

    Args:
        size: its length; with ``at_least`` it may be longer.

    Raises:
        TensorContractError: another shape, type or device.
    """
    shape = tensor.shape
    fits = len(shape) == 1 and (shape[0] >= size if at_least else shape[0] == size)
    if not fits or not is_integral(tensor) or tensor.device != device:
        raise TensorContractError(
            f"{name}: expected integers [{'>= ' if at_least else ''}{size}] on {device}, got "
            f"{tensor.dtype} {list(shape)} on {tensor.device}"
        )
