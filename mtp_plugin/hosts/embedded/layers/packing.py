"""Concatenates weights that are read together; the modules keep views of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Packer:
    """Concatenates parameters and points each of them into the result.

    Nothing is stored twice: a parameter gives up its own storage. Parameters that modules share
    stay shared, since the same parts are packed once.
    """

    def __init__(self) -> None:
        self._packed: dict[tuple[int, ...], tuple[tuple[torch.Tensor, ...], torch.Tensor]] = {}

    def pack(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Parameters as rows of one tensor [rows, width]; vectors as one vector.

        Args:
            parts: of equal width, that is, last dimension; every other dimension counts as rows.
        """
        key = tuple(id(part) for part in parts)
        if key not in self._packed:
            self._packed[key] = (tuple(parts), self._lay(parts))
        return self._packed[key][1]

    @staticmethod
    @torch.no_grad()
    def _lay(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        packed = torch.cat([_rows_of(part) for part in parts])
        start = 0
        for part in parts:
            rows = len(_rows_of(part))
            part.data = packed[start : start + rows].view(part.shape)
            start += rows
        return packed


def _rows_of(part: torch.Tensor) -> torch.Tensor:
    return part.detach().flatten(end_dim=-2) if part.dim() > 1 else part.detach()
