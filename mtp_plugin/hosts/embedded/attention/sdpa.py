"""The backend that gathers pages and calls torch: exact on any device, the oracle of the others."""

from __future__ import annotations

import torch
from torch.nn import functional

from mtp_plugin.hosts.embedded.attention.types import SDPA_BACKEND, HeadShape, Layout, StepMetadata


class SdpaBackend:
    """Gathers the pages of every sequence, padded to the widest block table, and calls
    ``scaled_dot_product_attention``."""

    name = "sdpa"
    attention_function = SDPA_BACKEND
    gathers_pages = True
    reads_lengths_on_device = False

    def refusal(self, heads: HeadShape, device: torch.device) -> str | None:  # noqa: ARG002
        """Return None: every model is supported on every device."""
        return None

    def write(
        self,
        layer_idx: int,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: StepMetadata,
    ) -> None:
        """See :meth:`AttentionBackend.write`; key and value may differ in width."""
        layout = metadata.layout()
        for pool, rows in zip(
            metadata.pools.layer(layer_idx, key, value), (key, value), strict=True
        ):
            pool.index_copy_(0, layout.write_rows, rows)

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        metadata: StepMetadata,
        scaling: float | None = None,
    ) -> torch.Tensor:
        """See :meth:`AttentionBackend.attend`."""
        return attend_pages(query, *gather_pages(layer_idx, metadata), metadata, scaling)


def gather_pages(layer_idx: int, metadata: StepMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys [R, Hk, S', D] and values [R, Hk, S', Dv] of every sequence, by position.

    S' is the capacity of the widest block table; rows without a key of the request are zero. The
    results are transposed views of contiguous rows [R, S', heads, width].
    """
    layout = metadata.layout()
    keys, values = metadata.pools.written(layer_idx)
    return _gather(keys, layout).transpose(1, 2), _gather(values, layout).transpose(1, 2)


def _gather(pool: torch.Tensor, layout: Layout) -> torch.Tensor:
    """[R, S', heads, width]."""
    rows = pool.index_select(0, layout.flat_read_rows)
    pages = rows.view(*layout.read_rows.shape, *pool.shape[1:])
    # a row that holds no key must not reach the product: 0 * NaN is NaN
    if pool.device.type == "cpu":
        rows.index_fill_(0, layout.unreadable_rows, 0)
    else:
        pages.masked_fill_(layout.unreadable, 0)
    return pages


def attend_pages(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    metadata: StepMetadata,
    scaling: float | None = None,
) -> torch.Tensor:
    """Compute causal attention of query [T, Hq, D] over gathered pages: [T, Hq, Dv]."""
    layout = metadata.layout()
    outputs = []
    for group, visible in zip(layout.groups, layout.visible, strict=True):
        output = functional.scaled_dot_product_attention(
            query[group.rows].unflatten(0, (group.num_seqs, group.query_rows)).transpose(1, 2),
            keys[group.seqs],
            values[group.seqs],
            attn_mask=visible,
            scale=scaling,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))  # [B*q, Hq, Dv]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
