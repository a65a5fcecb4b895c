"""Which implementation of paged attention runs, chosen once, when an executor is built.

A backend is one object with two calls, :meth:`AttentionBackend.write` and
:meth:`AttentionBackend.attend`; both ways into it, transformers' modules and
:meth:`PagedAttentionMetadata.attend`, are built on them. Another one, say over torch's
``varlen_attn`` with a block table or over flashinfer's paged wrappers, needs an entry in
``BACKENDS``, its name in ``attn_backend`` of the config, and a name under which transformers knows
it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.executor.attention.sdpa import SdpaBackend
from mtp_plugin.executor.attention.types import AttentionBackend, HeadShape


def _sdpa() -> AttentionBackend:
    return SdpaBackend()


def _triton() -> AttentionBackend:
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "attn_backend: 'triton' was requested, but the package triton is not installed"
        )
    from mtp_plugin.executor.attention.triton import TritonBackend

    return TritonBackend()


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"sdpa": _sdpa, "triton": _triton}
"""Makers by name; a maker imports what it needs, and raises ConfigError where that is missing."""


def find_backend(name: str) -> AttentionBackend:
    """The backend of that name.

    Raises:
        ConfigError: an unknown name, or a backend whose package is not installed.
    """
    maker = BACKENDS.get(name)
    if maker is None:
        known = ", ".join(["auto", *sorted(BACKENDS)])
        raise ConfigError(f"attn_backend: expected one of {known}, got {name!r}")
    return maker()


def select_backend(
    name: str, heads: HeadShape, device: torch.device | str = "cpu"
) -> AttentionBackend:
    """The backend for an ``attn_backend`` option.

    Args:
        name: of a backend, or ``auto``: Triton where the device is a CUDA one, the package is there
            and the heads are supported, else sdpa.
        heads: of the model.
        device: that the model runs on.

    Raises:
        ConfigError: as :func:`find_backend`; also where the backend cannot serve the heads, or not
            on this device.
    """
    device = torch.device(device)
    if name == "auto":
        try:
            fast = find_backend("triton") if device.type == "cuda" else None
        except (ConfigError, ImportError):
            fast = None
        refused = fast is None or fast.refusal(heads, device) is not None
        return find_backend("sdpa") if fast is None or refused else fast
    backend = find_backend(name)
    reason = backend.refusal(heads, device)
    expect(reason is None, ConfigError, f"attn_backend: {name!r} cannot serve this model: {reason}")
    return backend
