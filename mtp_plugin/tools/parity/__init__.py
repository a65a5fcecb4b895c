"""Compare the executor's output with non-speculative decoding, except for rounding ties."""

from __future__ import annotations

from mtp_plugin.tools.parity.compare import (
    TIE_ULPS,
    Comparison,
    Divergence,
    TieRule,
    compare_with_continuations,
    measure_gap,
    ulp,
)
from mtp_plugin.tools.parity.logprobs import LogprobComparison, LogprobMismatch, compare_logprobs
from mtp_plugin.tools.parity.reference import Drafting, Oracle, transformers_attention
from mtp_plugin.tools.parity.sampled_gap import gap_of_sampled_token

__all__ = [
    "TIE_ULPS",
    "Comparison",
    "Divergence",
    "Drafting",
    "LogprobComparison",
    "LogprobMismatch",
    "Oracle",
    "TieRule",
    "compare_logprobs",
    "compare_with_continuations",
    "gap_of_sampled_token",
    "measure_gap",
    "transformers_attention",
    "ulp",
]
