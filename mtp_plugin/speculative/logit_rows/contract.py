"""Which rows of logits are read, and for which tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import Self

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.checks import expect_integers, is_integral
from mtp_plugin.speculative.step import StepLayout


@dataclass(frozen=True)
class DrawnRows:
    """Rows of logits, and the absolute index of the token that each one draws.

    Contexts have a row each, then generations ``width`` rows each. Row i of request r draws the
    token of index ``positions[r] + ahead[r] + column + 1 + i``: the one behind its position, for
    drafts so many further on. In front of it stand ``column + i`` drafts of the request.
    """

    num_contexts: int  # C
    width: int  # rows of a generation
    positions: torch.Tensor  # [R] integer, any stride: of each request's first row
    ahead: torch.Tensor | None = None  # [R] integer, any stride; None: 0
    column: int = 0
    drafts: torch.Tensor | None = None
    """[R - C, >= column + width - 1] integer, rows without gaps: what stands in front, once the
    tokens that slots know of have ended; None: nobody's penalties or words are to see it."""

    @classmethod
    def of_target(cls, layout: StepLayout, draft_tokens: torch.Tensor | None = None) -> Self:
        """The rows that judge drafts, [G*K] or [G, K] integer, any strides.

        Raises:
            TensorContractError: a layout without positions, or another number of drafts.
        """
        drafts = None
        if draft_tokens is not None and layout.draft_len > 0:
            generations, drafted = layout.num_generations, layout.draft_len
            if draft_tokens.numel() != generations * drafted:
                raise TensorContractError(
                    f"draft_tokens: expected G*K = {generations * drafted} integer ids, got "
                    f"{draft_tokens.numel()}: {list(draft_tokens.shape)}"
                )
            drafts = draft_tokens.reshape(-1).contiguous().view(generations, drafted)
        positions = layout.drawn_positions("sampling")
        return cls(layout.num_contexts, layout.step_rows, positions, drafts=drafts)

    @classmethod
    def of_drafts(
        cls,
        layout: StepLayout,
        num_accepted: torch.Tensor,
        column: int,
        drafts: torch.Tensor | None = None,
    ) -> Self:
        """A row per request, which proposes draft ``column`` behind what was accepted [R], and
        behind those of ``drafts`` [R, K] in front of it.

        Raises:
            TensorContractError: a layout without positions.
        """
        return cls(0, 1, layout.drawn_positions("sampling"), num_accepted, column, drafts)

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
        drafts = self.drafts
        if drafts is None:
            return
        generations, least = requests - self.num_contexts, self.column + self.width - 1
        if not (
            drafts.dim() == 2
            and drafts.shape[0] == generations
            and drafts.shape[1] >= least
            and is_integral(drafts)
            and (drafts.shape[1] < 2 or drafts.numel() == 0 or drafts.stride(1) == 1)
            and drafts.device == device
        ):
            raise TensorContractError(
                f"drawn rows, drafts: expected integers [{generations}, >= {least}] with rows "
                f"without gaps on {device}, got {drafts.dtype} {list(drafts.shape)} with strides "
                f"{list(drafts.stride())} on {drafts.device}"
            )

    def check_logits(self, logits: torch.Tensor) -> None:
        """Check these rows' logits [N, V], and the tensors.

        Raises:
            TensorContractError: another shape or type, or gaps in a row.
        """
        if logits.dim() != 2 or not logits.is_floating_point() or logits.shape[1] == 0:
            raise TensorContractError(
                f"logits: expected a floating [rows, V] tensor with V >= 1, got {logits.dtype} "
                f"{list(logits.shape)}"
            )
        self.check(logits.device)
        if logits.shape[0] != self.num_rows:
            raise TensorContractError(
                f"logits: expected {self.num_rows} rows, got {logits.shape[0]}"
            )
        if logits.shape[0] and logits.stride(1) != 1:
            raise TensorContractError(
                f"logits: expected contiguous rows, got strides {list(logits.stride())}"
            )

    def owners(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of every row its request, the absolute index of the token that it draws, and how many
        drafts stand in front, all [N] int64."""
        contexts, device = self.num_contexts, self.positions.device
        requests = torch.arange(self.num_requests, device=device)
        owners = torch.cat([requests[:contexts], requests[contexts:].repeat_interleave(self.width)])
        place = torch.arange(self.num_rows, device=device) - contexts
        offsets = torch.where(place < 0, 0, place % self.width) + self.column
        first = self.positions.to(torch.int64) + 1
        if self.ahead is not None:
            first = first + self.ahead
        return owners, first[owners] + offsets, offsets
