"""The choice between the torch reference and the Triton kernels of an op."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any, ParamSpec, TypeVar, cast

import torch

from mtp_plugin.errors import ConfigError, format_value

P = ParamSpec("P")
R = TypeVar("R")


class Backend(Enum):
    """Which implementation of an op runs; every op takes it as an argument."""

    TORCH = "torch"
    """The torch reference: any device, and what the kernels are compared with."""
    TRITON = "triton"
    """The Triton kernels: CUDA, and the CPU in Triton's interpreter."""

    def dispatch(self, reference: Callable[P, R]) -> Callable[P, R]:
        """Return this backend's implementation of an op.

        The Triton implementation has the name and the signature of the reference with ``_triton``
        in place of ``_reference``, in a module named the same way: ``sample_reference`` of
        ``sample.py`` or ``sample_reference.py`` pairs with ``sample_triton`` of
        ``sample_triton.py``. That module is imported at its first use, since Triton is optional.

        Args:
            reference: a function whose name ends in ``_reference``.
        """
        if self is Backend.TORCH:
            return reference
        return cast("Callable[P, R]", _triton_implementation(reference))

    @classmethod
    def of(
        cls,
        kernels: Backend | str,
        device: torch.device | str | None = None,
        name: str = "kernels",
    ) -> Backend:
        """Return the backend of a ``kernels`` option, or of the argument ``backend`` of an op.

        Args:
            kernels: ``triton``, ``torch`` (or ``reference``), or ``auto``: Triton where the device
                is a CUDA one and triton is installed, else torch. A backend is returned as it is.
            device: that the ops run on; None: CUDA where present.
            name: of the option, for messages.

        Raises:
            ConfigError: an unknown name, or ``triton`` without the package or without a device.
        """
        if isinstance(kernels, Backend):
            return kernels
        if kernels in ("torch", "reference"):
            return cls.TORCH
        is_installed = _is_triton_installed()
        if kernels == "auto":
            on_cuda = (
                torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
            )
            return cls.TRITON if on_cuda and is_installed else cls.TORCH
        if kernels != "triton":
            raise ConfigError(
                f"{name}: expected auto, torch, triton or reference, got {format_value(kernels)}"
            )
        if not is_installed:
            raise ConfigError(
                f"{name}: 'triton' was requested, but the package triton is not installed"
            )
        on_cpu = device is not None and torch.device(device).type == "cpu"
        if on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError(
                f"{name}: 'triton' needs a CUDA device (a CPU runs kernels only with "
                f"TRITON_INTERPRET=1), got {device}"
            )
        return cls.TRITON


@cache
def _is_triton_installed() -> bool:
    """Ops look it up in every step; `find_spec` searches folders."""
    return importlib.util.find_spec("triton") is not None


@cache
def _triton_implementation(reference: Callable[..., Any]) -> Callable[..., Any]:
    module = importlib.import_module(reference.__module__.removesuffix("_reference") + "_triton")
    implementation: Callable[..., Any] = getattr(
        module, reference.__name__.removesuffix("_reference") + "_triton"
    )
    return implementation
