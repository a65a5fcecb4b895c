"""Judging by odds in torch: the CPU path and the oracle of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_plugin.speculative.logit_rows import GREEDY_BELOW, DrawnRows, edited
from mtp_plugin.speculative.ops.sampling.contract import STEP_COLUMN, DraftedBy, JudgedBy, Role
from mtp_plugin.speculative.ops.sampling.reference import (
    gumbel,
    kept_scores,
    noise_steps,
    probabilities,
    uniform_of,
    words_of,
)
from mtp_plugin.speculative.ops.sampling.residual.contract import Judgement
from mtp_plugin.speculative.step import SlotRows


def keep_draft_probs(
    logits: torch.Tensor,
    rows: DrawnRows,
    slots: SlotRows,
    cuts: torch.Tensor,
    draft_probs: torch.Tensor,
    *,
    vocab_ids: torch.Tensor | None,
) -> None:
    """As at the door."""
    everyone = slice(0, rows.num_requests)
    is_plain = slots.read("draft_sampling", everyone) == DraftedBy.PLAIN
    temperature, min_p = (slots.read(name, everyone) for name in ("temperature", "min_p"))
    is_plain &= temperature >= GREEDY_BELOW
    values = edited(logits, rows, slots, vocab_ids=vocab_ids)
    q = probabilities(kept_scores(values, cuts, temperature, min_p), cuts)
    if vocab_ids is not None:
        whole = q.new_zeros(q.shape[0], draft_probs.shape[2])
        q = whole.index_copy_(1, vocab_ids.to(torch.int64), q)
    spare = draft_probs.shape[0] - 1  # nobody reads it, and others all leave the same there
    q = torch.where(is_plain.unsqueeze(1), q, 0.0)
    draft_probs[torch.where(is_plain, slots.of(everyone), spare), rows.column] = q


def judge(
    logits: torch.Tensor,
    rows: DrawnRows,
    slots: SlotRows,
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    cuts: torch.Tensor,
    choices: torch.Tensor,
    *,
    draft_lens: torch.Tensor | None,
    forced_ids: torch.Tensor | None,
    by_block: bool,
) -> Judgement:
    """As at the door."""
    generations = slice(rows.num_contexts, rows.num_requests)
    judged_by = slots.read("verification", generations)
    is_drawn = slots.read("temperature", generations) >= GREEDY_BELOW
    is_block = (judged_by == JudgedBy.BLOCK) & by_block
    mine = ((judged_by == JudgedBy.REJECTION) | is_block) & is_drawn
    case = _Case.of(logits, rows, slots, draft_tokens, draft_probs, cuts, draft_lens, forced_ids)
    matches = case.rejection_matches()
    scale = torch.ones_like(matches, dtype=torch.float32)
    if by_block:
        odds = case.joint_odds()
        matches = torch.where(is_block, case.block_matches(odds), matches)
        of_block = odds.gather(1, matches.unsqueeze(1)).squeeze(1)
        scale = torch.where(is_block, of_block, scale)
    tokens = case.tokens_behind(matches, scale)
    first = torch.arange(len(matches), device=logits.device) * rows.width + rows.num_contexts
    places = first + matches
    chosen = choices.clone()
    chosen[places] = torch.where(mine, tokens.to(torch.int32), choices[places])
    slots.table[slots.of(generations), slots.columns.offset(STEP_COLUMN.name)] += 1
    return Judgement(torch.where(mine, matches, -1).to(torch.int32), chosen)


@dataclass(frozen=True)
class _Case:
    """The drafts of all generations, and what target and draft layers made of their places."""

    scores: torch.Tensor  # [G, K+1, V] of the target: z behind the cuts
    p: torch.Tensor  # [G, K+1, V]
    q: torch.Tensor  # [G, K, V]
    drafts: torch.Tensor  # [G, K] int64, within the vocabulary
    is_present: torch.Tensor  # [G, K]: within the vocabulary, and drawn
    tests: torch.Tensor  # [G, K] uniform
    indices: torch.Tensor  # [G, K+1] of the tokens that rows draw
    seed: torch.Tensor  # [G, 2]
    steps: torch.Tensor  # [G] that count noise

    @classmethod
    def of(
        cls,
        logits: torch.Tensor,
        rows: DrawnRows,
        slots: SlotRows,
        draft_tokens: torch.Tensor,
        draft_probs: torch.Tensor | None,
        cuts: torch.Tensor,
        draft_lens: torch.Tensor | None,
        forced_ids: torch.Tensor | None,
    ) -> _Case:
        contexts, width, vocab = rows.num_contexts, rows.width, logits.shape[1]
        mine = slice(contexts, rows.num_requests)
        count, draft_len = rows.num_requests - contexts, width - 1
        owners, indices, _ = rows.owners()
        temperature, min_p = (
            slots.read(name, slice(0, rows.num_requests))[owners]
            for name in ("temperature", "min_p")
        )
        scores = kept_scores(edited(logits, rows, slots), cuts, temperature, min_p)
        p = probabilities(scores, cuts)
        if forced_ids is not None:
            forced = forced_ids.to(torch.int64).unsqueeze(1)
            at_forced = torch.arange(vocab, device=logits.device) == forced
            p = torch.where(forced >= 0, at_forced.float(), p)
            scores = torch.where(forced >= 0, at_forced.float().log(), scores)

        told = draft_tokens.reshape(count, draft_len).to(torch.int64)
        drafts = told.clamp(0, vocab - 1)
        q = torch.nn.functional.one_hot(drafts, vocab).to(torch.float32)
        if draft_probs is not None:
            is_plain = (slots.read("draft_sampling", mine) == DraftedBy.PLAIN).view(-1, 1, 1)
            if forced_ids is not None:
                is_plain = is_plain & (forced[contexts:].view(count, width, 1)[:, :draft_len] < 0)
            q = torch.where(is_plain, draft_probs[slots.of(mine), :draft_len], q)
        places = torch.arange(draft_len, device=logits.device)
        # a draft without any share stands for a row without any value: nobody drew it
        is_present = (told == drafts) & (q.gather(2, drafts.unsqueeze(2)).squeeze(2) > 0)
        if draft_lens is not None:
            is_present &= places < draft_lens.to(torch.int64).unsqueeze(1)

        seed, steps = slots.read("seed", mine), noise_steps(slots, mine)
        indices = indices[contexts:].view(count, width)
        none = torch.zeros(1, dtype=torch.int64, device=logits.device)
        words = words_of(
            none,
            seed.repeat_interleave(draft_len, dim=0),
            indices[:, :draft_len].reshape(-1),
            Role.ACCEPTANCE,
            steps.repeat_interleave(draft_len),
        )
        return cls(
            scores=scores[contexts:].view(count, width, vocab),
            p=p[contexts:].view(count, width, vocab),
            q=q,
            drafts=drafts,
            is_present=is_present,
            tests=uniform_of(words).view(count, draft_len),
            indices=indices,
            seed=seed,
            steps=steps,
        )

    @property
    def num_present(self) -> torch.Tensor:
        """[G] leading drafts that are there."""
        return self.is_present.to(torch.int64).cumprod(dim=1).sum(dim=1)

    def rejection_matches(self) -> torch.Tensor:
        """[G]: drafts up to the first that its own odds reject."""
        p, q = self._of_drafts()
        stands = self.is_present & (self.tests * q < p)
        return stands.to(torch.int64).cumprod(dim=1).sum(dim=1)

    def block_matches(self, joint: torch.Tensor) -> torch.Tensor:
        """[G]: the most drafts that their ``joint`` odds let stand."""
        draft_len, present = self.drafts.shape[1], self.num_present
        if draft_len == 0:
            return present
        rest = (joint[:, 1:draft_len, None] * self.p[:, 1:draft_len] - self.q[:, 1:]).clamp_min(0)
        mass = rest.sum(dim=2)
        share = torch.where(mass > 0, mass / (mass + (1 - joint[:, 1:draft_len])), 0)
        share = torch.nn.functional.pad(share, (0, 1))
        number = torch.arange(1, draft_len + 1, device=joint.device)
        share = torch.where(number == present.unsqueeze(1), joint[:, 1:], share)
        stands = (number <= present.unsqueeze(1)) & (self.tests <= share)
        return torch.where(stands, number, 0).amax(dim=1)

    def tokens_behind(self, matches: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """[G] int64: what is drawn behind ``matches`` [G] drafts, of what ``scale`` [G] p leaves
        above q; -1 of a row without any value."""
        draft_len = self.drafts.shape[1]
        rows = torch.arange(len(matches), device=matches.device)
        p, scores = self.p[rows, matches], self.scores[rows, matches]
        rest = torch.zeros_like(p)
        if draft_len:
            q = self.q[rows, matches.clamp_max(draft_len - 1)]
            rest = (scale.unsqueeze(1) * p - q).clamp_min(0)
        takes_rest = (matches < self.num_present) & (rest.sum(dim=1) > 0)
        ids = torch.arange(p.shape[1], device=p.device)
        noise = gumbel(ids, self.seed, self.indices[rows, matches], Role.RESIDUAL, self.steps)
        noisy = torch.where(takes_rest.unsqueeze(1), rest.log(), scores) + noise
        return torch.where((p > 0).any(dim=1), noisy.argmax(dim=1), -1)

    def _of_drafts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[G, K] each: what target and draft layers give every draft."""
        ids = self.drafts.unsqueeze(2)
        p = self.p[:, : self.drafts.shape[1]].gather(2, ids).squeeze(2)
        return p, self.q.gather(2, ids).squeeze(2)

    def joint_odds(self) -> torch.Tensor:
        """[G, K+1], of 0 to K drafts together: min(odds of those before, times the last one's,
        1)."""
        p, q = self._of_drafts()
        odds = [self.p.new_ones(self.p.shape[0])]
        for i in range(p.shape[1]):
            weight = odds[-1] * p[:, i]
            odds.append(torch.where(weight >= q[:, i], (weight > 0).float(), weight / q[:, i]))
        return torch.stack(odds, dim=1)
