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
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.requests.options import MAX_BAD_WORD_LEN, MAX_BAD_WORDS
from mtp_plugin.speculative.host import DecodingOptions, HostStep
from mtp_plugin.speculative.ops.sampling import DraftedBy, JudgedBy
from mtp_plugin.speculative.state import SlotTable
from mtp_plugin.speculative.step import DraftColumn, EditPools, StepLayout
from mtp_plugin.speculative.verification import (
    DraftPass,
    VerificationInputs,
    Verifier,
    make_modes,
)
from tests.speculative.ops.on_device import DEVICE

PROMPT_LEN = 3


@dataclass(frozen=True)
class Language:
    """Logits behind every token, of the target and of drafts."""

    target: torch.Tensor  # [V, V]
    drafter: torch.Tensor  # [V, V]
    first: int = 0
    """The token that every prompt ends with."""
    drafts_at: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """[V]: by column, logits of drafts there whatever stands in front."""

    @classmethod
    def of(cls, seed: int, vocab: int, *, likeness: float = 0.7, spread: float = 1.5) -> Language:
        """A random one; the drafter is as right as ``likeness`` says."""
        noise = torch.Generator().manual_seed(seed)
        target = torch.randn(vocab, vocab, generator=noise) * spread
        other = torch.randn(vocab, vocab, generator=noise) * spread
        return cls(target, likeness * target + (1 - likeness) * other)


@dataclass(frozen=True)
class Ways:
    """How drafts of some requests are judged and drawn."""

    verification: str
    draft_sampling: str
    options: Mapping[str, float] = field(default_factory=lambda: {"temperature": 1.0})


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """What so many requests of each way emit, each with a seed of its own, all in one batch.

    Args:
        vocab_ids: [V'] int32, ascending: ids that are drafted.

    Returns:
        [requests, length] tokens, and [requests] how many drafts stood in the first step.
    """
    config = MTPDecodingConfig(
        max_draft_len=draft_len, mtp={"verification": ["coupled", "rejection", "block"]}
    )
    requests, vocab = number * len(ways), language.target.shape[0]
    verifier = Verifier(make_modes(DecodingOptions.read(config), DEVICE))
    columns = [column for mode in verifier.modes for column in mode.columns]
    table = SlotTable(requests + 1, columns, DEVICE)
    for place, way in enumerate(ways):
        mine = slice(place * number, (place + 1) * number)
        values = {
            "verification": JudgedBy[way.verification.upper()],
            "draft_sampling": DraftedBy[way.draft_sampling.upper()],
            "prompt_len": PROMPT_LEN,
            **way.options,
        }
        for name, value in values.items():
            table.column(name)[mine] = value
        if "frequency_penalty" in way.options:
            table.column("count_row")[mine] = torch.arange(number, dtype=torch.int32) + mine.start
    noise = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**31), 2**31, (requests, 2), generator=noise)
    table.column("seed")[:requests] = seeds.to(torch.int32).to(DEVICE)
    manager = SimpleNamespace(
        draft_probs=torch.zeros(requests + 1, draft_len, vocab, device=DEVICE)
    )
    slot_ids = torch.arange(requests, device=DEVICE)
    pools = None
    if any("frequency_penalty" in way.options for way in ways):
        int32: dict[str, Any] = {"dtype": torch.int32, "device": DEVICE}
        pools = EditPools(
            bias=torch.zeros(requests, vocab, device=DEVICE),
            allowed=torch.zeros(requests, vocab // 32 + 2, **int32),
            counts=torch.zeros(requests, vocab, dtype=torch.int16, device=DEVICE),
            seen=torch.zeros(requests, vocab // 32 + 1, **int32),
            words=torch.full((requests, MAX_BAD_WORDS, MAX_BAD_WORD_LEN), -1, **int32),
        )
    decoder = _Decoder(
        language, verifier, manager, table, slot_ids, pools, draft_len, backend, vocab_ids
    )
    return decoder.run(length)


@dataclass
class _Decoder:
    language: Language
    verifier: Verifier
    manager: Any
    table: SlotTable
    slot_ids: torch.Tensor
    pools: EditPools | None
    draft_len: int
    backend: Backend
    vocab_ids: torch.Tensor | None

    def run(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        requests, k = len(self.slot_ids), self.draft_len
        text = torch.full((requests, length + k + 1), -1, device=DEVICE)
        written = torch.zeros(requests, dtype=torch.int64, device=DEVICE)
        last = torch.full((requests,), self.language.first, device=DEVICE)
        nothing = torch.zeros(requests, dtype=torch.int32, device=DEVICE)
        drafts = self._draft(self._step(last, written, None), nothing, last)
        stood = None
        while int(written.min()) < length:
            step = self._step(last, written, drafts)
            rows = torch.cat([last.unsqueeze(1), drafts], dim=1)
            logits = self.language.target.to(DEVICE)[rows.long()].reshape(-1, self._vocab)
            accepted = self.verifier.verify(
                VerificationInputs(step, logits, None), backend=self.backend
            )
            counts = accepted.num_accepted.long()
            stood = counts - 1 if stood is None else stood
            places = written.unsqueeze(1) + torch.arange(k + 1, device=DEVICE)
            is_new = accepted.tokens >= 0
            places = torch.where(is_new, places.clamp_max(text.shape[1] - 1), text.shape[1] - 1)
            full = written >= length
            kept = torch.where(is_new & ~full.unsqueeze(1), accepted.tokens.long(), -1)
            text = text.scatter_reduce(1, places, kept, reduce="amax")
            last = accepted.last_tokens().long()
            drafts = self._draft(step, accepted.num_accepted, last)
            written += counts
        return text[:, :length].cpu(), stood.cpu()

    @property
    def _vocab(self) -> int:
        return self.language.target.shape[0]

    def _step(
        self, last: torch.Tensor, written: torch.Tensor, drafts: torch.Tensor | None
    ) -> HostStep:
        k, requests = self.draft_len, len(last)
        if drafts is None:
            drafts = torch.zeros(requests, k, dtype=torch.int32, device=DEVICE)
        first = written + PROMPT_LEN - 1
        positions = (first.unsqueeze(1) + torch.arange(k + 1, device=DEVICE)).reshape(-1)
        none = torch.empty(0, dtype=torch.int32, device=DEVICE)
        return HostStep(
            StepLayout((), requests, k, none, positions),
            drafts.reshape(-1),
            manager=self.manager,
            slot_ids=self.slot_ids,
            slots=self.table.rows_of(self.slot_ids, self.pools),
            edits_logits=True,
            only_draws=self.pools is None,
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
            place = DraftColumn(drafts, inputs, column, vocab_ids=self.vocab_ids)
            self.verifier.draft_rule.propose(
                logits.contiguous(),
                DraftPass(step, num_accepted, place),
                backend=self.backend,
            )
            last = drafts[:, column]
        return drafts
