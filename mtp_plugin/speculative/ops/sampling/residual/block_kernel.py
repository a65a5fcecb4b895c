"""Block verification: as many drafts stand as the odds of all of them together let."""

import triton
import triton.language as tl

from mtp_plugin.speculative.ops.sampling.residual.drafts_kernel import chance_of, mass_of


@triton.jit
def next_odds(joint, p, q):
    """min(joint * p / q, 1), nothing where p is nothing."""
    weight = joint * p
    return tl.where(weight >= q, tl.where(weight > 0, 1.0, 0.0), tl.div_rn(weight, q))


@triton.jit
def matches_of_block(odds_ptr, found, noise, behind, present):
    """How many of the ``present`` drafts stand; ``behind``: the row of a generation that lies
    behind none of them."""
    matches = tl.full([], 0, tl.int32)
    for number in range(1, present + 1):
        joint = tl.load(odds_ptr + (behind + number) * 2)
        mass = mass_of(found, behind + number)
        share = tl.where(mass > 0, tl.div_rn(mass, mass + (1.0 - joint)), 0.0)
        share = tl.where(number == present, joint, share)
        matches = tl.where(chance_of(noise, number - 1) <= share, number, matches)
    return matches
