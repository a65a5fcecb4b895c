"""Batches of rows to sample from, with options at every edge."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.row_sums import RowSums
from mtp_plugin.ops.sampling import Role, sample_tokens
from mtp_plugin.ops.step import SlotRows
from mtp_plugin.requests.columns import REQUEST_COLUMNS, SlotColumn, TableColumns, TopPMass
from tests.op_arguments import poisoned_memory
from tests.ops.on_device import DEVICE, POISON, vector
from tests.ops.sampling import example
from tests.ops.sampling.example import Options
from tests.ops.sampling.margins import undecided
from tests.ops.top_k.rows import odd_rows, strided

COLUMNS = TableColumns((*REQUEST_COLUMNS, SlotColumn("of_a_mode", int)))

TEMPERATURES = (0.0, 1e-6, 1e-5, 1e-4, 0.01, 0.3, 0.7, 1.0, 1.0, 2.0, 100.0, 1e30)
TOP_KS = (0, 0, 1, 2, 5, 50, 63, 64, 65, 128, 129, 200, 257, 1000, 2**31 - 1)
TOP_PS = (1.0, 1.0, 0.999999, 0.95, 0.9, 0.5, 1e-3, 1e-6, 1e-30)
MIN_PS = (0.0, 0.0, 1e-3, 0.05, 0.1, 0.5, 1.0)
KINDS = ("odd", "odd", "smooth", "flat", "peaked", "masked", "large", "far", "constant")


def options_of(rng: random.Random, vocab: int) -> Options:
    """Random options of one request."""
    return Options(
        rng.choice(TEMPERATURES),
        rng.choice((*TOP_KS, vocab, max(vocab - 1, 0), vocab + 1)),
        rng.choice(TOP_PS),
        rng.choice(MIN_PS),
        rng.choice((0, 2**64 - 1, rng.getrandbits(64), rng.getrandbits(32))),
        rng.choice([*TopPMass]),
    )


def rows_of(rng: random.Random, rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits [rows, V] on the CPU, each row of another kind."""
    noise = torch.Generator().manual_seed(rng.getrandbits(31))
    values = odd_rows(noise, rows, vocab, dtype).float()
    for row in range(rows):
        kind, normal = rng.choice(KINDS), torch.randn(vocab, generator=noise)
        if kind == "smooth":
            values[row] = normal * 3
        elif kind == "flat":
            values[row] = normal * 0.05 + 4
        elif kind == "peaked":
            values[row] = normal
            values[row, torch.randint(0, vocab, (5,), generator=noise)] += 12
        elif kind == "masked":  # as a host that knows no -inf masks
            values[row] = normal * 2
            values[row, torch.rand(vocab, generator=noise) < 0.7] = torch.finfo(dtype).min
        elif kind == "large":
            values[row] = normal * 2000 - 9000
        elif kind == "far":  # where an exponent is known to a fraction only
            values[row] = normal + rng.choice((-30_000, 30_000))
        elif kind == "constant":
            values[row] = rng.choice((0.0, -3.5, 1000.0, torch.finfo(dtype).min))
    return values.to(dtype)


def slots_of(options: list[Options], rng: random.Random, *, gap: int = 0) -> SlotRows:
    """The options in slots in any order; other slots, and what lies between them, are poison."""
    number = len(options) + 2
    order = rng.sample(range(number), len(options))
    wide = torch.full((number, COLUMNS.width + gap), POISON, dtype=torch.int32)
    for slot, one in zip(order, options, strict=True):
        words = [part - 2**32 if part >= 2**31 else part for part in split(one.seed)]
        row = COLUMNS.row({**one._asdict(), "seed": words, "prompt_len": 9})
        wide[slot, : COLUMNS.width] = torch.tensor(row, dtype=torch.int32)
    # one slot more than there are requests: the list may be longer
    return SlotRows(wide.to(DEVICE)[:, : COLUMNS.width], vector([*order, POISON]), COLUMNS)


