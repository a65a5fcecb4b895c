"""Pages that are gathered for torch: their rows, what holds no key, and whose memory they are."""

from __future__ import annotations

import pytest
import torch

from mtp_plugin.hosts.embedded.attention import PagedAttentionMetadata
from mtp_plugin.hosts.embedded.attention.bridge import PagedCache
from mtp_plugin.hosts.embedded.attention.sdpa import gather_pages
from mtp_plugin.hosts.embedded.kv_cache import PagedKVPools

BLOCK, HEADS, WIDTH = 4, 2, 3
TABLE = torch.tensor([[5, 2], [1, 6]], dtype=torch.int32)  # 6 is the sentinel block
LENS = torch.tensor([7, 2], dtype=torch.int32)


@pytest.fixture
def metadata() -> PagedAttentionMetadata:
    """Two sequences of one query row each, over pools whose row r holds r; NaN where no key is."""
    pools = PagedKVPools(6, BLOCK, fill=float("nan"))
    like = torch.zeros(1, HEADS, WIDTH)
    for pool in pools.layer(0, like, like):
        for seq, length in enumerate(LENS.tolist()):
            for position in range(length):
                row = int(TABLE[seq, position // BLOCK]) * BLOCK + position % BLOCK
                pool[row] = row
    limits = torch.full((2,), 2 * BLOCK, dtype=torch.int32)
    return PagedAttentionMetadata(
        seq_lens=torch.ones(2, dtype=torch.int32),
        kv_lens=LENS,
        num_contexts=0,
        num_cached_tokens_per_seq=(LENS - 1).tolist(),
        block_table=TABLE,
        kv_write_limit=limits,
        kv_capacity=limits,
        pools=pools,
    )


def test_rows_come_in_order_and_are_zero_where_no_key_is(metadata) -> None:
    keys, values = gather_pages(0, metadata)
    expected = torch.tensor(
        [[20.0, 21, 22, 23, 8, 9, 10, 0], [4, 5, 0, 0, 0, 0, 0, 0]],
    )
    for pages in (keys, values):
        assert pages.shape == (2, HEADS, 2 * BLOCK, WIDTH)
        for head in range(HEADS):
            for column in range(WIDTH):
                assert torch.equal(pages[:, head, :, column], expected)


def test_pools_keep_what_pages_leave_out(metadata) -> None:
    gather_pages(0, metadata)
    keys, _ = metadata.pools.written(0)
    assert keys[11].isnan().all()  # after the first sequence's last row


def test_modules_get_the_pages_without_a_copy(metadata) -> None:
    rows = torch.ones(1, HEADS, 2, WIDTH)
    for given in PagedCache(metadata).update(rows, rows, 0):
        assert given.shape == (1, HEADS, 2 * 2 * BLOCK, WIDTH)
        # rows [R * S', heads, width] in one piece
        assert given[0].transpose(0, 1).is_contiguous()
        assert given[0, :, 6].eq(1).all()  # the row that was written just now
        assert given[0, :, 7].eq(0).all()


def test_a_step_makes_its_masks_once(metadata) -> None:
    layout = metadata.layout()
    (visible,) = layout.visible
    assert visible.tolist() == [
        [[[True] * 7 + [False]]],
        [[[True] * 2 + [False] * 6]],
    ]
    assert metadata.layout().visible[0] is visible
    metadata.on_update_kv_lens()
    assert metadata.layout().visible[0] is not visible
