"""Rows of logits: their requests and token indices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import Self

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.checks import FLOATS, INTEGERS, SIGNED, AtLeast, expect_tensor
from mtp_plugin.ops.step import StepLayout


@dataclass(frozen=True)
class LogitRows:
    """Rows of logits, and the absolute index of the token that each row samples.

    Contexts have one row each, then generations ``width`` rows each. Row i of request r samples the
    token at index ``positions[r] + ahead[r] + column + 1 + i``, after ``column + i`` draft tokens
    of the request.
    """

    num_contexts: int  # C
    width: int  # rows per generation
    positions: torch.Tensor  # [R] integer, any stride: position of each request's first row
    ahead: torch.Tensor | None = None  # [R] integer, any stride; None: 0
    column: int = 0
    drafts: torch.Tensor | None = None
    """[R - C, >= column + width - 1] signed integer, contiguous rows: the draft tokens after the
    recent tokens of the slots; None: penalties and bad words do not see draft tokens."""

    @classmethod
    def flat(cls, positions: torch.Tensor, column: int = 0) -> Self:
        """Rows that are one request each, so that they may be in any order.

        Args:
            positions: [N] integer: position of each row's token. column: as above.
        """
        return cls(0, 1, positions, column=column)

    @classmethod
    def of_target(cls, layout: StepLayout, draft_tokens: torch.Tensor | None = None) -> Self:
        """The rows that verify draft tokens, [G*K] or [G, K] integer, any strides.

        Raises:
            TensorContractError: a layout without positions, or another number of draft tokens.
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
        positions = layout.first_logit_positions("sampling")
        return cls(layout.num_contexts, layout.step_rows, positions, drafts=drafts)

    @classmethod
    def of_drafts(
        cls,
        layout: StepLayout,
        num_accepted: torch.Tensor,
        column: int,
        drafts: torch.Tensor | None = None,
    ) -> Self:
        """One row per request: it proposes draft ``column``, after ``num_accepted`` [R] tokens and
        the first ``column`` of ``drafts`` [R, K].

        Raises:
            TensorContractError: a layout without positions.
        """
        return cls(0, 1, layout.first_logit_positions("sampling"), num_accepted, column, drafts)

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
            TensorContractError: another shape, dtype or device.
        """
        expect_tensor(
            "logit rows, positions", self.positions, dtype=INTEGERS, shape=("R",), device=device
        )
        requests = self.num_requests
        if not 0 <= self.num_contexts <= requests or self.width < 1 or self.column < 0:
            raise TensorContractError(
                f"logit rows: expected 0 to {requests} contexts, a width of 1 or more and a column "
                f"of 0 or more, got {self.num_contexts}, {self.width} and {self.column}"
            )
        if self.ahead is not None:
            expect_tensor(
                "logit rows, ahead", self.ahead, dtype=INTEGERS, shape=(requests,), device=device
            )
        if self.drafts is not None:
            least = self.column + self.width - 1
            is_empty = isinstance(self.drafts, torch.Tensor) and not self.drafts.numel()
            expect_tensor(
                "logit rows, drafts",
                self.drafts,
                dtype=SIGNED,
                shape=(requests - self.num_contexts, AtLeast(least)),
                device=device,
                contiguous=False if is_empty else "rows",
            )

    def check_logits(self, logits: torch.Tensor) -> None:
        """Check the logits [N, V] of these rows, and the tensors.

        Raises:
            TensorContractError: another shape or dtype, or rows that are not contiguous.
        """
        expect_tensor("logits", logits, dtype=FLOATS, shape=("rows", AtLeast(1)))
        self.check(logits.device)
        expect_tensor(
            "logits",
            logits,
            shape=(self.num_rows, "V"),
            contiguous="rows" if logits.shape[0] else False,
        )

    def owners(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For every row its request, the absolute index of the token that it samples, and the
        number of draft tokens before it, all [N] int64."""
        contexts, device = self.num_contexts, self.positions.device
        requests = torch.arange(self.num_requests, device=device)
        owners = torch.cat([requests[:contexts], requests[contexts:].repeat_interleave(self.width)])
        generation_row = torch.arange(self.num_rows, device=device) - contexts
        offsets = torch.where(generation_row < 0, 0, generation_row % self.width) + self.column
        first = self.positions.to(torch.int64) + 1
        if self.ahead is not None:
            first = first + self.ahead
        return owners, first[owners] + offsets, offsets
