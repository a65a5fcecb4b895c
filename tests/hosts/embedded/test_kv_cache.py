"""Blocks: handed out once, given back once; pools: rows where the block table says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mtp_plugin.errors import ConfigError, NoFreeBlocksError
from mtp_plugin.hosts.embedded.kv_cache import BlockManager, PagedKVPools


def request(request_id: int, max_length: int = 0) -> SimpleNamespace:
    return SimpleNamespace(request_id=request_id, max_length=max_length)


@pytest.mark.parametrize(("name", "value"), [("num_blocks", 0), ("block_size", 0)])
def test_sizes_below_one_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"^KV cache: {name} must be >= 1, got {value}$"):
        BlockManager(**{"num_blocks": 4, "block_size": 4, name: value})


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    blocks = BlockManager(3, 4)
    blocks.reserve(1, 8)
    assert not blocks.try_reserve(2, 5)
    assert blocks.table(2) == []
    assert blocks.num_free_blocks == 1
    with pytest.raises(
        NoFreeBlocksError,
        match=r"^request 1 needs 2 more KV blocks for 16 rows, 1 of 3 are free$",
    ):
        blocks.reserve(1, 16)
    assert blocks.reserved_rows(1) == 8


def test_shutdown_gives_everything_back() -> None:
    blocks = BlockManager(4, 2)
    blocks.reserve(1, 4)
    blocks.reserve(2, 3)
    blocks.shutdown()
    blocks.shutdown()
    assert blocks.num_free_blocks == 4
    assert blocks.table(1) == []


def test_as_a_resource_manager() -> None:
    blocks = BlockManager(6, 4)
    assert blocks.get_max_resource_count() == 6
    assert blocks.get_needed_resource_to_completion(request(1, max_length=17)) == 5
    blocks.add_dummy_requests([5, 6])
    blocks.prepare_resources(None)
    blocks.update_resources(None)
    assert blocks.num_free_blocks == 6


class Blocks(RuleBasedStateMachine):
    """Random reservations and frees: every block is free or belongs to exactly one request."""

    ids = st.integers(0, 5)

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def build(self, num_blocks: int, block_size: int) -> None:
        self.blocks = BlockManager(num_blocks, block_size)
        self.wanted: dict[int, int] = {}

    @rule(request_id=ids, rows=st.integers(0, 40))
    def reserve(self, request_id: int, rows: int) -> None:
        before = {r: list(self.blocks.table(r)) for r in range(6)}
        free = self.blocks.num_free_blocks
        missing = max(0, -(-rows // self.blocks.block_size) - len(before[request_id]))
        assert self.blocks.try_reserve(request_id, rows) == (missing <= free)
        if missing <= free:
            self.wanted[request_id] = max(rows, self.wanted.get(request_id, 0))
            assert self.blocks.table(request_id)[: len(before[request_id])] == before[request_id]
        else:
            assert self.blocks.table(request_id) == before[request_id]

    @rule(request_id=ids)
    def free(self, request_id: int) -> None:
        for _ in range(2):  # the second changes nothing, nor does a request that is not known
            self.blocks.free_resources(request(request_id))
        self.blocks.free_resources(request(99))
        self.wanted.pop(request_id, None)
        assert self.blocks.table(request_id) == []

    @invariant()
    def every_block_has_one_owner(self) -> None:
        held = [block for r in range(6) for block in self.blocks.table(r)]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(self.blocks.num_blocks))
        assert len(held) + self.blocks.num_free_blocks == self.blocks.num_blocks

    @invariant()
    def no_request_has_less_than_reserved(self) -> None:
        for request_id, rows in self.wanted.items():
            reserved = self.blocks.reserved_rows(request_id)
            assert rows <= reserved < rows + self.blocks.block_size


TestBlocks = Blocks.TestCase


# --- pools ---


def test_pools_take_their_shape_from_the_first_rows() -> None:
    pools = PagedKVPools(num_blocks=3, block_size=2, fill=float("nan"))
    assert (pools.layer_ids, pools.num_bytes()) == ([], 0)
    key, value = torch.ones(1, 2, 5, 4), torch.ones(1, 1, 5, 6, dtype=torch.float16)
    keys, values = pools.layer(3, key, value)
    assert keys.shape == (8, 2, 4)  # the sentinel block included
    assert values.shape == (8, 1, 6)
    assert values.dtype == torch.float16
    assert bool(keys.isnan().all())
    assert pools.layer_ids == [3]
    assert pools.num_bytes() == 8 * 2 * 4 * 4 + 8 * 6 * 2


def test_pools_are_allocated_once_and_read_by_row() -> None:
    pools = PagedKVPools(num_blocks=2, block_size=2)
    key = torch.zeros(1, 1, 1, 3)
    keys, _ = pools.layer(0, key, key)
    keys[4] = 7.0
    again, _ = pools.layer(0, key, key)
    assert again.data_ptr() == keys.data_ptr()
    found, _ = pools.rows(0, torch.tensor([4, 0]))
    assert found[:, 0].tolist() == [[7.0] * 3, [0.0] * 3]
