"""A second drafter, built on the public interface alone: prompt lookup by n-grams.

It proposes what followed the last time that the newest n tokens stood in the request's own text.
The text lies in a pool on the device, so that a step can be launched before the host knows the
tokens of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from mtp_plugin.config import SpeculativeDecodingMode
from mtp_plugin.errors import ConfigError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.plugin import DraftPlan, HostFacts, SpeculativePieces
from mtp_plugin.speculative.host import read_layout
from mtp_plugin.speculative.metadata import MTPSpecMetadata
from mtp_plugin.speculative.sampler import MTPSampler
from mtp_plugin.speculative.step import Accepted, StepLayout, StepOutput
from mtp_plugin.speculative.verification import (
    ModeOptions,
    StrictVerification,
    VerificationInputs,
    Verifier,
)


class TextPool:
    """The tokens of every running request, one row each; the last row takes padding."""

    def __init__(self, num_slots: int, max_seq_len: int, device: torch.device) -> None:
        self.device = device
        self.sentinel_slot = num_slots
        # the column behind the longest text takes what nobody reads
        self.tokens = torch.zeros(num_slots + 1, max_seq_len + 1, dtype=torch.int32, device=device)
        self._slots: dict[int, int] = {}
        self._free = list(range(num_slots))

    @property
    def slot_manager(self) -> TextPool:
        """The pool itself answers which slot a request has."""
        return self

    def get_slot(self, request_id: int) -> int | None:
        return self._slots.get(request_id)

    def slot_of(self, request_id: int) -> int:
        """The request's row; those that pad a batch share the last one."""
        return self._slots.get(request_id, self.sentinel_slot)

    # ---- resource manager ---------------------------------------------------------------------

    def get_max_resource_count(self) -> int:
        return self.sentinel_slot

    def get_needed_resource_to_completion(self, request: Any) -> int:  # noqa: ARG002
        return 1

    def add_dummy_requests(self, request_ids: Sequence[int]) -> None:
        """Padding rows share the sentinel."""

    def prepare_resources(self, scheduled_batch: Any) -> None:
        for request in scheduled_batch.context_requests:
            if request.is_first_context_chunk:
                self._slots[request.request_id] = self._free.pop()

    def update_resources(self, scheduled_batch: Any) -> None:
        """The text grows on the device."""

    def free_resources(self, request: Any) -> None:
        slot = self._slots.pop(request.request_id, None)
        if slot is not None:
            self._free.append(slot)

    def shutdown(self) -> None:
        self._free += self._slots.values()
        self._slots.clear()


class LookupWorker(torch.nn.Module):
    """Accepts, writes down what is new, and looks it up."""

    def __init__(self, max_draft_len: int, ngram: int, pool: TextPool) -> None:
        super().__init__()
        self.max_draft_len = max_draft_len
        self.ngram = ngram
        self.pool = pool
        self.backend = Backend.of("auto", pool.device)
        mode = StrictVerification(ModeOptions(None, max_draft_len, pool.device))
        self.verifier = Verifier([mode])

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
        layout = read_layout(attn_metadata, spec_metadata, self.max_draft_len, positions)
        inputs = VerificationInputs.read(layout, logits, input_ids, spec_metadata)
        accepted = self.verifier.verify(layout, inputs, backend=self.backend)
        slots = spec_metadata.slot_ids[: layout.num_requests]
        lengths = self._write(layout, slots, input_ids, positions, accepted)
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
        pool = TextPool(host.max_num_sequences, host.max_seq_len, host.device)
        arguments = SimpleNamespace(
            max_num_sequences=host.max_num_sequences, max_seq_len=host.max_seq_len
        )

        def make_metadata() -> MTPSpecMetadata:
            return MTPSpecMetadata(
                max_num_requests=host.max_batch_size,
                max_draft_len=k,
                spec_dec_mode=SpeculativeDecodingMode.NONE,
                mtp_hidden_states_manager=pool,
            )

        worker = LookupWorker(k, self._options(config)["ngram"], pool)
        return SpeculativePieces(
            manager=pool,
            worker=worker,
            sampler=MTPSampler(arguments, nextn=k, device=host.device),
            make_metadata=make_metadata,
            plan=plan,
            backend=worker.backend,
            slot_of=pool.slot_of,
        )

    def _options(self, config: Any) -> dict[str, int]:
        unknown = set(config.options) - set(self.defaults)
        if unknown:
            raise ConfigError(f"speculative_config: unknown options {', '.join(sorted(unknown))}")
        return {**self.defaults, **config.options}
