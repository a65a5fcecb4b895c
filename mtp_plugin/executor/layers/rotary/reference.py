"""The rotary embedding in torch, in the words of transformers."""

from __future__ import annotations

import torch

from mtp_plugin.executor.layers.norm.reference import rms_norm
from mtp_plugin.executor.layers.rotary.contract import Angles, HeadLayout, HeadNorms, check_rotation


def rotate(
    qkv: torch.Tensor, layout: HeadLayout, angles: Angles, norms: HeadNorms | None = None
) -> None:
    """Norm and rotate queries and keys in place; values stay as they are.

    Args:
        qkv: [T, (Hq + 2 * Hk) * D].
        layout: of a row.
        angles: number j of a head turns with number j + ``num_angles``.
        norms: None where the model does not norm heads.

    Raises:
        TensorContractError: rows or angles that do not fit.
    """
    num_rows = check_rotation(qkv, layout, angles)
    queries, keys, _ = layout.split(qkv)
    if norms is not None:
        queries.copy_(rms_norm(queries, norms.q_weight, norms.q_eps))
        keys.copy_(rms_norm(keys, norms.k_weight, norms.k_eps))
    n = angles.num_angles
    place = torch.arange(num_rows, device=qkv.device)
    if angles.index is not None:
        place = angles.index.clamp(0, angles.cos.shape[0] - 1)
    cos, sin = (table[place, None, :n] for table in (angles.cos, angles.sin))
    for heads in (queries, keys):
        first, second = heads[..., :n].clone(), heads[..., n : 2 * n].clone()
        heads[..., :n] = first * cos + -second * sin
        heads[..., n : 2 * n] = second * cos + first * sin
