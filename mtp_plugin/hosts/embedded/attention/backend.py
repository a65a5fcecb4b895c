"""Selects the paged-attention backend when an executor is built.

A backend has two methods, :meth:`AttentionBackend.write` and :meth:`AttentionBackend.attend`, which
transformers' modules and :meth:`PagedAttentionMetadata.attend` both use. To add one, for example
torch's ``varlen_attn`` with a block table or flashinfer's paged wrappers, add an entry in
``BACKENDS``, its name in ``attn_backend`` of the config, and the name under which it is registered
with transformers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.hosts.embedded.attention.sdpa import SdpaBackend
from mtp_plugin.hosts.embedded.attention.types import AttentionBackend, HeadShape


def _sdpa() -> AttentionBackend:
    return SdpaBackend()


def _triton() -> AttentionBackend:
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "attn_backend: 'triton' was requested, but the package triton is not installed"
        )
    from mtp_plugin.hosts.embedded.attention.triton import TritonBackend

    return TritonBackend()


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"sdpa": _sdpa, "triton": _triton}
"""Factories by name; a factory imports its packages and raises ConfigError if one is missing."""


def find_backend(name: str) -> AttentionBackend:
    """Return the backend of that name.

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
    """Return the backend for an ``attn_backend`` option.

    Args:
        name: name of a backend, or ``auto``: Triton on a CUDA device if the package is installed
            and the heads are supported, else sdpa.
        heads: attention heads of the model.
        device: device of the model.

    Raises:
        ConfigError: see :func:`find_backend`; or the backend does not support the heads or device.
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
