"""The backend that gathers pages and calls torch: exact on any device, the oracle of the others."""

from __future__ import annotations

import torch
from torch.nn import functional

from mtp_plugin.executor.attention.contract import SDPA_BACKEND, HeadShape, StepMetadata


class SdpaBackend:
    """Pages of every sequence, padded to the widest block table, through
    ``scaled_dot_product_attention``."""

    name = "sdpa"
    attention_function = SDPA_BACKEND
    gathers_pages = True

    def refusal(self, heads: HeadShape, device: torch.device) -> str | None:  # noqa: ARG002
        """It serves every model on every device."""
        return None

    def write(
        self,
        layer_idx: int,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: StepMetadata,
    ) -> None:
        """As :meth:`AttentionBackend.write`; key and value may have widths of their own."""
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
        """As :meth:`AttentionBackend.attend`."""
        return attend_pages(query, *gather_pages(layer_idx, metadata), metadata, scaling)


def gather_pages(layer_idx: int, metadata: StepMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [R, Hk, S', D] and values [R, Hk, S', Dv] of every sequence, in order of position.

    S' is what the widest block table holds; rows that hold no key of the request are zero.
    """
    layout = metadata.layout()
    gathered = []
    for pool in metadata.pools.written(layer_idx):
        pages = pool[layout.read_rows]  # [R, S', heads, width]
        # a row that holds no key must not reach the product: 0 * NaN is NaN
        pages = pages.masked_fill(~layout.readable[..., None, None], 0)
        gathered.append(pages.transpose(1, 2))
    return gathered[0], gathered[1]


def attend_pages(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    metadata: StepMetadata,
    scaling: float | None = None,
) -> torch.Tensor:
    """Causal attention of query [T, Hq, D] over gathered pages, [T, Hq, Dv]."""
    layout = metadata.layout()
    key_positions = torch.arange(keys.shape[2], device=query.device)
    outputs = []
    for group in layout.groups:
        rows = slice(group.first_row, group.first_row + group.num_seqs * group.query_rows)
        seqs = slice(group.first_seq, group.first_seq + group.num_seqs)
        shape = (group.num_seqs, group.query_rows)
        # a dead row attends one zeroed or foreign-free key, so that it stays finite
        last_key = torch.where(layout.alive[rows], layout.positions[rows], 0).view(*shape, 1)
        visible = (key_positions <= last_key).unsqueeze(1)  # [B, 1, q, S']
        output = functional.scaled_dot_product_attention(
            query[rows].unflatten(0, shape).transpose(1, 2),
            keys[seqs],
            values[seqs],
            attn_mask=visible,
            scale=scaling,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))  # [B*q, Hq, Dv]
    return torch.cat(outputs)
