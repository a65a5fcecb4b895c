"""Cases of the end-to-end benchmark: batch sizes, and configurations per batch size."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, replace
from typing import Any

from integration.bench.case import BenchmarkError
from integration.bench.e2e.request_kinds import GREEDY, check_kinds
from mtp_plugin.config import MAX_DRAFT_LEN
from mtp_plugin.errors import expect

BATCHES = (1, 8, 32, 128)
QUICK_BATCHES = (1, 2)
KS = (1, 3)
EAGLE, VANILLA, OFF = "eagle", "vanilla", "off"
WORKERS = (EAGLE, VANILLA)
ACCEPTANCE_RATE = 0.8
"""Default acceptance rate of a draft whose predecessors were accepted."""


@dataclass(frozen=True)
class Synthetic:
    """Configuration of synthetic acceptance."""

    rates: tuple[float, ...]
    """Entry i: share of steps that accept drafts 1..i+1; a single rate applies to every draft."""
    seed: int

    def shares(self, k: int) -> tuple[float, ...]:
        """Return the share of steps that accept drafts 1..i, for i = 1..k.

        Raises:
            BenchmarkError: there are fewer shares than drafts.
        """
        if len(self.rates) == 1:
            return tuple(self.rates[0] ** i for i in range(1, k + 1))
        expect(
            len(self.rates) >= k,
            BenchmarkError,
            f"--acceptance: expected one rate, or a share for each of {k} drafts, got "
            f"{len(self.rates)}",
        )
        return self.rates[:k]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def acceptance_kind(synthetic: Synthetic | None) -> str:
    """Return how drafts were accepted: real or synthetic."""
    return "real" if synthetic is None else "synthetic"


@dataclass(frozen=True)
class E2ECase:
    """One configuration of a batch."""

    batch: int
    worker: str = OFF
    k: int = 0

    @property
    def is_off(self) -> bool:
        """Whether MTP is off."""
        return self.worker == OFF

    @property
    def way(self) -> str:
        """Worker and draft length, without the batch size."""
        return OFF if self.is_off else f"{self.worker}-k{self.k}"

    @property
    def label(self) -> str:
        """Name of the case, which ``--filter`` matches."""
        return f"{self.way}/b{self.batch}"

    @property
    def off(self) -> E2ECase:
        """The same batch without MTP."""
        return replace(self, worker=OFF, k=0)


@dataclass(frozen=True)
class E2EOptions:
    """Options of the command line; None: the default."""

    batches: tuple[int, ...] | None = None
    ks: tuple[int, ...] | None = None
    workers: tuple[str, ...] | None = None
    isl: int | None = None
    osl: int | None = None
    seed: int = 0
    acceptance: tuple[float, ...] | None = None
    """Synthetic acceptance; None: real with trained weights, else a default."""
    draft_vocab: int | None = None
    """Size of the draft vocabulary; None: all tokens."""
    graphs: bool = True
    fused: bool | None = None
    text: bool = False
    phases: bool = True
    transformers: bool = True
    quick: bool = False
    only: str | None = None
    kinds: tuple[str, ...] = (GREEDY,)
    """Kinds of requests, names of `REQUEST_KINDS`."""

    @property
    def input_tokens(self) -> int:
        """Tokens of each prompt."""
        return self.isl or (16 if self.quick else 128)

    @property
    def output_tokens(self) -> int:
        """Output tokens of each request."""
        return self.osl or (24 if self.quick else 256)

    def check(self) -> None:
        """Check the options.

        Raises:
            BenchmarkError: a number is out of range, or a worker, rate or name of `--ask` is
                invalid.
        """
        check_kinds(self.kinds, is_synthetic=self.acceptance is not None)
        for name, numbers in (
            ("batch", self.batches),
            ("k", self.ks),
            ("isl", (self.isl,) if self.isl is not None else None),
            ("osl", (self.osl,) if self.osl is not None else None),
        ):
            low = [number for number in numbers or () if number < 1]
            expect(not low, BenchmarkError, f"--{name}: expected at least 1, got {low[:1]}")
        expect(
            -(2**63) <= self.seed < 2**63,
            BenchmarkError,
            f"--seed: expected an integer of at most 64 bits, got {self.seed}",
        )
        high = [k for k in self.ks or () if k > MAX_DRAFT_LEN]
        expect(not high, BenchmarkError, f"--k: expected at most {MAX_DRAFT_LEN}, got {high[:1]}")
        odd = [worker for worker in self.workers or () if worker not in WORKERS]
        expect(not odd, BenchmarkError, f"--worker: expected {' or '.join(WORKERS)}, got {odd[:1]}")
        rates = self.acceptance or ()
        falling = all(after <= before for before, after in itertools.pairwise(rates))
        expect(
            falling and all(0 <= rate <= 1 for rate in rates),
            BenchmarkError,
            f"--acceptance: expected shares from 0 to 1 that do not rise, got {list(rates)}",
        )

    def synthetic(self, *, is_trained: bool) -> Synthetic | None:
        """Return the synthetic acceptance; None: it is real."""
        if self.acceptance is None and is_trained:
            return None
        return Synthetic(self.acceptance or (ACCEPTANCE_RATE,), self.seed)


def cases_of(options: E2EOptions, num_mtp_layers: int) -> tuple[list[E2ECase], list[str]]:
    """Return (cases, each batch size without MTP first; labels of cases that cannot run).

    Raises:
        BenchmarkError: no case is selected.
    """
    options.check()
    batches = options.batches or (QUICK_BATCHES if options.quick else BATCHES)
    ways = [(worker, k) for worker in options.workers or WORKERS for k in options.ks or KS]
    cases: list[E2ECase] = []
    skipped: list[str] = []
    for batch in batches:
        wanted = [E2ECase(batch, worker, k) for worker, k in ways]
        if options.only:
            wanted = [case for case in wanted if options.only in case.label]
        # vanilla takes one layer per draft
        able = [c for c in wanted if c.worker != VANILLA or c.k <= num_mtp_layers]
        skipped += [case.label for case in wanted if case not in able]
        off = E2ECase(batch)
        if able or (options.only and options.only in off.label):
            cases += [off, *able]
    expect(
        bool(cases),
        BenchmarkError,
        f"--filter: no case that can run has {options.only!r} in its name"
        if options.only
        else f"no case can run: vanilla needs a layer per draft, there are {num_mtp_layers}",
    )
    return cases, skipped
