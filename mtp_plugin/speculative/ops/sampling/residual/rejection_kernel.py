"""Rejection: a draft stands by its own odds, and falls with the first that does not."""

import triton
import triton.language as tl


@triton.jit
def stands_alone(chance, p, q):
    """Whether a draft stands, which it does with the chance p / q; ``chance`` is uniform."""
    return chance * q < p


@triton.jit
def matches_alone(stands):
    """How many drafts stand; ``stands`` behind 0, 1, ... of them: above 0 while all do."""
    return tl.sum((stands > 0).to(tl.int32), axis=0) - 1
