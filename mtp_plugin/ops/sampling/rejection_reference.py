"""Rejection sampling in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_plugin.ops.logit_rows import GREEDY_BELOW, LogitRows, process_logits
from mtp_plugin.ops.sampling.sample_reference import (
    gumbel,
    kept_scores,
    noise_steps,
    probabilities,
    uniform_of,
    words_of,
)
from mtp_plugin.ops.sampling.types import (
    STEP_COLUMN,
    DraftedBy,
    ProposedDrafts,
    RejectionResult,
    Role,
    TargetSamples,
    VerifiedBy,
)
from mtp_plugin.ops.step import SlotRows


def keep_draft_probs_reference(
    logits: torch.Tensor,
    rows: LogitRows,
    slots: SlotRows,
    truncation: torch.Tensor,
    draft_probs: torch.Tensor,
    *,
    vocab_ids: torch.Tensor | None,
) -> None:
    requests = slice(0, rows.num_requests)
    is_plain = slots.read("draft_sampling", requests) == DraftedBy.PLAIN
    temperature, min_p = (slots.read(name, requests) for name in ("temperature", "min_p"))
    is_plain &= temperature >= GREEDY_BELOW
    values = process_logits(logits, rows, slots, vocab_ids=vocab_ids)
    q = probabilities(kept_scores(values, truncation, temperature, min_p), truncation)
    mine = slots.of(requests)
    kept = draft_probs[mine, rows.column]  # requests that write nothing keep theirs
    if vocab_ids is not None:
        q = kept.index_copy(1, vocab_ids.to(torch.int64), q)
    draft_probs[mine, rows.column] = torch.where(is_plain.unsqueeze(1), q, kept)


def rejection_sample_reference(
    logits: torch.Tensor,
    rows: LogitRows,
    slots: SlotRows,
    drafts: ProposedDrafts,
    target: TargetSamples,
    *,
    by_block: bool,
) -> RejectionResult:
    generations = slice(rows.num_contexts, rows.num_requests)
    method = slots.read("verification", generations)
    is_sampled = slots.read("temperature", generations) >= GREEDY_BELOW
    is_block = (method == VerifiedBy.BLOCK) & by_block
    is_verified = ((method == VerifiedBy.REJECTION) | is_block) & is_sampled
    case = _Case.of(logits, rows, slots, drafts, target)
    num_accepted = case.rejection_accepted()
    scale = torch.ones_like(num_accepted, dtype=torch.float32)
    if by_block:
        joint = case.joint_probs()
        num_accepted = torch.where(is_block, case.block_accepted(joint), num_accepted)
        of_block = joint.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
        scale = torch.where(is_block, of_block, scale)
    next_tokens = case.next_tokens(num_accepted, scale)
    first = torch.arange(len(num_accepted), device=logits.device) * rows.width + rows.num_contexts
    index = first + num_accepted
    tokens = target.tokens.clone()
    tokens[index] = torch.where(is_verified, next_tokens.to(torch.int32), tokens[index])
    slots.table[slots.of(generations), slots.columns.offset(STEP_COLUMN.name)] += 1
    return RejectionResult(torch.where(is_verified, num_accepted, -1).to(torch.int32), tokens)


@dataclass(frozen=True)
class _Case:
    """Draft tokens of all generations with the distributions of target and drafts."""

    scores: torch.Tensor  # [G, K+1, V] of the target, after truncation
    p: torch.Tensor  # [G, K+1, V]
    q: torch.Tensor  # [G, K, V]
    drafts: torch.Tensor  # [G, K] int64, within the vocabulary
    is_present: torch.Tensor  # [G, K]: within the vocabulary, and q > 0
    tests: torch.Tensor  # [G, K] uniform
    indices: torch.Tensor  # [G, K+1] absolute token indices
    seed: torch.Tensor  # [G, 2]
    steps: torch.Tensor  # [G] part of the noise counter

    @classmethod
    def of(
        cls,
        logits: torch.Tensor,
        rows: LogitRows,
        slots: SlotRows,
        proposed: ProposedDrafts,
        target: TargetSamples,
    ) -> _Case:
        draft_probs, forced_ids = proposed.probs, target.forced_ids
        contexts, width, vocab = rows.num_contexts, rows.width, logits.shape[1]
        mine = slice(contexts, rows.num_requests)
        count, draft_len = rows.num_requests - contexts, width - 1
        owners, indices, _ = rows.owners()
        temperature, min_p = (
            slots.read(name, slice(0, rows.num_requests))[owners]
            for name in ("temperature", "min_p")
        )
        scores = kept_scores(
            process_logits(logits, rows, slots), target.truncation, temperature, min_p
        )
        p = probabilities(scores, target.truncation)
        if forced_ids is not None:
            forced = forced_ids.to(torch.int64).unsqueeze(1)
            at_forced = torch.arange(vocab, device=logits.device) == forced
            p = torch.where(forced >= 0, at_forced.float(), p)
            scores = torch.where(forced >= 0, at_forced.float().log(), scores)

        given = proposed.tokens.reshape(count, draft_len).to(torch.int64)
        drafts = given.clamp(0, vocab - 1)
        q = torch.nn.functional.one_hot(drafts, vocab).to(torch.float32)
        if draft_probs is not None:
            is_plain = (slots.read("draft_sampling", mine) == DraftedBy.PLAIN).view(-1, 1, 1)
            if forced_ids is not None:
                is_plain = is_plain & (forced[contexts:].view(count, width, 1)[:, :draft_len] < 0)
            q = torch.where(is_plain, draft_probs[slots.of(mine), :draft_len], q)
        draft_indices = torch.arange(draft_len, device=logits.device)
        # q = 0: the draft row had no finite value, so the token was not sampled
        is_present = (given == drafts) & (q.gather(2, drafts.unsqueeze(2)).squeeze(2) > 0)
        if proposed.lens is not None:
            is_present &= draft_indices < proposed.lens.to(torch.int64).unsqueeze(1)

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
        """[G] number of leading drafts that are present."""
        return self.is_present.to(torch.int64).cumprod(dim=1).sum(dim=1)

    def rejection_accepted(self) -> torch.Tensor:
        """[G] number of drafts before the first rejected one."""
        p, q = self._of_drafts()
        accepted = self.is_present & (self.tests * q < p)
        return accepted.to(torch.int64).cumprod(dim=1).sum(dim=1)

    def block_accepted(self, joint: torch.Tensor) -> torch.Tensor:
        """[G] number of drafts that block verification accepts, by ``joint`` [G, K+1]."""
        draft_len, present = self.drafts.shape[1], self.num_present
        if draft_len == 0:
            return present
        recovered = (
            joint[:, 1:draft_len, None] * self.p[:, 1:draft_len] - self.q[:, 1:]
        ).clamp_min(0)
        mass = recovered.sum(dim=2)
        accept_prob = torch.where(mass > 0, mass / (mass + (1 - joint[:, 1:draft_len])), 0)
        accept_prob = torch.nn.functional.pad(accept_prob, (0, 1))
        number = torch.arange(1, draft_len + 1, device=joint.device)
        accept_prob = torch.where(number == present.unsqueeze(1), joint[:, 1:], accept_prob)
        passes = (number <= present.unsqueeze(1)) & (self.tests <= accept_prob)
        return torch.where(passes, number, 0).amax(dim=1)

    def next_tokens(self, num_accepted: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """[G] int64: the token after the accepted drafts, from max(scale p - q, 0) or from p.

        It is -1 for a row without finite value or +inf.
        """
        draft_len = self.drafts.shape[1]
        rows = torch.arange(len(num_accepted), device=num_accepted.device)
        p, scores = self.p[rows, num_accepted], self.scores[rows, num_accepted]
        recovered = torch.zeros_like(p)
        if draft_len:
            q = self.q[rows, num_accepted.clamp_max(draft_len - 1)]
            recovered = (scale.unsqueeze(1) * p - q).clamp_min(0)
        takes_recovered = (num_accepted < self.num_present) & (recovered.sum(dim=1) > 0)
        ids = torch.arange(p.shape[1], device=p.device)
        noise = gumbel(ids, self.seed, self.indices[rows, num_accepted], Role.RECOVERED, self.steps)
        noisy = torch.where(takes_recovered.unsqueeze(1), recovered.log(), scores) + noise
        return torch.where((p > 0).any(dim=1), noisy.argmax(dim=1), -1)

    def _of_drafts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """p and q of every draft, [G, K] each."""
        ids = self.drafts.unsqueeze(2)
        p = self.p[:, : self.drafts.shape[1]].gather(2, ids).squeeze(2)
        return p, self.q.gather(2, ids).squeeze(2)

    def joint_probs(self) -> torch.Tensor:
        """[G, K+1] joint acceptance probability of the first 0 to K drafts."""
        p, q = self._of_drafts()
        joint = [self.p.new_ones(self.p.shape[0])]
        for i in range(p.shape[1]):
            weight = joint[-1] * p[:, i]
            joint.append(torch.where(weight >= q[:, i], (weight > 0).float(), weight / q[:, i]))
        return torch.stack(joint, dim=1)
