from __future__ import annotations

import pytest
import torch

from mtp_plugin.infer import DynamicKVCache, KVCache, KVState


class KVCacheContract:
    """What every `KVCache` promises; subclasses give a cache and the widths of its states."""

    heads = (2, 2)
    widths = (4, 4)
    num_layers = 3
    batch = 2

    def make_cache(self) -> KVCache:
        raise NotImplementedError

    def states(self, num_tokens: int, start: int = 0) -> list[KVState]:
        """States that encode layer and token: layer l, token t holds 100 l + t."""

        def one(layer: int, heads: int, width: int) -> torch.Tensor:
            tokens = 100.0 * layer + torch.arange(start, start + num_tokens)
            return tokens[None, None, :, None].expand(self.batch, heads, num_tokens, width)

        return [
            KVState(*(one(layer, *sizes) for sizes in zip(self.heads, self.widths, strict=True)))
            for layer in range(self.num_layers)
        ]

    def assert_holds(self, cache: KVCache, num_tokens: int) -> None:
        assert cache.get_num_tokens() == num_tokens
        held = cache.get_kv_states()
        assert len(held) == self.num_layers
        for got, expected in zip(held, self.states(num_tokens), strict=True):
            assert torch.equal(got.keys, expected.keys)
            assert torch.equal(got.values, expected.values)

    def test_empty(self) -> None:
        cache = self.make_cache()
        assert cache.get_num_tokens() == 0
        assert cache.get_kv_states() == []

    def test_updates_append(self) -> None:
        cache = self.make_cache()
        cache.update(self.states(3))
        self.assert_holds(cache, 3)
        cache.update(self.states(1, start=3))
        cache.update(self.states(2, start=4))
        self.assert_holds(cache, 6)

    def test_plain_pairs_will_do(self) -> None:
        cache = self.make_cache()
        cache.update([(keys, values) for keys, values in self.states(2)])  # type: ignore[misc]
        assert all(isinstance(state, KVState) for state in cache.get_kv_states())

    @pytest.mark.parametrize("dropped", [0, 1, 4, 5])
    def test_crop_drops_the_latest(self, dropped: int) -> None:
        cache = self.make_cache()
        cache.update(self.states(5))
        cache.crop(dropped)
        self.assert_holds(cache, 5 - dropped)
        cache.update(self.states(2, start=5 - dropped))
        self.assert_holds(cache, 7 - dropped)

    def test_crop_leaves_states_that_were_handed_out(self) -> None:
        cache = self.make_cache()
        cache.update(self.states(4))
        before = cache.get_kv_states()
        cache.crop(2)
        cache.update(self.states(2, start=50))
        assert torch.equal(before[0].keys, self.states(4)[0].keys)


class TestDynamicKVCache(KVCacheContract):
    def make_cache(self) -> KVCache:
        return DynamicKVCache()


class TestDynamicKVCacheOfLatents(TestDynamicKVCache):
    """One compressed head, keys and values of different widths."""

    heads = (1, 1)
    widths = (32, 8)
