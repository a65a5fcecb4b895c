"""The rotary embedding in torch: the CPU path and the oracle of the kernel."""

from __future__ import annotations

import torch

from mtp_plugin.executor.layers.norm.reference import rms_norm
from mtp_plugin.executor.layers.rotary.contract import Angles, HeadLayout, HeadNorms


def rotate(qkv: torch.Tensor, layout: HeadLayout, angles: Angles, norms: HeadNorms | None) -> None:
    """As at the door."""
    queries, keys, _ = layout.split(qkv)
    if norms is not None:
        queries.copy_(rms_norm(queries, norms.q_weight, norms.q_eps))
        keys.copy_(rms_norm(keys, norms.k_weight, norms.k_eps))
    n = angles.num_angles
    place = torch.arange(qkv.shape[0], device=qkv.device)
    if angles.index is not None:
        place = angles.index.clamp(0, angles.cos.shape[0] - 1)
    cos, sin = (table[place, None, :n] for table in (angles.cos, angles.sin))
    for heads in (queries, keys):
        first, second = heads[..., :n].clone(), heads[..., n : 2 * n].clone()
        heads[..., :n] = first * cos + -second * sin
        heads[..., n : 2 * n] = second * cos + first * sin
