"""Attention over the paged cache: the step's metadata, and the backends that read it.

One operation, ``metadata.attend(layer_idx, query, key, value, scaling)``: write the step's rows,
then attend. Transformers' modules reach the same two calls through ``metadata.model_kwargs()``.
"""

from mtp_plugin.hosts.embedded.attention.backend import find_backend, select_backend
from mtp_plugin.hosts.embedded.attention.lease import AttentionLease
from mtp_plugin.hosts.embedded.attention.metadata import PagedAttentionMetadata
from mtp_plugin.hosts.embedded.attention.types import (
    SDPA_BACKEND,
    TRITON_BACKEND,
    AttentionBackend,
    HeadShape,
)

__all__ = [
    "SDPA_BACKEND",
    "TRITON_BACKEND",
    "AttentionBackend",
    "AttentionLease",
    "HeadShape",
    "PagedAttentionMetadata",
    "find_backend",
    "select_backend",
]
