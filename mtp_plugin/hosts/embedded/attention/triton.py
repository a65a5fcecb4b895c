"""The Triton backend of paged attention: one launch that writes, one or two that attend.

A launch depends on shapes and on the number of rows per sequence, which the host knows. Lengths,
limits and block tables are read on the device, so that a captured step can be replayed with other
values.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
import triton

from mtp_plugin.errors import ConfigError, TensorContractError, expect
from mtp_plugin.hosts.embedded.attention.kernels_triton import (
    paged_merge_kernel,
    paged_ragged_kernel,
    paged_uniform_kernel,
    paged_write_kernel,
)
from mtp_plugin.hosts.embedded.attention.types import (
    TRITON_BACKEND,
    HeadShape,
    RowCounts,
    StepMetadata,
)
from mtp_plugin.ops.launching import expect_reachable
from mtp_plugin.ops.programmatic_launch import pdl_options

MAX_WIDTH = 256
"""Maximum head width; the size of a program's tile grows with it."""
WIDE_HEAD, WIDE_HEAD_BYTES = 128, 136 * 1024
"""Shared memory of a program for prompts with wider heads."""
KEY_TILE_BYTES = 16384
"""Bytes of keys, and as many of values, that a program reads at a time."""
SPLIT_PROGRAMS = 256
"""Launches with at least this many programs do not split keys: about two programs per
multiprocessor of an H200."""
SPLIT_KEYS = 128
"""Minimum number of keys of the widest block table per split: merging shorter ones costs more."""
FEW_SPLITS, MAX_SPLITS, LONG_SPLIT = 16, 64, 512
"""More than a few splits pay off only if each has at least this many keys of the widest table."""
HOPPER_ROWS = 1024
"""Minimum number of rows of ragged sequences for the kernel of compute capability 9.0; measured on
an H100."""
WRITE_BLOCK = 2048


@dataclass(frozen=True)
class Tile:
    """Tile sizes and number of warps of a program, measured on an H200."""

    rows: int
    keys: int
    width: int
    num_warps: int
    num_stages: int


