"""Checks of tensors that ops share."""

from __future__ import annotations

import torch

from mtp_plugin.errors import TensorContractError


def expect_output(
    name: str,
    tensor: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Check a tensor that was handed in to be written.

    Raises:
        TensorContractError: another shape, type or device, or gaps between the elements.
    """
    if tensor is None:
        came = "None"
    elif (
        tensor.shape == shape
        and tensor.dtype == dtype
        and tensor.device == device
        and tensor.is_contiguous()
    ):
        return
    else:
        came = (
            f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on "
            f"{tensor.device}"
        )
    raise TensorContractError(
        f"{name}: expected contiguous {dtype} {list(shape)} on {device} to write to, got {came}"
    )
