from __future__ import annotations

import pytest
import torch

from mtp_plugin.errors import TensorContractError
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

    @pytest.mark.parametrize("dropped", [-1, 4])
    def test_crop_out_of_range(self, dropped: int) -> None:
        cache = self.make_cache()
        cache.update(self.states(3))
        with pytest.raises(TensorContractError) as caught:
            cache.crop(dropped)
        assert str(caught.value) == (
            f"num_tokens_crop: expected 0 to 3, the number of stored tokens, got {dropped}"
        )
        assert isinstance(caught.value, ValueError)
        self.assert_holds(cache, 3)

    def test_crop_of_an_empty_cache(self) -> None:
        cache = self.make_cache()
        cache.crop(0)
        with pytest.raises(TensorContractError, match="expected 0 to 0"):
            cache.crop(1)

    def test_number_of_layers(self) -> None:
        cache = self.make_cache()
        with pytest.raises(TensorContractError, match=r"^kv_states: expected at least 1 layer"):
            cache.update([])
        cache.update(self.states(1))
        with pytest.raises(TensorContractError) as caught:
            cache.update(self.states(1)[:2])
        assert str(caught.value) == "kv_states: expected 3 layer(s), one entry each, got 2"
        self.assert_holds(cache, 1)

    def test_layers_disagree(self) -> None:
        cache = self.make_cache()
        with pytest.raises(TensorContractError) as caught:
            cache.update([*self.states(2)[:2], self.states(3)[2]])
        assert str(caught.value) == (
            "kv_states: expected the same batch and tokens in all layers, got "
            "(batch, tokens) [(2, 2), (2, 3)]"
        )
        assert cache.get_kv_states() == []

    def test_other_rank(self) -> None:
        cache = self.make_cache()
        with pytest.raises(TensorContractError, match=r"expected \[batch, heads, tokens, head_dim"):
            cache.update([KVState(torch.zeros(2, 2, 4), torch.zeros(2, 2, 4))])

    def test_other_width_or_dtype_than_stored(self) -> None:
        cache = self.make_cache()
        cache.update(self.states(1))
        changed = self.states(1)
        changed[1] = KVState(changed[1].keys, changed[1].values.double())
        heads, width = self.heads[1], self.widths[1]
        with pytest.raises(TensorContractError) as caught:
            cache.update(changed)
        assert str(caught.value) == (
            f"kv_states[1].values: expected [2, {heads}, tokens, {width}] torch.float32 on cpu "
            f"as stored, got [2, {heads}, tokens, {width}] torch.float64 on cpu"
        )
        self.assert_holds(cache, 1)


class TestDynamicKVCache(KVCacheContract):
    def make_cache(self) -> KVCache:
        return DynamicKVCache()


class TestDynamicKVCacheOfLatents(TestDynamicKVCache):
    """One compressed head, keys and values of different widths."""

    heads = (1, 1)
    widths = (32, 8)