def uniform_tile(packed_rows: int, width: int, itemsize: int, sequences: int) -> Tile:
    """Return the tile for sequences with equal row counts.

    Args:
        packed_rows: rows times query heads per key head, of a sequence.
        width: head width.
        itemsize: bytes of a number.
        sequences: number of sequences times key heads.
    """
    wide = max(16, triton.next_power_of_2(width))
    rows = max(16, triton.next_power_of_2(min(packed_rows, 128)))
    if itemsize > 2:
        return _exact_tile(rows, wide, itemsize)
    programs = sequences * -(-packed_rows // rows)
    if programs < 2 * SPLIT_PROGRAMS:
        # memory-bound: each program reads more at a time
        return Tile(rows, _keys(2 * KEY_TILE_BYTES, wide, itemsize), wide, 8, 2)
    return Tile(rows, _keys(KEY_TILE_BYTES, wide, itemsize), wide, 8 if rows > 64 else 4, 2)


def ragged_tile(packed_rows: int, width: int, itemsize: int) -> Tile:
    """Return the tile for ragged sequences; the longest has so many rows times query heads per key
    head."""
    wide = max(16, triton.next_power_of_2(width))
    rows = max(16, triton.next_power_of_2(min(packed_rows, 128)))
    if itemsize > 2:
        return _exact_tile(rows, wide, itemsize)
    keys = min(64, _keys(KEY_TILE_BYTES, wide, itemsize))
    if rows > 64 and wide > WIDE_HEAD:
        return Tile(rows, keys, wide, 8, 3)
    return Tile(min(rows, 64), keys, wide, 4, 3)


def _exact_tile(rows: int, wide: int, itemsize: int) -> Tile:
    """Return the tile for float32: without tensor cores a thread holds whole rows of its operands,
    so tiles must be small and threads many, or registers spill."""
    rows = min(rows, 32)
    keys = min(32, _keys(KEY_TILE_BYTES // (rows // 16), wide, itemsize))
    return Tile(rows, keys, wide, 8, 2)


def _keys(num_bytes: int, wide: int, itemsize: int) -> int:
    return max(16, min(128, num_bytes // (wide * itemsize)))


def splits_for(programs: int, max_keys: int) -> int:
    """Return the number of key splits per sequence that keeps the device busy.

    Args:
        programs: number of programs of a launch without splits.
        max_keys: number of keys in the widest block table.
    """
    wanted = -(-SPLIT_PROGRAMS // programs)
    most = min(MAX_SPLITS, max(FEW_SPLITS, max_keys // LONG_SPLIT))
    return max(1, min(wanted, most, -(-max_keys // SPLIT_KEYS)))


class TritonBackend:
    """Attends pages in place, without gathering them and without device-to-host copies."""

    name = "triton"
    attention_function = TRITON_BACKEND
    gathers_pages = False
    reads_lengths_on_device = True

    def refusal(self, heads: HeadShape, device: torch.device) -> str | None:
        """Return why heads or device are not supported, or None."""
        widths = f"key width {heads.key_width}, value width {heads.value_width}"
        if heads.latent:
            return f"its cache holds latents ({widths}), which attn_backend: sdpa reads"
        if heads.key_width != heads.value_width:
            return f"expected keys and values of one width, got {widths}"
        if not 1 <= heads.key_width <= MAX_WIDTH:
            return f"expected heads up to {MAX_WIDTH} wide, got {heads.key_width}"
        if heads.num_query_heads % heads.num_kv_heads:
            return (
                f"expected query heads in whole groups per key head, got {heads.num_query_heads} "
                f"over {heads.num_kv_heads}"
            )
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return (
                f"it needs a CUDA device, got {device} (a CPU runs its kernels only with "
                f"TRITON_INTERPRET=1)"
            )
        if heads.key_width > WIDE_HEAD and device.type == "cuda" and torch.cuda.is_available():
            properties: Any = torch.cuda.get_device_properties(device)
            shared_memory = properties.shared_memory_per_block_optin
            if shared_memory < WIDE_HEAD_BYTES:
                return (
                    f"heads of {heads.key_width} need {WIDE_HEAD_BYTES // 1024} KiB of shared "
                    f"memory, {device} has {shared_memory // 1024} KiB"
                )
        return None

    def write(
        self,
        layer_idx: int,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: StepMetadata,
    ) -> None:
        """See :meth:`AttentionBackend.write`; key and value must have the same width.

        Raises:
            ConfigError: widths that the kernels do not support.
            TensorContractError: rows of another shape, dtype or stride, or out of reach.
        """
        counts = metadata.row_counts()
        num_rows = metadata.num_tokens
        _check_rows("key", key, num_rows)
        _check_rows("value", value, num_rows)
        expect(
            key.shape == value.shape and key.shape[2] <= MAX_WIDTH,
            ConfigError,
            f"attn_backend: 'triton' needs keys and values of one width up to {MAX_WIDTH}, got "
            f"keys {list(key.shape)} and values {list(value.shape)}; latent attention runs with "
            f"attn_backend: sdpa",
        )
        expect_reachable(paged_write_kernel, "paged attention: key", key)
        _check_lengths(metadata)
        pools = metadata.pools
        key_pool, value_pool = pools.layer(layer_idx, key, value)
        _check_pool(layer_idx, key_pool, "key", key)
        _check_pool(layer_idx, value_pool, "value", value)
        if num_rows == 0:
            return
        _, heads, width = key.shape
        block = min(WRITE_BLOCK, triton.next_power_of_2(heads * width))
        table = metadata.block_table
        paged_write_kernel[(num_rows, triton.cdiv(heads * width, block))](
            key,
            value,
            metadata.seq_lens_cuda,
            metadata.kv_lens_cuda,
            metadata.kv_write_limit,
            table,
            key_pool,
            value_pool,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            table.stride(0),
            table.shape[1],
            pools.num_rows - pools.block_size,
            len(counts.ragged),
            counts.ragged_rows,
            max(counts.uniform_rows, 1),
            HEADS=heads,
            WIDTH=width,
            BLOCK_SIZE=pools.block_size,
            LANES=_lanes(counts) if counts.ragged else 0,
            BLOCK=block,
            num_warps=4,
            **pdl_options(key.device),
        )

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        metadata: StepMetadata,
        scaling: float | None = None,
    ) -> torch.Tensor:
        """See :meth:`AttentionBackend.attend`; padding rows are zero.

        Raises:
            MetadataError: the layer has written no rows.
            TensorContractError: rows of another shape, dtype or stride, or out of reach.
        """
        counts = metadata.row_counts()
        _check_rows("query", query, metadata.num_tokens)
        expect_reachable(paged_uniform_kernel, "paged attention: query", query)
        _check_lengths(metadata)
        key_pool, value_pool = metadata.pools.written(layer_idx)
        heads, width = query.shape[1:]
        kv_heads = key_pool.shape[1]
        expect(
            query.dtype == key_pool.dtype and width == key_pool.shape[2] and heads % kv_heads == 0,
            TensorContractError,
            f"query of layer {layer_idx}: expected [T, a multiple of {kv_heads}, "
            f"{key_pool.shape[2]}] in {key_pool.dtype}, got {list(query.shape)} in {query.dtype}",
        )
        scaling = width**-0.5 if scaling is None else scaling
        expect(
            scaling > 0,
            TensorContractError,
            f"scaling of layer {layer_idx}: expected more than 0, got {scaling}",
        )
        call = _Call(
            query,
            torch.empty(query.shape, dtype=query.dtype, device=query.device),
            key_pool,
            value_pool,
            metadata,
            # exp2 is cheaper than exp
            scaling * math.log2(math.e),
        )
        if counts.ragged_rows:
            call.attend_ragged(counts)
        if counts.uniform_rows:
            call.attend_uniform(counts)
        return call.output


@dataclass(frozen=True)
class _Call:
    """Tensors shared by the launches of one attention call."""

    query: torch.Tensor  # [T, Hq, D]
    output: torch.Tensor  # [T, Hq, D]
    key_pool: torch.Tensor
    value_pool: torch.Tensor
    metadata: StepMetadata
    score_scale: float

    @property
    def kv_heads(self) -> int:
        return int(self.key_pool.shape[1])

    @property
    def group(self) -> int:
        return int(self.query.shape[1]) // self.kv_heads

    def attend_ragged(self, counts: RowCounts) -> None:
        """Launch attention of the ragged sequences."""
        kernels = self._hopper_kernels(counts)
        if kernels is not None:
            self._attend_prompts(counts, kernels)
            return
        metadata, width = self.metadata, int(self.query.shape[2])
        tile = ragged_tile(max(counts.ragged) * self.group, width, self.query.element_size())
        table = metadata.block_table
        paged_ragged_kernel[self._ragged_grid(counts, tile.rows)](
            self.query,
            metadata.seq_lens_cuda,
            metadata.kv_lens_cuda,
            metadata.kv_write_limit,
            table,
            self.key_pool,
            self.value_pool,
            self.output,
            self.query.stride(0),
            self.query.stride(1),
            table.stride(0),
            table.shape[1],
            len(counts.ragged),
            self.score_scale,
            KV_HEADS=self.kv_heads,
            GROUP=self.group,
            WIDTH=width,
            BLOCK_SIZE=metadata.pools.block_size,
            LANES=_lanes(counts),
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            BLOCK_D=tile.width,
            WIDEN=_widens(self.query),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **pdl_options(self.query.device),
        )

    def _ragged_grid(self, counts: RowCounts, tile_rows: int) -> tuple[int, int]:
        # enough for any lengths with this sum, because a captured step has those of its replay;
        # programs past the last tile store nothing
        tiles = counts.ragged_rows * self.group // tile_rows + len(counts.ragged)
        return tiles, self.kv_heads

    def _hopper_kernels(self, counts: RowCounts) -> ModuleType | None:
        """Return the module of the kernel for long prompts where it serves this call, or None."""
        query, block_size = self.query, self.metadata.pools.block_size
        if counts.ragged_rows < HOPPER_ROWS or not _is_hopper(query.device):
            return None
        kernels = _gluon_kernels()
        fits = (
            kernels is not None
            and query.element_size() == 2
            and query.shape[2] == kernels.WIDTH
            and block_size >= kernels.MIN_BLOCK_SIZE
            and block_size & (block_size - 1) == 0
        )
        return kernels if fits else None

    def _attend_prompts(self, counts: RowCounts, kernels: ModuleType) -> None:
        metadata, query = self.metadata, self.query
        block_size, table = metadata.pools.block_size, metadata.block_table
        kernels.paged_prompt_kernel[self._ragged_grid(counts, kernels.ROWS)](
            query,
            metadata.seq_lens_cuda,
            metadata.kv_lens_cuda,
            metadata.kv_write_limit,
            table,
            kernels.pages_descriptor(self.key_pool, block_size),
            kernels.pages_descriptor(self.value_pool, block_size),
            self.output,
            query.stride(0),
            query.stride(1),
            table.stride(0),
            table.shape[1],
            len(counts.ragged),
            self.score_scale,
            KV_HEADS=self.kv_heads,
            GROUP=self.group,
            WIDTH=kernels.WIDTH,
            BLOCK_SIZE=block_size,
            LANES=_lanes(counts),
            BLOCK_M=kernels.ROWS,
            BLOCK_N=kernels.KEYS,
            PAGE=kernels.page_rows(block_size),
            STAGES=kernels.STAGES,
            num_warps=4,
        )

    def attend_uniform(self, counts: RowCounts) -> None:
        """Launch attention of the sequences with equal row counts, splitting their keys."""
        metadata, query = self.metadata, self.query
        heads, width = query.shape[1:]
        packed_rows = counts.uniform_rows * self.group
        sequences = counts.num_uniform * self.kv_heads
        tile = uniform_tile(packed_rows, width, query.element_size(), sequences)
        row_tiles = -(-packed_rows // tile.rows)
        table = metadata.block_table
        splits = splits_for(sequences * row_tiles, table.shape[1] * metadata.pools.block_size)
        partial = weight = self.output
        items = counts.num_uniform * counts.uniform_rows * heads
        if splits > 1:
            float32: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
            partial = torch.empty(items, splits, width, **float32)
            weight = torch.empty(items, splits, **float32)
        pdl = pdl_options(query.device)
        paged_uniform_kernel[(counts.num_uniform * row_tiles, self.kv_heads, splits)](
            query,
            metadata.kv_lens_cuda,
            metadata.kv_write_limit,
            table,
            self.key_pool,
            self.value_pool,
            partial,
            weight,
            query.stride(0),
            query.stride(1),
            table.stride(0),
            table.shape[1],
            len(counts.ragged),
            counts.ragged_rows,
            counts.uniform_rows,
            row_tiles,
            splits,
            self.score_scale,
            KV_HEADS=self.kv_heads,
            GROUP=self.group,
            WIDTH=width,
            BLOCK_SIZE=metadata.pools.block_size,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            BLOCK_D=tile.width,
            WIDEN=_widens(query),
            SPLIT=splits > 1,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **pdl,
        )
        if splits > 1:
            paged_merge_kernel[(items,)](
                partial,
                weight,
                self.output,
                counts.ragged_rows,
                splits,
                HEADS=heads,
                WIDTH=width,
                SPLITS=triton.next_power_of_2(splits),
                BLOCK_D=tile.width,
                # in one warp one thread merges the splits of a value
                num_warps=max(1, min(8, triton.next_power_of_2(splits) * tile.width // 2048)),
                **pdl,
            )


@cache
def _is_hopper(device: torch.device) -> bool:
    # ROCm devices are named cuda too, with capability numbers of their own
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@cache
def _gluon_kernels() -> ModuleType | None:
    """Return the module of Gluon kernels; None: this Triton is too old for them."""
    try:
        from mtp_plugin.hosts.embedded.attention import kernels_gluon
    except ImportError:
        return None
    return kernels_gluon


def _lanes(counts: RowCounts) -> int:
    return max(16, 1 << max(len(counts.ragged) - 1, 0).bit_length())


def _widens(query: torch.Tensor) -> bool:
    return query.dtype is torch.bfloat16 and not query.is_cuda


def _check_rows(name: str, rows: torch.Tensor, num_rows: int) -> None:
    expect(
        rows.dim() == 3 and rows.shape[0] == num_rows and rows.stride(2) == 1,
        TensorContractError,
        f"{name}: expected [T = {num_rows}, heads, width] with contiguous widths, got shape "
        f"{list(rows.shape)} and strides {list(rows.stride())}",
    )


def _check_lengths(metadata: StepMetadata) -> None:
    for name in ("seq_lens_cuda", "kv_lens_cuda", "kv_write_limit", "block_table"):
        tensor: torch.Tensor = getattr(metadata, name)
        expect(
            tensor.shape[0] >= metadata.num_seqs
            and (tensor.shape[-1] <= 1 or tensor.stride(-1) == 1),
            TensorContractError,
            f"{name}: expected contiguous rows for {metadata.num_seqs} sequences, got shape "
            f"{list(tensor.shape)} and strides {list(tensor.stride())}",
        )


def _check_pool(layer_idx: int, pool: torch.Tensor, name: str, rows: torch.Tensor) -> None:
    expect(
        pool.shape[1:] == rows.shape[1:] and pool.dtype == rows.dtype,
        TensorContractError,
        f"{name} of layer {layer_idx}: expected [T, {pool.shape[1]}, {pool.shape[2]}] in "
        f"{pool.dtype} like the rows before, got {list(rows.shape)} in {rows.dtype}",
    )
