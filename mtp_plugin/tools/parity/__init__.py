"""Compare the executor's output with non-speculative decoding, except for rounding ties."""

from __future__ import annotations

from mtp_plugin.tools.parity.compare import (
    Comparison,
    Divergence,
    compare_forced,
    compare_with_continuations,
    first_difference,
    measure_gap,
)
from mtp_plugin.tools.parity.logprobs import LogprobComparison, LogprobMismatch, compare_logprobs
from mtp_plugin.tools.parity.oracle import Oracle, transformers_attention
from mtp_plugin.tools.parity.sampled_gap import gap_of_sampled_token
from mtp_plugin.tools.parity.speculation import Drafting, speculate
from mtp_plugin.tools.parity.ties import TIE_ULPS, TieRule, ulp

__all__ = [
    "TIE_ULPS",
    "Comparison",
    "Divergence",
    "Drafting",
    "LogprobComparison",
    "LogprobMismatch",
    "Oracle",
    "TieRule",
    "compare_forced",
    "compare_logprobs",
    "compare_with_continuations",
    "first_difference",
    "gap_of_sampled_token",
    "measure_gap",
    "speculate",
    "transformers_attention",
    "ulp",
]
