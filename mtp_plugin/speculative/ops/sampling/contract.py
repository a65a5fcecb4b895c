"""What a draw is for, and what slots say of the drafts of a request."""

from __future__ import annotations

from enum import IntEnum

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.requests.columns import SlotColumn
from mtp_plugin.verifications import codes


class Role(IntEnum):
    """What a draw is for; draws of different roles are independent."""

    TARGET = 0  # and the drafts that are coupled to it
    PLAIN_DRAFT = 1
    ACCEPTANCE = 2  # a uniform number that tests a draft, the one of token id 0
    RESIDUAL = 3  # the token behind the drafts that stand


_CODES = codes()


class JudgedBy(IntEnum):
    """Column ``verification``: what judges the drafts of a request that draws, as far as ops here
    do; others have other codes."""

    COUPLED = _CODES["coupled"]
    REJECTION = _CODES["rejection"]
    BLOCK = _CODES["block"]


class DraftedBy(IntEnum):
    """Column ``draft_sampling``: how the drafts of a request that draws are drawn."""

    COUPLED = 0
    PLAIN = 1
    GREEDY = 2


CHOICE_COLUMNS = (SlotColumn("verification", int), SlotColumn("draft_sampling", int))
"""As `JudgedBy` and `DraftedBy` say."""
STEP_COLUMN = SlotColumn("draft_step", int)
"""Steps of a request on the device, which noise of block verification is counted by."""

NUM_CUTS = 4
"""Numbers that tell what options leave of a row: its highest value, of what stays the deepest
depth, the last column there, and the mass of all that stays, as multiples of the highest.

The depth of x is (highest - x) / T. A row that is not drawn from has one column left, of depth
0. Kernels may leave out what lies deeper than 7.4e8, whose probability is 0 either way."""


def check_cuts(cuts: torch.Tensor, num_rows: int, device: torch.device) -> None:
    """Check what is left of rows.

    Raises:
        TensorContractError: not float32 [N, NUM_CUTS] without gaps on ``device``.
    """
    if not (
        cuts.shape == (num_rows, NUM_CUTS)
        and cuts.dtype == torch.float32
        and cuts.is_contiguous()
        and cuts.device == device
    ):
        raise TensorContractError(
            f"cuts: expected torch.float32 [{num_rows}, {NUM_CUTS}] without gaps on {device}, got "
            f"{cuts.dtype} {list(cuts.shape)} with strides {list(cuts.stride())} on {cuts.device}"
        )
