"""Attention of one sequence on a GPU, without a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


class Causal:
    """Attention of one sequence's rows among each other, for both ways of calling it."""

    def __init__(self, rows: int) -> None:
        self._seq_lens_cuda = torch.tensor([rows], device="cuda")
        self.mask = torch.ones(rows, rows, dtype=torch.bool, device="cuda").tril()[None, None]

    def model_kwargs(self) -> dict[str, Any]:
        return {"past_key_values": None, "attention_mask": self.mask, "use_cache": False}

    def attend(
        self, _: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        q, k, v = (heads.transpose(0, 1)[None] for heads in (q, k, v))
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask, scale=scaling, enable_gqa=True
        )
        return out[0].transpose(0, 1)