def split(seed: int) -> tuple[int, int]:
    """The low and the high word of a seed."""
    return seed % 2**32, seed >> 32


@dataclass(frozen=True)
class Batch:
    """Rows and options of their requests, with the plain-Python example of their tokens."""

    logits: torch.Tensor
    rows: LogitRows
    slots: SlotRows
    options: list[Options]
    role: Role = Role.TARGET
    vocab_ids: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        seed: int,
        vocab: int,
        *,
        contexts: int = 1,
        generations: int = 2,
        width: int = 2,
        dtype: torch.dtype = torch.float32,
        index_dtype: torch.dtype = torch.int64,
        gap: int = 0,
        role: Role = Role.TARGET,
        ahead: bool = False,
        cut: bool = False,
    ) -> Batch:
        rng = random.Random(seed)
        requests = contexts + generations
        options = [options_of(rng, vocab) for _ in range(requests)]
        positions = [rng.choice((0, 7, rng.randrange(2**31 - 100))) for _ in range(requests)]
        counts = [rng.randrange(5) for _ in range(requests)]
        ids = sorted(rng.sample(range(vocab * 3 + 5), vocab))
        rows = LogitRows(
            contexts,
            width,
            _apart(positions, index_dtype, gap),
            _apart(counts, torch.int32, gap) if ahead else None,
            rng.randrange(4),
        )
        return cls(
            strided(rows_of(rng, rows.num_rows, vocab, dtype), gap),
            rows,
            slots_of(options, rng, gap=gap),
            options,
            role,
            vector(ids, torch.int32) if cut else None,
        )

    def tokens(
        self,
        backend: Backend,
        *,
        truncation: torch.Tensor | None = None,
        sums: RowSums | None = None,
        fills: torch.dtype | None = None,
    ) -> torch.Tensor:
        with poisoned_memory():
            return sample_tokens(
                self.logits,
                self.rows,
                self.slots,
                role=self.role,
                vocab_ids=self.vocab_ids,
                truncation=truncation,
                sums=sums,
                fills=fills,
                backend=backend,
            )

    def sampled_positions(self) -> list[tuple[int, int]]:
        """Per row: its request, and the absolute index of the token that it draws."""
        rows, expected = self.rows, []
        ahead = [0] * rows.num_requests if rows.ahead is None else rows.ahead.tolist()
        for request, position in enumerate(rows.positions.tolist()):
            for i in range(1 if request < rows.num_contexts else rows.width):
                expected.append((request, position + ahead[request] + rows.column + 1 + i))
        return expected

    def example(self) -> list[int]:
        ids = None if self.vocab_ids is None else self.vocab_ids.tolist()
        rounded = [
            one._replace(**{n: example.rounded(getattr(one, n)) for n in ROUNDED})
            for one in self.options
        ]
        return [
            example.draw(row, rounded[request], index, self.role, ids)
            for row, (request, index) in zip(
                self.logits.double().tolist(), self.sampled_positions(), strict=True
            )
        ]

    def undecided(self) -> torch.Tensor:
        """Rows [N] whose result hangs on rounding."""
        owners, indices = (
            zip(*self.sampled_positions(), strict=True) if self.sampled_positions() else ((), ())
        )
        return undecided(
            self.logits, vector(owners), vector(indices), self.slots, self.role, self.vocab_ids
        )

    def replaced(self, **changes: object) -> Batch:
        return replace(self, **changes)


ROUNDED = ("temperature", "top_p", "min_p")


def batch_of_rows(rows: torch.Tensor, options: Sequence[Options]) -> Batch:
    """A row per request."""
    requests = LogitRows(len(options), 1, vector(range(len(options))))
    return Batch(rows.to(DEVICE), requests, slots_of([*options], random.Random(1)), [*options])


def _apart(values: list[int], dtype: torch.dtype, gap: int) -> torch.Tensor:
    wide = torch.full((len(values), 1 + gap), POISON, dtype=dtype, device=DEVICE)
    wide[:, 0] = vector(values, dtype)
    return wide[:, 0]
