"""Batches of rows whose requests use logits processing."""

# ruff: noqa: N803 (constants of kernels are in capitals)

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.logit_rows.processing_triton import (
    Pools,
    load_block_processing,
    load_processing,
    load_shared_processing,
    process_block,
    process_values,
)
from mtp_plugin.ops.logit_rows.rows_triton import locate_row
from mtp_plugin.ops.step import SlotRows
from mtp_plugin.requests.columns import POOL_ROWS
from tests.ops.logits_processing import example as edits
from tests.ops.logits_processing.example import LogitsOptions, Place
from tests.ops.logits_processing.pools import pools_of
from tests.ops.on_device import DEVICE, POISON
from tests.ops.sampling import example
from tests.ops.sampling.cases import ROUNDED, Batch
from tests.ops.sampling.example import Options
from tests.ops.slots import derive_logit_change

NUMBERS = (0.5, -0.5, 1.0, 0.1, -0.3, 2.0, 3.7, 100.0)
FACTORS = (1.0, 2.0, 0.5, 1.3, 1.1, 1e-30, 3e38)
MOST_COLUMNS = 4096
"""Of a block; a block of 32,000 takes minutes to compile."""


@dataclass(frozen=True)
class EditedBatch:
    """A batch with the logits processing of every row."""

    batch: Batch
    places: list[Place]
    """Per row."""

    @classmethod
    def of(
        cls,
        seed: int,
        vocab: int,
        *,
        greedy: bool,
        drafts: bool = True,
        pools: bool = True,
        draft_dtype: torch.dtype | None = None,
        **shape: object,
    ) -> EditedBatch:
        """A random batch; drafts are of any integer type by default."""
        batch = Batch.of(seed, vocab, **shape)
        rng = random.Random(seed + 1)
        ids = list(range(vocab)) if batch.vocab_ids is None else batch.vocab_ids.tolist()
        whole = vocab if batch.vocab_ids is None else vocab * 3 + 5
        generations = batch.rows.num_requests - batch.rows.num_contexts
        width = batch.rows.column + batch.rows.width - 1 + rng.randrange(2)
        dtype = draft_dtype or rng.choice((torch.int32, torch.int64))
        drafted = [[draft_of(rng, ids, dtype) for _ in range(width)] for _ in range(generations)]
        logits_options = [
            random_logits_options(rng, ids, whole) if rng.random() < 0.8 else LogitsOptions()
            for _ in range(batch.rows.num_requests)
        ]
        rows = batch.rows
        if drafts:
            rows = replace(rows, drafts=apart(drafted, width, dtype))
        slots, options = batch.slots, batch.options
        if greedy:
            options = [one._replace(temperature=0.0) for one in options]
            write(slots, [{"temperature": 0.0}] * len(options))
        placed, columns = pools_of(logits_options, whole, rng)
        if pools:
            write(
                slots,
                [
                    {**columns_of(one), **row}
                    for one, row in zip(logits_options, columns, strict=True)
                ],
            )
            slots = replace(slots, pools=placed)
        else:
            write(slots, [dict.fromkeys(POOL_ROWS, POISON)] * len(logits_options))
            logits_options = [LogitsOptions()] * len(logits_options)
        return cls(
            batch.replaced(rows=rows, slots=slots, options=options),
            placed_rows(rows, batch, logits_options, drafted if drafts else None),
        )

    @property
    def logits(self) -> torch.Tensor:
        return self.batch.logits

    @property
    def options(self) -> list[Options]:
        return self.batch.options

    def tokens(self, backend: Backend) -> torch.Tensor:
        return self.batch.tokens(backend)

    def sampled_positions(self) -> list[tuple[int, int]]:
        return self.batch.sampled_positions()

    def edited(self) -> list[list[float]]:
        """Rows after logits processing."""
        cut = self.batch.vocab_ids
        ids = None if cut is None else cut.tolist()
        rows = self.logits.double().tolist()
        return [edits.edited(row, place, ids) for row, place in zip(rows, self.places, strict=True)]

    def processed(self) -> Batch:
        """The batch after logits processing, without pools."""
        shape = self.logits.shape
        values = torch.tensor(self.edited(), dtype=torch.float64, device=DEVICE).reshape(shape)
        slots = replace(self.batch.slots, pools=None)
        return self.batch.replaced(logits=values.float(), slots=slots)

    def example(self) -> list[int]:
        cut = self.batch.vocab_ids
        ids = None if cut is None else cut.tolist()
        options = [
            one._replace(**{n: example.rounded(getattr(one, n)) for n in ROUNDED})
            for one in self.options
        ]
        return [
            example.draw(row, options[request], index, self.batch.role, ids)
            for row, (request, index) in zip(self.edited(), self.sampled_positions(), strict=True)
        ]

    def undecided(self) -> torch.Tensor:
        return self.processed().undecided()


