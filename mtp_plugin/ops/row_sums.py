"""Partial results of log-probabilities that the scan of `sample_tokens` writes.

The scan reads the N rows of logits [N, V] in blocks of consecutive columns. A chunk of a block is
what a few neighbouring threads of a program hold: some segments of columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from typing_extensions import Self

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.checks import expect_tensor

FEW_ROWS = 33
"""At most so many rows are read in small blocks, so that all of a device is busy."""
LOAD_BYTES = 16
"""Bytes per load of a thread."""


class ChunkLayout(NamedTuple):
    """Which columns of a row form a chunk.

    Thread t of ``threads`` holds ``each`` neighbours of every ``threads * each`` columns of a
    block, starting at ``t * each``. Kernels take the layout as one constant. It is a tuple of
    integers because Triton passes constants to JIT hooks as JSON, and has no properties because
    Triton 3.8 gives kernels the fields alone.
    """

    block: int  # columns
    chunks: int  # of a block
    threads: int
    each: int
    wraps: int  # loads per thread and block
    chunk_threads: int  # threads per chunk
    segment: int  # consecutive columns of a chunk within one load of all threads
    chunk_size: int  # columns per chunk

    @classmethod
    def made(cls, block: int, chunks: int, threads: int, each: int) -> Self:
        """Return the layout with these values and those that follow from them."""
        chunk_threads = threads // chunks
        return cls(
            block,
            chunks,
            threads,
            each,
            wraps=block // (threads * each),
            chunk_threads=chunk_threads,
            segment=chunk_threads * each,
            chunk_size=block // chunks,
        )

    @classmethod
    def of(cls, logits: torch.Tensor) -> Self:
        """Return the layout of unprocessed rows, by their number and dtype."""
        return cls.of_rows(logits.shape[0], logits.element_size())

    @classmethod
    def of_rows(cls, rows: int, element_size: int) -> Self:
        """As `of`, by the number of rows and the bytes of a logit."""
        each = LOAD_BYTES // element_size
        if rows <= FEW_ROWS:
            return cls.small(each)
        return cls.made(block=4096, chunks=32, threads=128, each=each)

    @classmethod
    def small(cls, each: int) -> Self:
        """Return the layout of few rows, or of rows whose processing takes registers."""
        return cls.made(block=1024, chunks=8, threads=64, each=each)

    @classmethod
    def wide(cls, each: int, warps: int) -> Self:
        """Return the layout of rows that one program of ``warps`` warps reads."""
        return cls.made(block=512 * warps, chunks=4 * warps, threads=32 * warps, each=each)

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return self.threads // 32

    def num_blocks(self, vocab: int) -> int:
        """Number of blocks of a row."""
        return -(-vocab // self.block)

    def num_chunks(self, vocab: int) -> int:
        """Number of chunks of a row, C; some of the last block's may be empty."""
        return self.num_blocks(vocab) * self.chunks

    def chunks_of(self, columns: torch.Tensor) -> torch.Tensor:
        """The chunk of each column, int64."""
        thread = columns % (self.threads * self.each) // self.each
        return columns // self.block * self.chunks + thread // self.chunk_threads


@dataclass(frozen=True)
class RowSums:
    """Log-sum-exp partials of unprocessed rows.

    Both tensors are unspecified for rows whose request returns no log-probabilities.
    """

    tops: torch.Tensor
    """[N, C] float32: the maximum of every chunk; NaN counts as -inf."""
    masses: torch.Tensor
    """[N] float32: the sum of exp(x - row maximum); 0 for a row of -inf, unspecified for a row that
    holds +inf."""
    layout: ChunkLayout

    @classmethod
    def unwritten(cls, logits: torch.Tensor) -> Self:
        """Allocate the tensors for rows of logits [N, V]."""
        layout, rows = ChunkLayout.of(logits), logits.shape[0]
        num_chunks = layout.num_chunks(logits.shape[-1])
        tops = torch.empty(rows, num_chunks, dtype=torch.float32, device=logits.device)
        return cls(tops, torch.empty(rows, dtype=torch.float32, device=logits.device), layout)

    def check(self, logits: torch.Tensor) -> None:
        """Check that the tensors fit rows of ``logits`` [N, V].

        Raises:
            TensorContractError: another shape, dtype, device or layout.
        """
        layout = ChunkLayout.of(logits)
        if self.layout != layout:
            raise TensorContractError(f"sums: expected chunks as {layout}, got {self.layout}")
        rows, chunks = logits.shape[0], layout.num_chunks(logits.shape[1])
        common: dict[str, Any] = {"dtype": torch.float32, "device": logits.device}
        common["contiguous"] = True
        expect_tensor("sums, tops", self.tops, shape=(rows, chunks), **common)
        expect_tensor("sums, masses", self.masses, shape=(rows,), **common)
