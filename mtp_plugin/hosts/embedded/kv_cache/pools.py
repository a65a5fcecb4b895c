"""KV pools on the device."""

from __future__ import annotations

import torch

from mtp_plugin.errors import MetadataError


class PagedKVPools:
    """Key and value rows of every layer, [rows, heads, width] each.

    A layer's pools are allocated by :meth:`allocate` or at the layer's first use. Row r of block b
    has index ``b * block_size + r``. Target layers come first, then one layer per draft depth. For
    latent attention "key" and "value" are the two latents, which differ in width.
    """

    def __init__(self, num_blocks: int, block_size: int, fill: float = 0.0) -> None:
        self.num_rows = (num_blocks + 1) * block_size  # the sentinel block is the last one
        self.block_size = block_size
        self.fill = fill
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def allocate(self, like: PagedKVPools) -> None:
        """Allocate and fill the pools of every layer that ``like`` has."""
        for layer_idx, (key, value) in like._layers.items():
            self.layer(layer_idx, key, value)

    def layer(
        self, layer_idx: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pools of a layer; allocate them for rows shaped like ``key`` and ``value``."""
        pools = self._layers.get(layer_idx)
        if pools is None:
            pools = (self._new(key), self._new(value))
            self._layers[layer_idx] = pools
        return pools

    def written(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pools of a layer that has written rows.

        Raises:
            MetadataError: the layer has written no rows.
        """
        pools = self._layers.get(layer_idx)
        if pools is None:
            raise MetadataError(
                f"KV pools: layer {layer_idx} was read before it wrote any row; layers that "
                f"have: {self.layer_ids}"
            )
        return pools

    def rows(self, layer_idx: int, row_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the key and value rows [N, heads, width] of a layer, for tests and debugging."""
        keys, values = self._layers[layer_idx]
        return keys[row_ids], values[row_ids]

    @property
    def layer_ids(self) -> list[int]:
        """Indices of layers with pools."""
        return sorted(self._layers)

    def release(self) -> None:
        """Free all pools."""
        self._layers.clear()

    def tensors(self) -> list[torch.Tensor]:
        """Return the key and value pool of every layer."""
        return [tensor for pools in self._layers.values() for tensor in pools]

    def num_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def _new(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self.num_rows, like.shape[1], like.shape[-1])
        return torch.full(shape, self.fill, dtype=like.dtype, device=like.device)