def draft_of(rng: random.Random, ids: list[int], dtype: torch.dtype) -> int:
    """Often one of few; sometimes of no vocabulary, or one that is only its own in 64 bits."""
    beyond = [2**31 - 1, -1] if dtype == torch.int32 else [2**32 + ids[0], 2**40, -1]
    return rng.choice((ids[0], ids[0], ids[-1], ids[len(ids) // 2], rng.choice(beyond)))


def random_logits_options(rng: random.Random, ids: list[int], whole: int) -> LogitsOptions:
    """Random options of one request; half of the ids are those of columns."""

    def some() -> list[int]:
        named = [rng.choice((rng.choice(ids), rng.randrange(whole))) for _ in range(8)]
        return named[: rng.randint(0, 8)]

    bias = allowed = counts = None
    if rng.random() < 0.5:
        bias = {token: rng.choice(NUMBERS) for token in some()}
        if rng.random() < 0.3:  # a host's own row
            bias = {token: rng.choice((*NUMBERS, -torch.inf, torch.inf)) for token in range(whole)}
            bias[rng.randrange(whole)] = torch.nan
    if rng.random() < 0.4:
        allowed = {*some(), rng.choice(ids)}
        if rng.random() < 0.3:
            allowed = set(range(whole)) - allowed
    if rng.random() < 0.7:
        counts = {token: rng.choice((0, 1, 1, 2, 3, 40000, 65534, 65535)) for token in some()}
    return LogitsOptions(
        bias=bias,
        allowed=allowed,
        counts=counts,
        seen=some(),
        repetition=rng.choice(FACTORS),
        presence=rng.choice((*[0.0] * 8, *NUMBERS, 3e38)),
        frequency=rng.choice((*[0.0] * 8, *NUMBERS, 3e38, -3e38)),
    )


def columns_of(logits_options: LogitsOptions) -> dict[str, float]:
    return {
        "repetition_penalty": logits_options.repetition,
        "presence_penalty": logits_options.presence,
        "frequency_penalty": logits_options.frequency,
    }


def placed_rows(
    rows: LogitRows,
    batch: Batch,
    logits_options: list[LogitsOptions],
    drafted: list[list[int]] | None,
) -> list[Place]:
    """The request, token index and previous drafts of every row."""
    places: list[Place] = []
    for row, (request, index) in enumerate(batch.sampled_positions()):
        before: list[int] = []
        if drafted is not None and request >= rows.num_contexts:
            number = (row - rows.num_contexts) % rows.width
            before = drafted[request - rows.num_contexts][: rows.column + number]
        places.append(Place(logits_options[request], index, before))
    return places


def apart(values: list[list[int]], width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows with others between them."""
    wide = torch.full((len(values), width + 3), 0, dtype=dtype)
    for row, value in enumerate(values):
        wide[row, :width] = torch.tensor(value, dtype=dtype)
    return wide.to(DEVICE)[:, :width]


def write(slots: SlotRows, values: list[dict[str, float]]) -> None:
    """Change columns of the requests."""
    for request, named in enumerate(values):
        for name, value in named.items():
            bits = slots.columns[name].bits(value)
            first = slots.columns.offset(name)
            slots.table[int(slots.slot_ids[request]), first : first + len(bits)] = torch.tensor(
                bits, dtype=torch.int32, device=DEVICE
            )
    derive_logit_change(slots, len(values))


@triton.jit
def edited_kernel(
    logits_ptr,
    ids_ptr,
    draft_ptr,
    table_ptr,
    slot_ptr,
    bias_ptr,
    allowed_ptr,
    count_ptr,
    seen_ptr,
    out_ptr,
    num_contexts,
    width,
    column,
    vocab,
    pool_vocab,
    row_stride,
    draft_stride,
    table_stride,
    slot_stride,
    num_slots,
    HAS_DRAFTS: tl.constexpr,
    SIZE: tl.constexpr,
    BY_BLOCK: tl.constexpr,
):
    """Load a block of one row as the sampling kernels do."""
    row = tl.program_id(0).to(tl.int64)
    request, offset, slot = locate_row(
        row, num_contexts, width, table_ptr, table_stride, slot_ptr, slot_stride, num_slots
    )
    pools = Pools(bias_ptr, allowed_ptr, count_ptr, seen_ptr, pool_vocab)
    draft_ptr += tl.maximum(request - num_contexts, 0) * draft_stride
    num_before = tl.where(request < num_contexts, 0, offset + column) if HAS_DRAFTS else 0
    first = tl.program_id(1) * SIZE
    columns = first + tl.arange(0, SIZE)
    inside = columns < vocab
    ids = tl.load(ids_ptr + columns, mask=inside, other=0)
    x = tl.load(logits_ptr + row * row_stride + columns, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    processing = load_processing(slot, pools, draft_ptr, num_before)
    if BY_BLOCK:
        block = load_block_processing(first, vocab, processing, SIZE)
        shared = load_shared_processing(processing, first, first + SIZE)
        row_ptr = logits_ptr + row * row_stride
        x = process_block(x, block, first, vocab, row_ptr, processing, shared)
        x = tl.where(x == x, x, float("-inf"))  # NaN may remain, and kernels never select it
    else:
        x = process_values(x, ids, inside, processing)
    tl.store(out_ptr + row * vocab + columns, x, mask=inside)


def loaded(case: EditedBatch, *, by_block: bool = False) -> torch.Tensor:
    """Rows [N, V] float32 as kernels load them: in one, up to the largest block of a kernel, or by
    blocks of two words, whose columns are token ids."""
    rows, slots, logits = case.batch.rows, case.batch.slots, case.logits
    assert slots.pools is not None
    pools, vocab = slots.pools, logits.shape[1]
    ids = torch.arange(vocab, dtype=torch.int32, device=DEVICE)
    out = torch.full(logits.shape, float(POISON), device=DEVICE)
    size = 64 if by_block else min(triton.next_power_of_2(vocab), MOST_COLUMNS)
    edited_kernel[(len(logits), -(-vocab // size))](
        logits,
        ids if case.batch.vocab_ids is None else case.batch.vocab_ids,
        ids if rows.drafts is None else rows.drafts,
        slots.table,
        slots.slot_ids,
        pools.bias,
        pools.allowed,
        pools.counts,
        pools.seen,
        out,
        rows.num_contexts,
        rows.width,
        rows.column,
        vocab,
        pools.vocab_size,
        logits.stride(0),
        0 if rows.drafts is None else rows.drafts.stride(0),
        slots.table.stride(0),
        slots.slot_ids.stride(0),
        slots.table.shape[0],
        HAS_DRAFTS=rows.drafts is not None,
        SIZE=size,
        BY_BLOCK=by_block,
    )
    return out
