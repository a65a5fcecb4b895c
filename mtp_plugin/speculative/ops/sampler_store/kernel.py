"""Device code of the result store."""

import triton
import triton.language as tl


# types and constants alone decide which binary runs, see CachedLaunches
@triton.jit(
    do_not_specialize=[
        "store_stride",
        "emitted_row_stride",
        "emitted_stride",
        "following_row_stride",
        "following_stride",
        "draft_row_stride",
        "draft_stride",
        "len_stride",
        "status_stride",
    ],
    do_not_specialize_on_alignment=[
        "store_ptr",
        "slot_ptr",
        "emitted_ptr",
        "following_ptr",
        "draft_ptr",
        "len_ptr",
        "status_ptr",
    ],
)
def store_results_kernel(
    store_ptr,  # [S, 3 * MOST + 4]
    slot_ptr,  # [R]
    emitted_ptr,  # [R, DRAFTED + 1]
    following_ptr,  # [R, DRAFTED + 1]
    draft_ptr,  # [R, DRAFTED]
    len_ptr,  # [R]
    status_ptr,  # [R]
    store_stride,
    emitted_row_stride,
    emitted_stride,
    following_row_stride,
    following_stride,
    draft_row_stride,
    draft_stride,
    len_stride,
    status_stride,
    MOST: tl.constexpr,
    DRAFTED: tl.constexpr,
    HAS_STATUS: tl.constexpr,
    OK: tl.constexpr,
    PAD: tl.constexpr,
    NO_INPUT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One request: its row of the store."""
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    following = column - (MOST + 1)
    draft = following - (MOST + 1)
    emitted = tl.load(
        emitted_ptr + request * emitted_row_stride + column * emitted_stride,
        mask=column <= DRAFTED,
        other=PAD,
    ).to(tl.int32)
    value = emitted
    is_following = (following >= 0) & (following <= DRAFTED)
    value = tl.where(
        following >= 0,
        tl.load(
            following_ptr + request * following_row_stride + following * following_stride,
            mask=is_following,
            other=NO_INPUT,
        ).to(tl.int32),
        value,
    )
    value = tl.where(
        draft >= 0,
        tl.load(
            draft_ptr + request * draft_row_stride + draft * draft_stride,
            mask=(draft >= 0) & (draft < DRAFTED),
            other=PAD,
        ).to(tl.int32),
        value,
    )
    count = tl.load(len_ptr + request * len_stride).to(tl.int32)
    value = tl.where(draft == MOST, count, value)
    status = OK
    if HAS_STATUS:
        status = tl.load(status_ptr + request * status_stride).to(tl.int32)
    value = tl.where(draft == MOST + 1, status, value)
    row = store_ptr + tl.load(slot_ptr + request) * store_stride
    tl.store(row + column, value, mask=draft <= MOST + 1)
