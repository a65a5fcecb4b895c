"""Connects transformers' modules to paged attention: a cache and registered functions."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from mtp_plugin.errors import ExecutorError
from mtp_plugin.hosts.embedded.attention.sdpa import attend_pages, gather_pages
from mtp_plugin.hosts.embedded.attention.types import (
    SDPA_BACKEND,
    TRITON_BACKEND,
    AttentionBackend,
    StepMetadata,
)


class BackedMetadata(StepMetadata, Protocol):
    """A step's metadata that names its backend."""

    @property
    def backend(self) -> AttentionBackend:
        """The backend that writes and attends."""
        ...


class PagedCache:
    """The cache object that transformers' attention modules update."""

    is_compileable = False

    def __init__(self, metadata: BackedMetadata) -> None:
        self._metadata = metadata

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Unused: positions are passed explicitly."""
        return 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this step's rows, key and value [1, heads, T, width].

        Returns:
            The rows of all sequences [1, heads, R*S', width] if the backend gathers pages; else the
            arguments, which are not read.
        """
        metadata = self._metadata
        rows = key[0].transpose(0, 1), value[0].transpose(0, 1)
        metadata.backend.write(layer_idx, *rows, metadata)
        if not metadata.backend.gathers_pages:
            return key, value
        keys, values = gather_pages(layer_idx, metadata)
        return _flat(keys), _flat(values)


def _flat(pages: torch.Tensor) -> torch.Tensor:
    """[R, heads, S', width] -> [1, heads, R*S', width], of the memory that `gather_pages` gave."""
    return pages.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0)


def _paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - transformers' signature
    *,
    attn_metadata: BackedMetadata | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention of every sequence over its own pages.

    query [1, Hq, T, D]; key, value [1, Hk, R*S', D] if pages are gathered: sequences in order, S'
    positions each. The metadata's backend attends, whichever registered name the modules use,
    because a model may be shared.

    Raises:
        ExecutorError: called without metadata: other code runs a model that an executor uses.
    """
    if attn_metadata is None:
        raise ExecutorError(
            "this model attends by pages, for an LLM: shut it down first, or choose the attention "
            "with set_attn_implementation('sdpa')"
        )
    rows = query[0].transpose(0, 1)
    backend = attn_metadata.backend
    if backend.gathers_pages:
        shape = (attn_metadata.num_seqs, -1)
        keys = key[0].unflatten(1, shape).transpose(0, 1)  # [R, Hk, S', D]
        values = value[0].unflatten(1, shape).transpose(0, 1)
        return attend_pages(rows, keys, values, attn_metadata, scaling).unsqueeze(0), None
    return backend.attend(module.layer_idx, rows, attn_metadata, scaling).unsqueeze(0), None


AttentionInterface.register(SDPA_BACKEND, _paged_attention)
AttentionInterface.register(TRITON_BACKEND, _paged_attention)
