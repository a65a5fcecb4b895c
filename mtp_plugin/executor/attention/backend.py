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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.executor.attention.sdpa import SdpaBackend

if TYPE_CHECKING:
    from mtp_plugin.executor.attention.metadata import PagedAttentionMetadata


@dataclass(frozen=True)
class HeadShape:
    """Heads of a model as its cache and its attention see them."""

    num_query_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    latent: bool = False
    """The cache holds latents, which modules expand to keys and values themselves."""

    @classmethod
    def of(cls, config: Any) -> HeadShape:
        """Heads that a transformers config of a decoder describes."""
        heads = int(config.num_attention_heads)
        latent = getattr(config, "kv_lora_rank", None)
        if latent:
            return cls(heads, 1, int(latent), int(config.qk_rope_head_dim), latent=True)
        width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        return cls(heads, kv_heads, width, width)


class AttentionBackend(Protocol):
    """Causal attention of every sequence of a step over its own pages."""

    @property
    def name(self) -> str:
        """Value of ``attn_backend`` in the config."""
        ...

    @property
    def attention_function(self) -> str:
        """Name under which transformers' modules find it."""
        ...

    @property
    def gathers_pages(self) -> bool:
        """Modules of transformers get every sequence's pages behind their write, as latent
        attention needs them; otherwise pages are read where they lie."""
        ...

    def refusal(self, heads: HeadShape, device: torch.device) -> str | None:
        """Why it cannot serve a model with these heads on this device; None: it can."""
        ...

    def write(
        self,
        layer_idx: int,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: PagedAttentionMetadata,
    ) -> None:
        """Put the step's rows into the layer's pools; dead rows go to the sentinel block.

        Args:
            layer_idx: the layer's place in the pools.
            key, value: [T, Hk, D] and [T, Hk, Dv], any strides in front of contiguous widths.
            metadata: lengths, limits and block table of the step.
        """
        ...

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        metadata: PagedAttentionMetadata,
        scaling: float | None = None,
    ) -> torch.Tensor:
        """Each row over the keys of its sequence up to its own position, which are written.

        Args:
            query: [T, Hq, D], any strides in front of a contiguous width; Hq is a multiple of Hk,
                and neighbouring heads share a key head.
            scaling: factor of the scores; None: ``D ** -0.5``.

        Returns:
            [T, Hq, Dv] in the type of ``query``; rows that are dead are finite, and mean nothing.
        """
        ...


def _sdpa() -> AttentionBackend:
    return SdpaBackend()


def _triton() -> AttentionBackend:
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "attn_backend: 'triton' was asked for, but the package triton is not installed"
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
