"""Steps over a paged cache: random lengths, shuffled blocks, pools full of NaN."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mtp_plugin.hosts.embedded.attention import AttentionBackend, PagedAttentionMetadata
from mtp_plugin.hosts.embedded.kv_cache import PagedKVPools
from tests.ops.on_device import DEVICE

LAYER = 3


@dataclass(frozen=True)
class Heads:
    """Query heads, key heads, width."""

    query: int = 2
    kv: int = 1
    width: int = 16


@dataclass
class Case:
    """One step, and what was cached before it.

    Args:
        seq_lens: query rows per sequence, contexts first.
        kv_lens: length after the step's rows; rows before position 0 are padding.
        limits: rows at or past them are dead.
        spare_blocks: entries of the block table that no sequence uses.
        least_blocks, least_width: so many blocks in the pool, and entries in the table, at least.
    """

    seq_lens: Sequence[int]
    kv_lens: Sequence[int]
    limits: Sequence[int]
    num_contexts: int = 0
    heads: Heads = field(default_factory=Heads)
    block_size: int = 4
    spare_blocks: int = 1
    least_blocks: int = 1
    least_width: int = 1
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        held = [
            -(-max(0, min(kv, limit)) // self.block_size)
            for kv, limit in zip(self.kv_lens, self.limits, strict=True)
        ]
        self.num_blocks = max(self.least_blocks, sum(held) + 2)
        order = rng.sample(range(self.num_blocks), self.num_blocks)
        width = max(self.least_width, max(held, default=1) + self.spare_blocks)
        self.tables = []
        for count in held:
            blocks, order = order[:count], order[count:]
            self.tables.append(blocks + [self.num_blocks] * (width - count))
        heads = self.heads
        lanes = (heads.query + 2 * heads.kv) * heads.width
        # one projection gives all three, so that rows are strided views
        projected = torch.randn(sum(self.seq_lens), lanes, generator=generator)
        self.projected = projected.to(self.dtype).to(DEVICE)
        shape = (sum(held) * self.block_size, heads.kv, heads.width)
        cached = torch.randn(2, *shape, generator=generator).to(self.dtype).to(DEVICE)
        self.key_pool, self.value_pool = (
            torch.full((self.num_rows, heads.kv, heads.width), torch.nan).to(cached)
            for _ in range(2)
        )
        ids = [
            self.pool_row(s, position)
            for s in range(len(self.seq_lens))
            for position in range(min(self.first_position(s), self.limits[s]))
        ]
        for pool, rows in ((self.key_pool, cached[0]), (self.value_pool, cached[1])):
            pool[torch.tensor(ids, dtype=torch.int64, device=DEVICE)] = rows[: len(ids)]

    @property
    def num_rows(self) -> int:
        """Pool rows, the sentinel block's included."""
        return (self.num_blocks + 1) * self.block_size

    @property
    def query(self) -> torch.Tensor:
        """[T, Hq, D]."""
        return self._slice(0, self.heads.query)

    @property
    def key(self) -> torch.Tensor:
        """[T, Hk, D]."""
        return self._slice(self.heads.query, self.heads.kv)

    @property
    def value(self) -> torch.Tensor:
        """[T, Hk, D]."""
        return self._slice(self.heads.query + self.heads.kv, self.heads.kv)

    def _slice(self, first: int, count: int) -> torch.Tensor:
        width = self.heads.width
        lanes = self.projected[:, first * width : (first + count) * width]
        return lanes.unflatten(1, (count, width))

    def first_position(self, sequence: int) -> int:
        """Position of a sequence's first row."""
        return self.kv_lens[sequence] - self.seq_lens[sequence]

    def pool_row(self, sequence: int, position: int) -> int:
        """Where a position of a sequence lies."""
        block = self.tables[sequence][position // self.block_size]
        return block * self.block_size + position % self.block_size

    def rows(self) -> list[tuple[int, int, bool]]:
        """(sequence, position, alive) of each row."""
        return [
            (s, position, 0 <= position < self.limits[s])
            for s, count in enumerate(self.seq_lens)
            for position in range(self.first_position(s), self.first_position(s) + count)
        ]

    def alive(self) -> torch.Tensor:
        """[T] bool."""
        return torch.tensor([alive for _, _, alive in self.rows()], dtype=torch.bool, device=DEVICE)

    def pools(self) -> PagedKVPools:
        """The pools before the step, to be written to."""
        pools = PagedKVPools(self.num_blocks, self.block_size, fill=float("nan"))
        key_pool, value_pool = pools.layer(LAYER, self.key, self.value)
        key_pool.copy_(self.key_pool)
        value_pool.copy_(self.value_pool)
        return pools

    def metadata(
        self,
        backend: AttentionBackend | None,
        pools: PagedKVPools | None = None,
        *,
        check: bool = True,
    ) -> PagedAttentionMetadata:
        """The step's metadata over the pools before it."""
        int32 = {"dtype": torch.int32, "device": DEVICE}
        return PagedAttentionMetadata(
            seq_lens=torch.tensor(self.seq_lens, dtype=torch.int32),
            kv_lens=torch.tensor(self.kv_lens, **int32),
            num_contexts=self.num_contexts,
            num_cached_tokens_per_seq=[self.first_position(s) for s in range(len(self.seq_lens))],
            block_table=torch.tensor(self.tables, **int32),
            kv_write_limit=torch.tensor(self.limits, **int32),
            kv_capacity=torch.tensor(self.limits, **int32),
            pools=self.pools() if pools is None else pools,
            check=check,
            backend=backend,
        )

    def load(self, pools: PagedKVPools, metadata: PagedAttentionMetadata) -> None:
        """Copy this step into the buffers of another one of the same sizes."""
        for buffer, values in (
            (metadata.seq_lens_cuda, self.seq_lens),
            (metadata.kv_lens_cuda, self.kv_lens),
            (metadata.kv_write_limit, self.limits),
            (metadata.block_table, self.tables),
        ):
            buffer.copy_(torch.tensor(values, dtype=torch.int32))
        for pool, held in zip(pools.written(LAYER), (self.key_pool, self.value_pool), strict=True):
            pool.copy_(held)

    def attend(
        self, backend: AttentionBackend, scaling: float | None = None
    ) -> tuple[torch.Tensor, PagedKVPools]:
        """The output of the backend, and its pools afterwards."""
        metadata = self.metadata(backend)
        output = metadata.attend(LAYER, self.query, self.key, self.value, scaling)
        return output, metadata.pools


def random_case(seed: int, *, dtype: torch.dtype = torch.float32, largest: int = 24) -> Case:
    """Contexts of any chunk and history, generations of equal rows, limits and dead rows."""
    rng = random.Random(seed)
    contexts = [rng.randint(1, 9) for _ in range(rng.choice([0, 0, 1, 3]))]
    rows = rng.choice([1, 1, 2, 4, 5])
    generations = [rows] * rng.randint(0 if contexts else 1, 3)
    if generations and rng.random() < 0.1:
        generations[-1] += 1
    seq_lens = contexts + generations
    kv_lens, limits = [], []
    for count in seq_lens:
        cached = rng.choice([0, rng.randint(0, largest), rng.randint(0, largest), -count])
        if rng.random() < 0.2:
            cached = rng.randint(-count, 2)
        kv_lens.append(count + cached)
        limit = count + cached
        if rng.random() < 0.4:
            limit = max(0, limit - rng.randint(1, count + 1))
        elif rng.random() < 0.2:
            limit += rng.randint(0, 5)
        limits.append(0 if rng.random() < 0.1 else max(0, limit))
    kv = rng.choice([1, 2])
    return Case(
        seq_lens,
        kv_lens,
        limits,
        num_contexts=len(contexts),
        heads=Heads(kv * rng.choice([1, 2, 3, 5]), kv, rng.choice([8, 16, 20, 32])),
        block_size=rng.choice([1, 2, 3, 4, 8, 16]),
        spare_blocks=rng.choice([0, 1, 4]),
        dtype=dtype,
        seed=seed,
    )
