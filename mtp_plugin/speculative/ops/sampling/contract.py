"""Which rows are drawn from, and for which tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from typing_extensions import Self

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.checks import expect_integers
from mtp_plugin.speculative.step import StepLayout


class Role(IntEnum):
    """What a draw is for; draws of different roles are independent."""

    TARGET = 0  # and the drafts that are coupled to it
    PLAIN_DRAFT = 1


@dataclass(frozen=True)
class DrawnRows:
    """Rows of logits, and the absolute index of the token that each one draws.

    Contexts have a row each, then generations ``width`` rows each. Row i of request r draws the
    token of index ``positions[r] + ahead[r] + column + 1 + i``: the one behind its position, for
    drafts so many further on.
    """

    num_contexts: int  # C
    width: int  # rows of a generation
    positions: torch.Tensor  # [R] integer, any stride: of each request's first row
    ahead: torch.Tensor | None = None  # [R] integer, any stride; None: 0
    column: int = 0

    @classmethod
    def of_target(cls, layout: StepLayout) -> Self:
        """The rows that judge drafts.

        Raises:
            TensorContractError: a layout without positions.
        """
        return cls(layout.num_contexts, layout.step_rows, layout.drawn_positions("sampling"))

    @classmethod
    def of_drafts(cls, layout: StepLayout, num_accepted: torch.Tensor, column: int) -> Self:
        """A row per request, which proposes draft ``column`` behind what was accepted [R].

        Raises:
            TensorContractError: a layout without positions.
        """
        return cls(0, 1, layout.drawn_positions("sampling"), num_accepted, column)

    @property
    def num_requests(self) -> int:
        """R."""
        return int(self.positions.shape[0])

    @property
    def num_rows(self) -> int:
        """N."""
        return self.num_contexts + (self.num_requests - self.num_contexts) * self.width

    def check(self, device: torch.device) -> None:
        """Check the tensors.

        Raises:
            TensorContractError: another shape, type or device.
        """
        requests = self.num_requests
        if not 0 <= self.num_contexts <= requests or self.width < 1 or self.column < 0:
            raise TensorContractError(
                f"drawn rows: expected 0 to {requests} contexts, a width of 1 or more and a column "
                f"of 0 or more, got {self.num_contexts}, {self.width} and {self.column}"
            )
        expect_integers("drawn rows, positions", self.positions, requests, device)
        if self.ahead is not None:
            expect_integers("drawn rows, ahead", self.ahead, requests, device)
