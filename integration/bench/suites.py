"""Select the cases of a run from its options."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from integration.bench.bookkeeping_cases import (
    STATE,
    TINY_STATE,
    bookkeeping_cases,
    state_copy_case,
)
from integration.bench.case import BenchmarkError, Case
from integration.bench.op_cases import MIXTURE, TINY_MIXTURE, mixed_case, op_cases
from integration.bench.sampling_cases import sampling_cases
from integration.bench.shapes import (
    BATCHES,
    DTYPES,
    QUICK_BATCHES,
    REFERENCE,
    TINY,
    TINY_BATCHES,
    Shape,
    variations,
)
from integration.bench.step_cases import kind_cases, step_cases, target_shift_case
from mtp_plugin.config import MAX_DRAFT_LEN
from mtp_plugin.errors import expect

MIXED_BATCH = 64
MAX_SIZE = 2**24
"""Maximum of one dimension; larger ones exceed the memory of any device."""
LEAST_VOCAB = 16
"""Minimum vocabulary: the top-k of relaxed acceptance and the two thinking tokens."""


@dataclass(frozen=True)
class Options:
    """Options of the command line; None: the default of the machine."""

    batches: tuple[int, ...] | None = None
    hidden: int | None = None
    vocab: int | None = None
    k: int | None = None
    dtype: str | None = None
    quick: bool = False
    only: str | None = None
    tiny: bool = False

    def base_shapes(self) -> list[Shape]:
        """One per batch size.

        Raises:
            BenchmarkError: a size is out of range, or the dtype is unknown.
        """
        base = TINY if self.tiny else REFERENCE
        shape = Shape(
            batch=1,
            hidden=base.hidden if self.hidden is None else self.hidden,
            vocab=base.vocab if self.vocab is None else self.vocab,
            k=base.k if self.k is None else self.k,
            dtype=self.dtype or base.dtype,
        )
        for name, size, least in (
            ("hidden", shape.hidden, 1),
            ("vocab", shape.vocab, LEAST_VOCAB),
            ("k", shape.k, 1),
        ):
            expect(
                size >= least,
                BenchmarkError,
                f"--{name}: expected at least {least}, got {size}",
            )
            expect(
                size <= MAX_SIZE,
                BenchmarkError,
                f"--{name}: expected at most {MAX_SIZE}, got {size}",
            )
        expect(
            shape.k <= MAX_DRAFT_LEN,
            BenchmarkError,
            f"--k: expected at most {MAX_DRAFT_LEN}, got {shape.k}",
        )
        expect(
            shape.dtype in DTYPES,
            BenchmarkError,
            f"--dtype: expected one of {', '.join(DTYPES)}, got {shape.dtype}",
        )
        batches = self.batches or (
            TINY_BATCHES if self.tiny else QUICK_BATCHES if self.quick else BATCHES
        )
        expect(
            min(batches) >= 1,
            BenchmarkError,
            f"--batch: expected sizes of at least 1, got {min(batches)}",
        )
        expect(
            max(batches) <= MAX_SIZE,
            BenchmarkError,
            f"--batch: expected sizes of at most {MAX_SIZE}, got {max(batches)}",
        )
        return [replace(shape, batch=batch) for batch in batches]

    @property
    def with_variations(self) -> bool:
        """Whether other sizes are measured too: only if no size was requested."""
        chosen = (self.hidden, self.k, self.dtype)
        return not self.quick and not self.tiny and all(size is None for size in chosen)


def cases_of(kind: str, options: Options, device: torch.device) -> list[Case]:
    """Return the selected cases of ``step`` or ``ops``.

    Raises:
        BenchmarkError: options that no case fits.
    """
    shapes = options.base_shapes()
    suite = _step_suite if kind == "step" else _op_suite
    cases = suite(shapes, options, device)
    if options.only:
        cases = [case for case in cases if options.only in case.label]
    expect(bool(cases), BenchmarkError, f"--filter: no case has {options.only!r} in its name")
    return cases


def _step_suite(shapes: list[Shape], options: Options, device: torch.device) -> list[Case]:
    cases = [case for shape in shapes for case in step_cases(shape, device)]
    cases += [target_shift_case(shape, device) for shape in shapes]
    if not options.tiny:  # each interpreted step takes seconds
        cases += [case for shape in shapes for case in kind_cases(shape, device)]
    if options.with_variations:
        cases += [case for shape in shapes for case in step_cases(shape, device, write_limits=True)]
        for shape in shapes:
            for varied in variations(shape):
                cases += step_cases(varied, device)
    return cases


def _op_suite(shapes: list[Shape], options: Options, device: torch.device) -> list[Case]:
    mixture, state = (TINY_MIXTURE, TINY_STATE) if options.tiny else (MIXTURE, STATE)
    mixed = replace(shapes[0], batch=mixture.num_contexts + 1 if options.tiny else MIXED_BATCH)
    cases = [case for shape in shapes for case in op_cases(shape, device)]
    cases += [case for shape in shapes for case in sampling_cases(shape, device)]
    cases.append(mixed_case(mixed, device, mixture))
    cases += [case for shape in shapes for case in bookkeeping_cases(shape, device)]
    cases += [state_copy_case(shape, device, state) for shape in shapes]
    if options.with_variations:
        for shape in shapes:
            cases += op_cases(replace(shape, dtype="bfloat16"), device)
    return cases
