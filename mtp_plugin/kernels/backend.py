"""The one choice between torch and Triton, made when pieces are built."""

from __future__ import annotations

import importlib.util
import os
from enum import Enum

import torch

from mtp_plugin.errors import ConfigError


class Backend(Enum):
    """The side of an op that runs; every op takes it at its door."""

    TORCH = "torch"
    """Any device; the oracle of the kernels."""
    TRITON = "triton"
    """CUDA, and the CPU in Triton's interpreter."""

    @classmethod
    def of(cls, kernels: str, device: torch.device | str | None = None) -> Backend:
        """The backend that a ``kernels`` option asks for.

        Args:
            kernels: ``triton``, ``reference`` (torch), or ``auto``: Triton where the device is a
                CUDA one and triton is installed, else torch.
            device: that the ops run on; None: CUDA where present.

        Raises:
            ConfigError: an unknown name, or ``triton`` without the package or without a device.
        """
        if kernels == "reference":
            return cls.TORCH
        is_installed = importlib.util.find_spec("triton") is not None
        if kernels == "auto":
            on_cuda = (
                torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
            )
            return cls.TRITON if on_cuda and is_installed else cls.TORCH
        if kernels != "triton":
            raise ConfigError(f"kernels: expected auto, triton or reference, got {kernels!r}")
        if not is_installed:
            raise ConfigError(
                "kernels: 'triton' was asked for, but the package triton is not installed"
            )
        on_cpu = device is not None and torch.device(device).type == "cpu"
        if on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError(
                "kernels: 'triton' needs a CUDA device (a CPU runs them only with "
                f"TRITON_INTERPRET=1), got {device}"
            )
        return cls.TRITON
