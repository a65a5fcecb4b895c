"""A language in which the next token depends on the last one alone, decoded by thousands at once.

Everything between logits and tokens is the package's own: slots, verifier and draft rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import ThinkingRule
from mtp_plugin.ops.logits_processor_state import DraftMask, LogitsProcessorState
from mtp_plugin.ops.sampling import DraftedBy, VerifiedBy
from mtp_plugin.ops.step import Accepted, DraftOutput, SamplingKind, StepLayout
from mtp_plugin.ops.token_history import update_token_history
from mtp_plugin.requests.columns import LOGIT_CHANGE
from mtp_plugin.requests.stopping import StopRule
from mtp_plugin.requests.thinking import ThinkingEnd
from mtp_plugin.speculative.drafting import make_verification_inputs
from mtp_plugin.speculative.host import DecodingOptions, HostStep, RequestFacts
from mtp_plugin.speculative.state import SlotTable
from mtp_plugin.speculative.state.logits_processor_allocator import LogitsProcessorAllocator
from mtp_plugin.speculative.verification import (
    DraftPass,
    Verifier,
    make_modes,
)
from tests.ops.on_device import DEVICE
from tests.ops.slots import derive_logit_change

IN_FRONT = (2, 1)
"""What every prompt begins with."""
PROMPT_LEN = len(IN_FRONT) + 1


@dataclass(frozen=True)
class Language:
    """Logits of the target and of the drafter after every token."""

    target: torch.Tensor  # [V, V]
    drafter: torch.Tensor  # [V, V]
    first: int = 0
    """The token that every prompt ends with."""
    drafts_at: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """[V]: by column, logits of drafts there after any token."""

    @classmethod
    def of(cls, seed: int, vocab: int, *, likeness: float = 0.7, spread: float = 1.5) -> Language:
        """A random one; the drafter is as right as ``likeness`` says."""
        noise = torch.Generator().manual_seed(seed)
        target = torch.randn(vocab, vocab, generator=noise) * spread
        other = torch.randn(vocab, vocab, generator=noise) * spread
        return cls(target, likeness * target + (1 - likeness) * other)


@dataclass(frozen=True)
class Ways:
    """Verification method, draft sampling and options of some requests."""

    verification: str
    draft_sampling: str
    options: Mapping[str, float] = field(default_factory=lambda: {"temperature": 1.0})
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_ids: tuple[int, ...] = ()
    """None of them is emitted before ``min_tokens``; none ends the text."""
    min_tokens: int = 0
    thinking_token_budget: int | None = None

    def facts(self, number: int) -> RequestFacts:
        """Of a request."""
        stop = StopRule(
            max_length=100,
            prompt_len=PROMPT_LEN,
            min_tokens=self.min_tokens,
            end_ids=self.stop_ids,
        )
        others = {
            "logit_bias": self.logit_bias,
            "bad_words": self.bad_words,
            "min_tokens": self.min_tokens,
            "thinking_token_budget": self.thinking_token_budget,
        }
        options = {**self.options, **{name: value for name, value in others.items() if value}}
        if "frequency_penalty" in options:
            options["prompt_ignore_length"] = PROMPT_LEN
        return RequestFacts(number, stop, options=options)


def texts(
    language: Language,
    ways: Sequence[Ways],
    *,
    number: int,
    draft_len: int,
    length: int,
    seed: int = 0,
    backend: Backend = Backend.TORCH,
    vocab_ids: torch.Tensor | None = None,
    thinking_end: ThinkingEnd | None = None,
    absent: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What so many requests of each way emit, each with a seed of its own, all in one batch.

    Args:
        vocab_ids: [V'] int32, ascending: ids that are drafted.
        thinking_end: what budgets of thinking go by; None: there are none.
        absent: of a step's drafts a random number is present, from none to all.

    Returns:
        [requests, length] tokens, and [requests] number of drafts accepted in the first step.
    """
    config = MTPDecodingConfig(
        max_draft_len=draft_len, mtp={"verification": ["coupled", "rejection", "block"]}
    )
    requests, vocab = number * len(ways), language.target.shape[0]
    thinking = None if thinking_end is None else ThinkingRule.of(thinking_end, DEVICE)
    verifier = Verifier(make_modes(DecodingOptions.read(config), DEVICE), thinking)
    columns = [column for mode in verifier.modes for column in mode.columns]
    table = SlotTable(requests + 1, columns, DEVICE)
    prompt = (*IN_FRONT, language.first)
    rows = LogitsProcessorAllocator(len(ways), vocab, DEVICE)
    needs_rows = False
    for place, way in enumerate(ways):
        mine = slice(place * number, (place + 1) * number)
        facts = way.facts(place)
        values = {
            "verification": VerifiedBy[way.verification.upper()],
            "draft_sampling": DraftedBy[way.draft_sampling.upper()],
            "prompt_len": PROMPT_LEN,
            "min_tokens": way.min_tokens,
            **way.options,
        }
        if thinking_end is not None and way.thinking_token_budget is not None:
            budget = way.thinking_token_budget
            values["thinking_token_budget"] = budget
            values["num_thinking"], values["end_progress"] = thinking_end.progress_after(
                prompt, PROMPT_LEN, budget
            )
        for name, value in values.items():
            table.column(name)[mine] = value
        stop_ids = torch.tensor(way.stop_ids, dtype=torch.int32, device=DEVICE)
        table.column("stop_ids")[mine, : len(stop_ids)] = stop_ids
        table.column("recent")[mine, -PROMPT_LEN:] = torch.tensor(prompt, dtype=torch.int32)
        # a row of each pool for every request, that of the first one of its way
        for name in rows.allocate(place, facts, prompt) or rows.allocate_for_draft_mask(facts):
            needs_rows = True
            table.column(name)[mine] = torch.arange(number, dtype=torch.int32) + mine.start
        derive_logit_change(table.rows_of(torch.tensor([mine.start])), 1)
        table.column(LOGIT_CHANGE)[mine] = table.column(LOGIT_CHANGE)[mine.start].clone()
    noise = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**31), 2**31, (requests, 2), generator=noise)
    table.column("seed")[:requests] = seeds.to(torch.int32).to(DEVICE)
    manager = SimpleNamespace(
        draft_probs=torch.zeros(requests + 1, draft_len, vocab, device=DEVICE)
    )
    slot_ids = torch.arange(requests, device=DEVICE)
    pools, draft_mask = _of_all(rows, number) if needs_rows else (None, None)
    if not any(way.bad_words or way.min_tokens for way in ways):
        draft_mask = None
    decoder = _Decoder(
        language,
        verifier,
        manager,
        table,
        slot_ids,
        pools,
        draft_mask,
        draft_len,
        backend,
        vocab_ids,
        lens=torch.Generator().manual_seed(seed) if absent else None,
    )
    return decoder.run(length)


