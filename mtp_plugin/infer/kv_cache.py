"""KV cache of the reference models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from mtp_plugin.errors import TensorContractError


class KVState(NamedTuple):
    """Attention states of one layer, each [batch, heads, tokens, head_dim].

    Keys and values may differ in heads and width: models with latent attention cache a compressed
    state as keys and a rotary part as values.
    """

    keys: torch.Tensor
    values: torch.Tensor


class KVCache(Protocol):
    """States of all layers for the tokens seen so far."""

    def update(self, kv_states: Sequence[KVState]) -> None:
        """Append the states of new tokens, one entry per layer for the same tokens.

        Raises:
            TensorContractError: the entries do not fit each other or the stored states.
        """
        ...

    def crop(self, num_tokens_crop: int) -> None:
        """Remove the latest tokens from every layer.

        Raises:
            TensorContractError: the number is negative or larger than the number of tokens.
        """
        ...

    def get_num_tokens(self) -> int:
        """Return the number of cached tokens."""
        ...

    def get_kv_states(self) -> list[KVState]:
        """Return the stored states, one entry per layer; empty before the first update."""
        ...


class DynamicKVCache:
    """A simple `KVCache` that reallocates on every update."""

    def __init__(self) -> None:
        self._kv_states: list[KVState] = []

    def update(self, kv_states: Sequence[KVState]) -> None:
        """Append the states of new tokens; see `KVCache.update`."""
        new = [KVState(*state) for state in kv_states]
        self._check(new)
        if self._kv_states:
            new = [
                KVState(
                    torch.cat((old.keys, added.keys), dim=2),
                    torch.cat((old.values, added.values), dim=2),
                )
                for old, added in zip(self._kv_states, new, strict=True)
            ]
        self._kv_states = new

    def crop(self, num_tokens_crop: int) -> None:
        """Remove the latest tokens; see `KVCache.crop`."""
        stored = self.get_num_tokens()
        if not 0 <= num_tokens_crop <= stored:
            raise TensorContractError(
                f"num_tokens_crop: expected 0 to {stored}, the number of stored tokens, "
                f"got {num_tokens_crop}"
            )
        kept = stored - num_tokens_crop
        self._kv_states = [
            KVState(keys[:, :, :kept], values[:, :, :kept]) for keys, values in self._kv_states
        ]

    def get_num_tokens(self) -> int:
        """Return the number of cached tokens."""
        return self._kv_states[0].keys.shape[2] if self._kv_states else 0

    def get_kv_states(self) -> list[KVState]:
        """Return the stored states, one entry per layer; empty before the first update."""
        return list(self._kv_states)

    def _check(self, new: list[KVState]) -> None:
        if not new or (self._kv_states and len(new) != len(self._kv_states)):
            expected = len(self._kv_states) or "at least 1"
            raise TensorContractError(
                f"kv_states: expected {expected} layer(s), one entry each, got {len(new)}"
            )
        tensors = [tensor for state in new for tensor in state]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if any(len(shape) != 4 for shape in shapes):
            raise TensorContractError(
                f"kv_states: expected [batch, heads, tokens, head_dim], got {sorted(set(shapes))}"
            )
        rows_and_tokens = {(shape[0], shape[2]) for shape in shapes}
        if len(rows_and_tokens) > 1:
            raise TensorContractError(
                "kv_states: expected the same batch and tokens in all layers, got "
                f"(batch, tokens) {sorted(rows_and_tokens)}"
            )
        old = [tensor for state in self._kv_states for tensor in state]
        for index, (stored, added) in enumerate(zip(old, tensors, strict=False)):
            expected_layout, got_layout = _layout(stored), _layout(added)
            if expected_layout != got_layout:
                raise TensorContractError(
                    f"kv_states[{index // 2}].{KVState._fields[index % 2]}: expected "
                    f"{expected_layout} as stored, got {got_layout}"
                )


def _layout(tensor: torch.Tensor) -> str:
    """Describe a state, without its number of tokens."""
    batch, heads, _, width = tensor.shape
    return f"[{batch}, {heads}, tokens, {width}] {tensor.dtype} on {tensor.device}"
