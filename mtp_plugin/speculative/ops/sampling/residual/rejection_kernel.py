"""Rejection: a draft stands by its own odds, and falls with the first that does not."""

import triton
import triton.language as tl

from mtp_plugin.speculative.ops.sampling.contract import JudgedBy

JUDGED_BY_REJECTION = tl.constexpr(int(JudgedBy.REJECTION))


@triton.jit
def stands_alone(test, p, q):
    """Whether a draft stands with the chance p / q, ``test`` being uniform."""
    return test * q < p


@triton.jit
def matches_alone(stands):
    """How many drafts stand; ``stands`` behind 0, 1, ... of them: above 0 while all do."""
    return tl.sum((stands > 0).to(tl.int32), axis=0) - 1
