"""A third-party drafter: prompt lookup by n-grams, built on `mtp_plugin.plugin` alone.

The draft is what followed the previous occurrence of the request's last n tokens. The tokens of
each request are kept on the device, so that a step can be launched before the host has read the
tokens of the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from mtp_plugin.plugin import (
    Accepted,
    Backend,
    ConfigError,
    DecodingOptions,
    DraftPlan,
    HostFacts,
    HostStep,
    MTPSampler,
    MTPSpecMetadata,
    SlotStateManager,
    SpeculativeDecodingMode,
    SpeculativePieces,
    StepLayout,
    StepOutput,
    StrictVerification,
    VerificationMode,
    Verifier,
    make_verification_inputs,
)


class TokenPool(SlotStateManager):
    """State slots with the token ids of each request; the last row takes padding writes."""

    def __init__(
        self,
        modes: Sequence[VerificationMode],
        max_num_requests: int,
        max_seq_len: int,
        *,
        device: torch.device,
        num_seq_slots: int,
        vocab_size: int,
    ) -> None:
        super().__init__(
            modes,
            max_num_requests,
            device=device,
            num_seq_slots=num_seq_slots,
            vocab_size=vocab_size,
        )
        # the last column takes writes of masked positions
        shape = (self.num_rows, max_seq_len + 1)
        self.tokens = torch.zeros(shape, dtype=torch.int32, device=self.device)

    @override
    def bytes_per_slot(self) -> int:
        return super().bytes_per_slot() + 4 * self.tokens.shape[1]


class LookupWorker(torch.nn.Module):
    """Verifies drafts, appends the new tokens to the pool and looks up the next drafts."""

    def __init__(self, max_draft_len: int, ngram: int, verifier: Verifier, pool: TokenPool) -> None:
        super().__init__()
        self.max_draft_len = max_draft_len
        self.ngram = ngram
        self.verifier = verifier
        self.pool = pool
        self.backend = Backend.of("auto", pool.device)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits: torch.Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
        **_: Any,
    ) -> dict[str, torch.Tensor]:
        positions = position_ids[0]
        step = HostStep.read(attn_metadata, spec_metadata, self.max_draft_len, positions)
        inputs = make_verification_inputs(step, logits, input_ids)
        accepted = self.verifier.verify(inputs, backend=self.backend)
        _, slots = step.expect_manager()
        lengths = self._write(step.layout, slots, input_ids, positions, accepted)
        drafts = look_up(self.pool.tokens[slots], lengths, self.ngram, self.max_draft_len)
        return StepOutput(
            logits=logits,
            new_tokens=accepted.tokens,
            new_tokens_lens=accepted.num_accepted,
            next_draft_tokens=drafts,
            next_new_tokens=torch.cat([accepted.last_tokens().unsqueeze(1), drafts], dim=1),
            status=accepted.status,
        ).as_dict()

    def _write(
        self,
        layout: StepLayout,
        slots: torch.Tensor,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        accepted: Accepted,
    ) -> torch.Tensor:
        """Write prompt and accepted tokens at their positions; return the lengths [R] int64."""
        num_contexts, num_rows = layout.num_contexts, layout.num_ctx_tokens
        tokens, last_column = self.pool.tokens, self.pool.tokens.shape[1] - 1
        chunk_lens = layout.context_lens.long()
        row_slots = torch.repeat_interleave(slots[:num_contexts], chunk_lens, output_size=num_rows)
        tokens[row_slots, positions[:num_rows]] = input_ids[:num_rows]

        # the position after a prompt chunk, and after the first input token of a generation
        ends = positions[chunk_lens.cumsum(0) - 1] + 1
        newest = positions[num_rows :: layout.step_rows] + 1
        first = torch.cat([ends, newest])
        columns = torch.arange(layout.step_rows, device=first.device)
        where = (first.unsqueeze(1) + columns).clamp_max(last_column)
        where = where.masked_fill(accepted.tokens < 0, last_column)
        tokens[slots.unsqueeze(1), where] = accepted.tokens.clamp_min(0)
        return (first + accepted.num_accepted).clamp_max(last_column)


def look_up(
    tokens: torch.Tensor, lengths: torch.Tensor, ngram: int, max_draft_len: int
) -> torch.Tensor:
    """Return the K tokens after the previous occurrence of each row's last n tokens.

    If fewer than K tokens follow, they repeat. Rows without an earlier occurrence get zeros.

    Args:
        tokens: [R, W] int32.
        lengths: valid tokens of each row, [R] int64.

    Returns:
        [R, K] int32.
    """
    width = tokens.shape[1]
    columns = torch.arange(width, device=tokens.device)
    found = torch.ones_like(tokens, dtype=torch.bool)
    for back in range(ngram):
        token = tokens.gather(1, (lengths - 1 - back).clamp_min(0).unsqueeze(1))
        found &= torch.roll(tokens, back, dims=1) == token
    ends = (columns >= ngram - 1) & (columns < lengths.unsqueeze(1) - 1)
    last = torch.where(found & ends, columns, -1).amax(dim=1, keepdim=True)
    known = lengths.unsqueeze(1) - 1 - last
    steps = torch.arange(max_draft_len, device=tokens.device)
    drafts = tokens.gather(1, last + 1 + steps.remainder(known.clamp_min(1)))
    return drafts.masked_fill(last < 0, 0)


class NgramPlugin:
    """Registers prompt lookup as the decoding type ``NGRAM_TEST``."""

    decoding_type = "NGRAM_TEST"
    defaults = {"max_draft_len": 3, "ngram": 2}  # noqa: RUF012 - read only

    def plan(self, config: Any, num_mtp_layers: int) -> DraftPlan:  # noqa: ARG002
        return DraftPlan(max_draft_len=self._options(config)["max_draft_len"])

    def build(self, config: Any, plan: DraftPlan, host: HostFacts) -> SpeculativePieces:
        k = plan.max_draft_len
        verifier = Verifier([StrictVerification(DecodingOptions(max_draft_len=k), host.device)])
        pool = TokenPool(
            verifier.modes,
            host.max_batch_size,
            host.max_seq_len,
            device=host.device,
            num_seq_slots=host.max_num_sequences,
            vocab_size=host.vocab_size,
        )

        def make_metadata() -> MTPSpecMetadata:
            return MTPSpecMetadata(
                max_num_requests=host.max_batch_size,
                max_draft_len=k,
                spec_dec_mode=SpeculativeDecodingMode.NONE,
                mtp_hidden_states_manager=pool,
            )

        worker = LookupWorker(k, self._options(config)["ngram"], verifier, pool)
        sampler = MTPSampler(
            host.sampler_args,
            nextn=k,
            device=host.device,
            served_options=verifier.served_options,
        )
        return SpeculativePieces(
            manager=pool,
            worker=worker,
            sampler=sampler,
            make_metadata=make_metadata,
            plan=plan,
            backend=worker.backend,
            make_graph_metadata=MTPSpecMetadata.create_cuda_graph_metadata,
            memory_report=partial(pool.memory_report, "texts"),
        )

    def _options(self, config: Any) -> dict[str, int]:
        unknown = set(config.options) - set(self.defaults)
        if unknown:
            raise ConfigError(f"speculative_config: unknown options {', '.join(sorted(unknown))}")
        return {**self.defaults, **config.options}
