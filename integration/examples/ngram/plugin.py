"""A second drafter, built on the public interface alone: prompt lookup by n-grams.

It proposes what followed the last time that the newest n tokens stood in the request's own text.
The text lies in a pool on the device, so that a step can be launched before the host knows the
tokens of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from mtp_plugin.config import SpeculativeDecodingMode
from mtp_plugin.errors import ConfigError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.plugin import DraftPlan, HostFacts, SpeculativePieces
from mtp_plugin.speculative.host import DecodingOptions, HostStep
from mtp_plugin.speculative.metadata import MTPSpecMetadata
from mtp_plugin.speculative.sampler import MTPSampler
from mtp_plugin.speculative.state import SlotStateManager
from mtp_plugin.speculative.step import Accepted, StepLayout, StepOutput
from mtp_plugin.speculative.verification import (
    StrictVerification,
    VerificationInputs,
    VerificationMode,
    Verifier,
)


class TextPool(SlotStateManager):
    """The slots of requests, and beside each the tokens of its text; the last one takes padding."""

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
        # the column behind the longest text takes what nobody reads
        shape = (self.num_rows, max_seq_len + 1)
        self.tokens = torch.zeros(shape, dtype=torch.int32, device=self.device)

    @override
    def bytes_per_slot(self) -> int:
        return super().bytes_per_slot() + 4 * self.tokens.shape[1]


class LookupWorker(torch.nn.Module):
    """Accepts, writes down what is new, and looks it up."""

    def __init__(self, max_draft_len: int, ngram: int, verifier: Verifier, pool: TextPool) -> None:
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
        inputs = VerificationInputs(step, logits, input_ids)
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
        """Put prompt rows and emitted tokens where they belong; the texts' lengths [R] int64."""
        num_contexts, num_rows = layout.num_contexts, layout.num_ctx_tokens
        text, last_column = self.pool.tokens, self.pool.tokens.shape[1] - 1
        chunk_lens = layout.context_lens.long()
        owners = torch.repeat_interleave(slots[:num_contexts], chunk_lens, output_size=num_rows)
        text[owners, positions[:num_rows]] = input_ids[:num_rows]

        # behind a chunk, and behind the input of a generation's first row
        ends = positions[chunk_lens.cumsum(0) - 1] + 1
        newest = positions[num_rows :: layout.step_rows] + 1
        first = torch.cat([ends, newest])
        columns = torch.arange(layout.step_rows, device=first.device)
        where = (first.unsqueeze(1) + columns).clamp_max(last_column)
        where = where.masked_fill(accepted.tokens < 0, last_column)
        text[slots.unsqueeze(1), where] = accepted.tokens.clamp_min(0)
        return (first + accepted.num_accepted).clamp_max(last_column)


def look_up(
    text: torch.Tensor, lengths: torch.Tensor, ngram: int, max_draft_len: int
) -> torch.Tensor:
    """What followed the last earlier place of each text's newest n tokens [R, K] int32; else zeros.

    Where fewer than K tokens follow, the text goes on as if it repeated itself from there.

    Args:
        text: [R, W] int32. lengths: [R] int64.
    """
    width = text.shape[1]
    columns = torch.arange(width, device=text.device)
    found = torch.ones_like(text, dtype=torch.bool)
    for back in range(ngram):
        token = text.gather(1, (lengths - 1 - back).clamp_min(0).unsqueeze(1))
        found &= torch.roll(text, back, dims=1) == token
    ends = (columns >= ngram - 1) & (columns < lengths.unsqueeze(1) - 1)
    last = torch.where(found & ends, columns, -1).amax(dim=1, keepdim=True)
    known = lengths.unsqueeze(1) - 1 - last
    steps = torch.arange(max_draft_len, device=text.device)
    drafts = text.gather(1, last + 1 + steps.remainder(known.clamp_min(1)))
    return drafts.masked_fill(last < 0, 0)


class NgramPlugin:
    """Prompt lookup under the decoding type ``NGRAM_TEST``."""

    decoding_type = "NGRAM_TEST"
    defaults = {"max_draft_len": 3, "ngram": 2}  # noqa: RUF012 - read only

    def plan(self, config: Any, num_mtp_layers: int) -> DraftPlan:  # noqa: ARG002
        return DraftPlan(max_draft_len=self._options(config)["max_draft_len"])

    def build(self, config: Any, plan: DraftPlan, host: HostFacts) -> SpeculativePieces:
        k = plan.max_draft_len
        verifier = Verifier([StrictVerification(DecodingOptions(max_draft_len=k), host.device)])
        pool = TextPool(
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
