"""Stop ids that come too early, told over lists."""

from __future__ import annotations

import math


def without_early_stops(
    row: list[float], token_index: int, first_index: int, stop_ids: list[int]
) -> list[float]:
    """A row that draws token `token_index`; stop ids may stand from `first_index` on."""
    early = token_index < first_index
    return [-math.inf if early and token in stop_ids else v for token, v in enumerate(row)]
