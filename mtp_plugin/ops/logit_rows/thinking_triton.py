"""State of the thinking budget of requests, on the device; no launch of its own.

1. `thinking_after` advances the state by one token: the number of thinking tokens (below 0: not
   thinking) and how many tokens of the end sequence the last tokens are. ``next_progress_ptr``
   [length, length] is the transition table of that progress, as of Knuth, Morris and Pratt.
2. `forced_after` replays the drafts before a row; if the budget is spent, it returns the token of
   the end sequence that must follow.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from mtp_plugin.requests.columns import request_column

BUDGET = tl.constexpr(request_column("thinking_token_budget"))
NUM_THINKING = tl.constexpr(request_column("num_thinking"))
END_PROGRESS = tl.constexpr(request_column("end_progress"))


@triton.jit
def clamp_progress(progress, length):
    """An index in the end sequence, whatever the slot holds."""
    return tl.minimum(tl.maximum(progress, 0), length - 1)


@triton.jit
def thinking_after(
    token,
    num_thinking,
    progress,
    budget,
    begin_token,
    end_token,
    end_ids,
    next_progress_ptr,
    length,
    lanes,
):
    """Thinking-token count and end-sequence progress after a token."""
    row_ptr = next_progress_ptr + clamp_progress(progress, length) * length
    next_progress = tl.load(row_ptr + lanes, mask=lanes < length, other=0)
    progress = tl.max(tl.where(end_ids == token, next_progress, 0), axis=0)
    is_thinking = num_thinking >= 0
    is_forced = is_thinking & (budget >= 0) & (num_thinking >= budget)
    is_end = (token == end_token) & (token >= 0) & (is_forced == 0)
    continues = is_thinking & (is_end == 0) & (progress != length)
    begun = tl.where((token == begin_token) & (num_thinking < 0), 0, -1)
    return tl.where(continues, num_thinking + 1, begun), tl.where(continues, progress, 0)


@triton.jit
def forced_after(
    slot_row_ptr,
    draft_ptr,
    num_drafts,
    begin_token,
    end_token,
    end_ptr,
    next_progress_ptr,
    length,
    LANES: tl.constexpr,
):
    """The forced id after ``num_drafts`` draft tokens of a request; -1: any id may follow.

    Args:
        slot_row_ptr: [W] int32.
        draft_ptr: [>= num_drafts] integer.
        end_ptr: [length] int32, the end sequence.
        next_progress_ptr: [length, length] int32.
    """
    forced = tl.full([], -1, tl.int32)
    budget = tl.load(slot_row_ptr + BUDGET)
    if budget >= 0:
        lanes = tl.arange(0, LANES)
        end_ids = tl.load(end_ptr + lanes, mask=lanes < length, other=-1)
        num_thinking = tl.load(slot_row_ptr + NUM_THINKING)
        progress = tl.load(slot_row_ptr + END_PROGRESS)
        for column in range(0, num_drafts):
            token = tl.load(draft_ptr + column)
            num_thinking, progress = thinking_after(
                token,
                num_thinking,
                progress,
                budget,
                begin_token,
                end_token,
                end_ids,
                next_progress_ptr,
                length,
                lanes,
            )
        is_forced = (num_thinking >= 0) & (num_thinking >= budget)
        forced = tl.load(end_ptr + clamp_progress(progress, length), mask=is_forced, other=-1)
    return forced
