"""Batches for rejection sampling with every verification method and options at every edge."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import GREEDY_BELOW, LogitRows
from mtp_plugin.ops.logits_processor_state import LogitsProcessorState
from mtp_plugin.ops.sampling import (
    DRAFT_COLUMNS,
    STEP_COLUMN,
    TRUNCATION_SIZE,
    DraftedBy,
    ProposedDrafts,
    RejectionResult,
    TargetSamples,
    VerifiedBy,
    keep_draft_probs,
    rejection_sample,
    sample_tokens,
)
from mtp_plugin.ops.step import SlotRows
from mtp_plugin.requests.columns import NO_ROW, POOL_ROWS, TopPMass
from mtp_plugin.requests.options import MAX_BAD_WORD_LEN, MAX_BAD_WORDS
from tests.op_arguments import poisoned_memory
from tests.ops.on_device import DEVICE, vector
from tests.ops.sampling.example import Options
from tests.ops.sampling.rejection import example
from tests.ops.slots import column, derive_logit_change, held, on_copy, slot_rows
from tests.ops.top_k.rows import strided

READ = (
    "verification",
    "draft_sampling",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "top_p_mass",
    "seed",
    "draft_step",
)
COLUMNS = (*DRAFT_COLUMNS, STEP_COLUMN)
WAYS = [
    (VerifiedBy.COUPLED, DraftedBy.COUPLED),
    (VerifiedBy.COUPLED, DraftedBy.GREEDY),
    *[(VerifiedBy.REJECTION, DraftedBy.PLAIN)] * 4,
    (VerifiedBy.REJECTION, DraftedBy.GREEDY),
    *[(VerifiedBy.BLOCK, DraftedBy.PLAIN)] * 6,
    (VerifiedBy.BLOCK, DraftedBy.GREEDY),
]
NONE = dict.fromkeys(POOL_ROWS, NO_ROW)
ROW_KINDS = (*["like"] * 12, *["smooth"] * 3, "flat", "flat", "infinite", "dead", "masked")


@dataclass(frozen=True)
class Batch:
    """Contexts and generations after a step that drafted."""

    logits: torch.Tensor  # [C + G*(K+1), V]
    draft_logits: torch.Tensor  # [K, R, V']
    rows: LogitRows
    slots: SlotRows
    draft_lens: torch.Tensor | None
    vocab_ids: torch.Tensor | None
    forced: bool = False  # some rows force an id, of some drafts the draft's
    by_block: bool = True  # enables block verification

    @classmethod
    def of(
        cls,
        seed: int,
        vocab: int,
        *,
        contexts: int = 1,
        generations: int = 5,
        draft_len: int = 3,
        dtype: torch.dtype = torch.float32,
        gap: int = 0,
        cut: bool = False,
        lens: bool = True,
        edits: bool = False,
        forced: bool = False,
    ) -> Batch:
        rng = random.Random(seed)
        noise = torch.Generator().manual_seed(seed)
        requests = contexts + generations
        slots = slot_rows(
            [_values(rng, vocab) for _ in range(requests)],
            COLUMNS,
            slots=rng.sample(range(requests + 3), requests),
            num_slots=requests + 4,  # the last one is unused
            gap=gap,
        )
        if edits:
            slots = replace(slots, pools=_pools(rng, requests, vocab))
            for name in ("bias_row", "allowed_row", "count_row"):
                given = column(slots, name)
                given[slots.slot_ids[:requests]] = vector(
                    [rng.choice((NO_ROW, row, row)) for row in range(requests)], torch.int32
                )
            derive_logit_change(slots, requests)
        num_rows = contexts + generations * (draft_len + 1)
        logits = torch.randn(num_rows, vocab, generator=noise) * 2
        of_drafts = torch.randn(draft_len, requests, vocab, generator=noise) * 2
        for place in range(num_rows):
            kind = rng.choice(ROW_KINDS)
            generation, offset = divmod(max(place - contexts, 0), draft_len + 1)
            if kind == "like" and place >= contexts and offset < draft_len:
                other = of_drafts[offset, contexts + generation]
                of_drafts[offset, contexts + generation] = logits[place] + 0.3 * other
            elif kind == "flat":
                logits[place] = logits[place] * 0.05
            elif kind == "infinite":
                logits[place, torch.randint(0, vocab, (2,), generator=noise)] = torch.inf
            elif kind == "dead":
                logits[place] = rng.choice((-torch.inf, torch.nan))
            elif kind == "masked":
                logits[place, torch.rand(vocab, generator=noise) < 0.5] = -torch.inf
        ids = sorted(rng.sample(range(vocab), max(vocab * 2 // 3, 1)))
        vocab_ids = vector(ids, torch.int32) if cut else None
        if cut:
            of_drafts = of_drafts[:, :, ids]
        positions = [rng.randrange(2**20) for _ in range(requests)]
        draft_lens = [
            rng.choice((draft_len, draft_len, rng.randint(0, draft_len)))
            for _ in range(generations)
        ]
        return cls(
            strided(logits.to(dtype), gap),
            of_drafts.to(dtype).to(DEVICE),
            LogitRows(contexts, draft_len + 1, vector(positions)),
            slots,
            vector(draft_lens, torch.int32) if lens else None,
            vocab_ids,
            forced,
        )

    @property
    def draft_len(self) -> int:
        return self.rows.width - 1

    @property
    def vocab(self) -> int:
        return self.logits.shape[1]

    def drafted(self, backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
        """The drafts of every request [R, K] and their probabilities [S, K, V]."""
        requests = self.rows.num_requests
        pool = torch.zeros(len(self.slots.table), self.draft_len, self.vocab, device=DEVICE)
        drafts = torch.zeros(requests, self.draft_len, dtype=torch.int32, device=DEVICE)
        for place in range(self.draft_len):
            rows = LogitRows(0, 1, self.rows.positions, column=place, drafts=drafts)
            logits = self.draft_logits[place]
            truncation = torch.full((requests, TRUNCATION_SIZE), torch.nan, device=DEVICE)
            with poisoned_memory():
                expected = sample_tokens(
                    logits,
                    rows,
                    self.slots,
                    as_drafts=True,
                    vocab_ids=self.vocab_ids,
                    truncation=truncation,
                    backend=backend,
                )
                keep_draft_probs(
                    logits,
                    rows,
                    self.slots,
                    truncation,
                    pool,
                    vocab_ids=self.vocab_ids,
                    backend=backend,
                )
            drafts[:, place] = expected.clamp_min(0)
        return drafts, pool

    def verify(
        self, drafts: torch.Tensor, pool: torch.Tensor | None, backend: Backend
    ) -> tuple[RejectionResult, torch.Tensor]:
        """Verify drafts; returns the result and the steps of all slots after it."""
        slots = on_copy(self.slots)
        mine = drafts[self.rows.num_contexts :]
        rows = replace(self.rows, drafts=mine)
        truncation = torch.full((len(self.logits), TRUNCATION_SIZE), torch.nan, device=DEVICE)
        forced_ids = self.forced_ids(mine) if self.forced else None
        with poisoned_memory():
            choices = sample_tokens(
                self.logits, rows, slots, truncation=truncation, backend=backend
            )
            if forced_ids is not None:
                choices = torch.where(forced_ids >= 0, forced_ids, choices)
            verdict = rejection_sample(
                self.logits,
                rows,
                slots,
                ProposedDrafts(mine.reshape(-1), pool, self.draft_lens),
                TargetSamples(choices, truncation, forced_ids),
                by_block=self.by_block,
                backend=backend,
            )
        return verdict, slots.table[:, slots.columns.offset(STEP_COLUMN.name)]

    def forced_ids(self, drafts: torch.Tensor) -> torch.Tensor:
        """Of every row the only id that it allows, -1: any [N] int32; drafts [G, K]."""
        rng = random.Random(len(self.logits))
        expected = [
            rng.choice((-1, rng.randrange(self.vocab))) for _ in range(self.rows.num_contexts)
        ]
        for mine in drafts.tolist():
            for draft in (*mine, rng.randrange(self.vocab)):
                other = rng.randrange(self.vocab)
                expected.append(rng.choice((-1, -1, draft, draft, other)))
        return vector(expected, torch.int32)

    def target_tokens(self, drafts: torch.Tensor, backend: Backend) -> torch.Tensor:
        """Target tokens [N], before verification."""
        mine = drafts[self.rows.num_contexts :]
        rows = replace(self.rows, drafts=mine)
        choices = sample_tokens(self.logits, rows, on_copy(self.slots), backend=backend)
        if not self.forced:
            return choices
        forced_ids = self.forced_ids(mine)
        return torch.where(forced_ids >= 0, forced_ids, choices)

    def example(self, drafts: torch.Tensor, pool: torch.Tensor) -> list[example.Verdict | None]:
        """Expected verdict per generation; None: another verification method."""
        contexts, width = self.rows.num_contexts, self.rows.width
        logits = self.logits[contexts:].double().view(-1, width, self.vocab).tolist()
        forced = [[-1] * width for _ in logits]
        if self.forced:
            forced = self.forced_ids(drafts[contexts:])[contexts:].view(-1, width).tolist()
        expected: list[example.Verdict | None] = []
        for generation, rows in enumerate(logits):
            request = contexts + generation
            method, drafted_by, temperature, *truncation, mass, seed, step = (
                held(self.slots, request, name) for name in READ
            )
            if method == VerifiedBy.COUPLED or temperature < GREEDY_BELOW:
                expected.append(None)
                continue
            mine = drafts[request].tolist()
            q = [[float(token == draft) for token in range(self.vocab)] for draft in mine]
            if drafted_by == DraftedBy.PLAIN:
                q = pool[self.slots.slot_ids[request]].double().tolist()
            options = Options(temperature, *truncation, top_p_mass=mass)
            p = [example.shares_of(row, options) for row in rows]
            p, q = example.forced_shares(p, q, mine, forced[generation])
            number = self.draft_len
            if self.draft_lens is not None:
                number = int(self.draft_lens[generation])
            by_block = method == VerifiedBy.BLOCK
            noise = example.Noise(
                seed=seed[0] % 2**32 | seed[1] % 2**32 << 32,
                index=int(self.rows.positions[request]) + 1,
                step=step if by_block else 0,
            )
            there = example.those_there(q, mine, number)
            expected.append(example.verify(p, q, there, noise, by_block=by_block))
        return expected

    def without_lens(self) -> Batch:
        return replace(self, draft_lens=None)

    def without_block(self) -> Batch:
        """The batch with rejection in place of block verification, which is not enabled."""
        slots = on_copy(self.slots)
        method = column(slots, DRAFT_COLUMNS[0].name)
        method[method == VerifiedBy.BLOCK] = int(VerifiedBy.REJECTION)
        return replace(self, slots=slots, by_block=False)


def _values(rng: random.Random, vocab: int) -> dict[str, object]:
    method, drafted_by = rng.choice(WAYS)
    return {
        **NONE,
        "verification": method,
        "draft_sampling": drafted_by,
        "draft_step": rng.randrange(50),
        "temperature": rng.choice((0.0, 0.6, 0.9, 0.9, 1.0, 1.0, 1.3, 5.0)),
        "top_k": rng.choice((0, 0, 2, 5, 60, 100, max(vocab // 2, 1))),
        "top_p": rng.choice((1.0, 1.0, 0.9, 0.5)),
        "min_p": rng.choice((0.0, 0.0, 0.05)),
        "top_p_mass": rng.choice([*TopPMass]),
        "repetition_penalty": rng.choice((1.0, 1.5)),
        "presence_penalty": rng.choice((0.0, 0.8)),
        "frequency_penalty": rng.choice((0.0, 0.6)),
        "seed": [rng.randrange(-(2**31), 2**31) for _ in range(2)],
    }


def _pools(rng: random.Random, requests: int, vocab: int) -> LogitsProcessorState:
    """A row per request, of every kind of edit; at least one id is allowed."""
    noise = torch.Generator().manual_seed(rng.getrandbits(31))
    words = -(-vocab // 32)
    allowed = torch.rand(requests, words * 32, generator=noise) < 0.8
    allowed[:, 0] = True
    allowed[:, vocab:] = False
    seen = torch.rand(requests, words * 32, generator=noise) < 0.2
    counts = torch.randint(1, 4, (requests, vocab), generator=noise) * seen[:, :vocab]
    bits = 1 << torch.arange(32)
    of_words = [
        (flags.view(requests, words, 32) * bits).sum(dim=2).to(torch.int32)
        for flags in (allowed, seen)
    ]
    return LogitsProcessorState(
        bias=torch.randn(requests, vocab, generator=noise).to(DEVICE),
        allowed=torch.cat([of_words[0], allowed.sum(1, keepdim=True).to(torch.int32)], 1).to(
            DEVICE
        ),
        counts=counts.to(DEVICE, torch.int16),
        seen=of_words[1].to(DEVICE),
        words=torch.full(
            (requests, MAX_BAD_WORDS, MAX_BAD_WORD_LEN), -1, dtype=torch.int32, device=DEVICE
        ),
    )