def _of_all(rows: LogitsProcessorAllocator, number: int) -> tuple[LogitsProcessorState, DraftMask]:
    """Pools in which every row is repeated ``number`` times."""
    pools = LogitsProcessorState(
        **{k: v.repeat_interleave(number, 0) for k, v in vars(rows.pools).items()}
    )
    hidden = rows.draft_mask.masked_ids[:-1].repeat_interleave(number, 0)
    return pools, DraftMask(
        rows.draft_mask.allowed.repeat_interleave(number, 0),
        torch.cat([hidden, rows.draft_mask.masked_ids[-1:]]),
    )


@dataclass
class _Decoder:
    language: Language
    verifier: Verifier
    manager: Any
    table: SlotTable
    slot_ids: torch.Tensor
    pools: LogitsProcessorState | None
    draft_mask: DraftMask | None
    draft_len: int
    backend: Backend
    vocab_ids: torch.Tensor | None
    lens: torch.Generator | None
    """Generator of draft lengths; None: every draft is present."""

    def run(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        requests, k = len(self.slot_ids), self.draft_len
        text = torch.full((requests, length + k + 1), -1, device=DEVICE)
        live = torch.arange(requests, device=DEVICE)
        written = torch.zeros(requests, dtype=torch.int64, device=DEVICE)
        last = torch.full((requests,), self.language.first, device=DEVICE)
        nothing = torch.zeros(requests, dtype=torch.int32, device=DEVICE)
        step = self._step(live, last, written, None)
        if self.draft_mask is not None:  # what the prompt's last token leaves
            none = torch.full((requests, k + 1), -1, dtype=torch.int32, device=DEVICE)
            accepted = Accepted(none, nothing, nothing)
            positions = step.layout.first_logit_positions("prompts")
            update_token_history(accepted, step.sampling_slots(), positions, backend=self.backend)
        drafts = self._draft(step, nothing, last)
        num_accepted = None
        while True:
            step = self._step(live, last, written, drafts)
            rows = torch.cat([last.unsqueeze(1), drafts], dim=1)
            logits = self.language.target.to(DEVICE)[rows.long()].reshape(-1, self._vocab)
            accepted = self.verifier.verify(
                make_verification_inputs(step, logits), backend=self.backend
            )
            counts = accepted.num_accepted.long()
            num_accepted = counts - 1 if num_accepted is None else num_accepted
            places = written.unsqueeze(1) + torch.arange(k + 1, device=DEVICE)
            is_new = accepted.tokens >= 0
            places = torch.where(is_new, places.clamp_max(text.shape[1] - 1), text.shape[1] - 1)
            kept = torch.where(is_new, accepted.tokens.long(), -1)
            text[live] = text[live].scatter_reduce(1, places, kept, reduce="amax")
            written = written + counts
            goes_on = written < length
            if not goes_on.any():
                return text[:, :length].cpu(), num_accepted.cpu()
            last = accepted.last_tokens().long()
            drafts = self._draft(step, accepted.num_accepted, last)
            # what is long enough leaves the batch
            live, last, written, drafts = (x[goes_on] for x in (live, last, written, drafts))

    @property
    def _vocab(self) -> int:
        return self.language.target.shape[0]

    def _step(
        self,
        live: torch.Tensor,
        last: torch.Tensor,
        written: torch.Tensor,
        drafts: torch.Tensor | None,
    ) -> HostStep:
        k, requests = self.draft_len, len(last)
        if drafts is None:
            drafts = torch.zeros(requests, k, dtype=torch.int32, device=DEVICE)
        first = written + PROMPT_LEN - 1
        positions = (first.unsqueeze(1) + torch.arange(k + 1, device=DEVICE)).reshape(-1)
        none = torch.empty(0, dtype=torch.int32, device=DEVICE)
        draft_lens = None
        if self.lens is not None:
            everyone = (len(self.slot_ids),)
            lens = torch.randint(0, k + 1, everyone, generator=self.lens, dtype=torch.int32)
            draft_lens = lens.to(DEVICE)[live]
        return HostStep(
            StepLayout((), requests, k, none, positions),
            drafts.reshape(-1),
            draft_lens=draft_lens,
            manager=self.manager,
            slot_ids=self.slot_ids[live],
            slots=self.table.rows_of(self.slot_ids[live], self.pools, self.draft_mask),
            sampling_kind=(
                SamplingKind.SAMPLED
                if self.pools is None and self.verifier.thinking is None
                else SamplingKind.PROCESSED
            ),
        )

    def _draft(
        self, step: HostStep, num_accepted: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        requests, k = len(last), self.draft_len
        drafts = torch.zeros(requests, k, dtype=torch.int32, device=DEVICE)
        inputs = torch.zeros(requests, k + 1, dtype=torch.int32, device=DEVICE)
        for column in range(k):
            logits = self.language.drafter.to(DEVICE)[last.long()]
            if column in self.language.drafts_at:
                logits = self.language.drafts_at[column].to(DEVICE).expand_as(logits)
            if self.vocab_ids is not None:
                logits = logits[:, self.vocab_ids.long()]
            place = DraftOutput(drafts, inputs, column, vocab_ids=self.vocab_ids)
            self.verifier.draft_rule.propose(
                logits.contiguous(),
                DraftPass(step, num_accepted, place, self.verifier.thinking),
                backend=self.backend,
            )
            last = drafts[:, column]
        return drafts
