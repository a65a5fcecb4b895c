"""What judging by odds gives, and the pool that it reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_plugin.errors import TensorContractError


@dataclass(frozen=True)
class Judgement:
    """How far the drafts of every generation stand, and what its target says behind them."""

    matches: torch.Tensor
    """[G] int32: so many leading drafts stand; -1 of a generation that is judged otherwise."""
    choices: torch.Tensor
    """[rows] int32: as given, but behind the drafts that stand the token that was drawn there."""


def check_draft_probs(pool: torch.Tensor, draft_len: int, device: torch.device) -> None:
    """Check the distributions that drafts were drawn from.

    Raises:
        TensorContractError: not float32 [S, >= K, V] without gaps on ``device``.
    """
    if not (
        pool.dim() == 3
        and pool.dtype == torch.float32
        and pool.shape[1] >= draft_len
        and pool.is_contiguous()
        and pool.device == device
    ):
        raise TensorContractError(
            f"draft_probs: expected torch.float32 [S, >= {draft_len}, V] without gaps on {device}, "
            f"got {pool.dtype} {list(pool.shape)} with strides {list(pool.stride())} on "
            f"{pool.device}"
        )
