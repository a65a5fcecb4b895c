"""What a draw's scan of the logits leaves for log-probabilities.

N rows of logits, V words. A scan reads rows by pieces of consecutive columns. A chunk of a piece is
what a few neighbouring threads of the program that reads it hold: some segments of columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from typing_extensions import Self

from mtp_plugin.errors import TensorContractError

FEW_ROWS = 33
"""So many rows or fewer are read by small pieces, which keep all of a device busy."""
LOAD_BYTES = 16
"""What a thread reads at once."""


class ChunkLayout(NamedTuple):
    """Which columns of a row form a chunk.

    Thread t of ``threads`` holds ``each`` neighbours of every ``threads * each`` columns of a
    piece, starting at ``t * each``. Kernels take the layout as one constant. It is a tuple of
    integers because Triton passes constants to JIT hooks as JSON.
    """

    piece: int  # columns
    chunks: int  # of a piece
    threads: int
    each: int

    @classmethod
    def of(cls, logits: torch.Tensor) -> Self:
        """Of raw rows of logits, by how many they are and their dtype."""
        each = LOAD_BYTES // logits.element_size()
        if logits.shape[0] <= FEW_ROWS:
            return cls.small(each)
        return cls(piece=4096, chunks=32, threads=128, each=each)

    @classmethod
    def small(cls, each: int) -> Self:
        """Of few rows, or of those that take registers for more than their values."""
        return cls(piece=1024, chunks=8, threads=64, each=each)

    @classmethod
    def wide(cls, each: int, warps: int) -> Self:
        """Of rows that a program of so many warps reads alone."""
        return cls(piece=512 * warps, chunks=4 * warps, threads=32 * warps, each=each)

    @property
    def warps(self) -> int:
        """Of a program that reads pieces."""
        return self.threads // 32

    @property
    def wraps(self) -> int:
        """Times that all threads together read neighbours of a piece."""
        return self.piece // (self.threads * self.each)

    @property
    def chunk_threads(self) -> int:
        """Threads that hold a chunk."""
        return self.threads // self.chunks

    @property
    def segment(self) -> int:
        """Consecutive columns of a chunk."""
        return self.chunk_threads * self.each

    @property
    def chunk_size(self) -> int:
        """Columns of a chunk."""
        return self.piece // self.chunks

    def num_pieces(self, vocab: int) -> int:
        """Pieces of a row."""
        return -(-vocab // self.piece)

    def num_chunks(self, vocab: int) -> int:
        """Chunks of a row, C; some of the last piece's may have no column."""
        return self.num_pieces(vocab) * self.chunks

    def chunks_of(self, columns: torch.Tensor) -> torch.Tensor:
        """The chunk that each column is of, int64."""
        thread = columns % (self.threads * self.each) // self.each
        return columns // self.piece * self.chunks + thread // self.chunk_threads


@dataclass(frozen=True)
class RowSums:
    """Of raw rows, what every log-probability of theirs needs.

    Both tensors are unspecified in rows whose request asks for no log-probabilities.
    """

    tops: torch.Tensor
    """[N, C] float32: the highest value of every chunk, NaN as -inf; -inf of one without any."""
    masses: torch.Tensor
    """[N] float32: the sum of exp(x - the row's highest value); 0 of a row without any value,
    unspecified of one that holds +inf."""
    layout: ChunkLayout

    @classmethod
    def unwritten(cls, logits: torch.Tensor) -> Self:
        """Tensors to write to, for rows of logits [N, V]."""
        layout, rows = ChunkLayout.of(logits), logits.shape[0]
        num_chunks = layout.num_chunks(logits.shape[-1])
        tops = torch.empty(rows, num_chunks, dtype=torch.float32, device=logits.device)
        return cls(tops, torch.empty(rows, dtype=torch.float32, device=logits.device), layout)

    def check(self, logits: torch.Tensor) -> None:
        """Check that they are of rows of ``logits`` [N, V].

        Raises:
            TensorContractError: another shape, type or device, gaps, or another layout.
        """
        layout = ChunkLayout.of(logits)
        if self.layout != layout:
            raise TensorContractError(f"sums: expected chunks as {layout}, got {self.layout}")
        rows, chunks = logits.shape[0], layout.num_chunks(logits.shape[1])
        for name, tensor, shape in (
            ("tops", self.tops, (rows, chunks)),
            ("masses", self.masses, (rows,)),
        ):
            if not (
                tensor.shape == shape
                and tensor.dtype == torch.float32
                and tensor.is_contiguous()
                and tensor.device == logits.device
            ):
                raise TensorContractError(
                    f"sums, {name}: expected torch.float32 {list(shape)} without gaps on "
                    f"{logits.device}, got {tensor.dtype} {list(tensor.shape)} with strides "
                    f"{list(tensor.stride())} on {tensor.device}"
                )
