"""Reads and checks the arguments of a worker's step."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from typing_extensions import Self

from mtp_plugin.errors import ConfigError, TensorContractError, expect
from mtp_plugin.ops.checks import FLOATS, INTEGERS, expect_tensor
from mtp_plugin.ops.draft_inputs import DraftKVLengths, History, TargetRows
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.step import SamplingKind, StepLayout
from mtp_plugin.speculative.drafting.attention_loop import kv_floor
from mtp_plugin.speculative.host import AttentionMetadata, HostStep, Ranks, part_of
from mtp_plugin.speculative.verification import VerificationInputs


@dataclass(frozen=True)
class WorkerArguments:
    """Arguments of a worker's step, with TensorRT-LLM's names."""

    input_ids: torch.Tensor  # [T]
    position_ids: torch.Tensor  # [1, T] or [T]
    hidden_states: torch.Tensor  # [T, H]
    logits: torch.Tensor  # [C + G*(K+1), V], or [V] for one row
    lm_head: Any = None
    embed_tokens: Any = None
    attn_metadata: Any = None
    spec_metadata: Any = None
    mtp_layers: Any = None
    draft_model: Any = None

    @classmethod
    def read(cls, method: str, /, *args: Any, **named: Any) -> Self:
        """Bind the arguments of ``method``, without those that only TensorRT-LLM reads.

        Raises:
            ConfigError: an unknown keyword.
        """
        known = [field.name for field in fields(cls)]
        for name in _UNREAD:
            named.pop(name, None)
        unknown = [name for name in named if name not in known]
        if unknown:
            raise ConfigError(
                f"{method}: unknown keyword {', '.join(unknown)}; expected {', '.join(known)}"
            )
        return cls(*args, **named)

    def resolve(self, name: str) -> Any:
        """Return ``lm_head``, ``embed_tokens`` or ``mtp_layers``, or that of ``draft_model``."""
        value = vars(self)[name]
        return value if value is not None else part_of(self.draft_model, name)


STATE_DTYPES = FLOATS - {torch.float64}
"""Types of hidden states: draft layers and history pools have one of them."""
_UNREAD = ("resource_manager",)
"""Keywords that TensorRT-LLM passes and that are ignored."""


@dataclass(frozen=True)
class ForwardInputs:
    """Checked inputs of one step; token ids and positions are flat."""

    host: HostStep
    rows: TargetRows  # ids [T] and the target's states [T, H]
    positions: torch.Tensor  # [T]
    logits: torch.Tensor  # [C + G*(K+1), V]
    lm_head: Any
    embed_tokens: Any
    attn_metadata: AttentionMetadata
    mtp_layers: Any
    spec_metadata: Any = None  # the host's own, for layers that read it
    layer_kwargs: frozenset[str] = frozenset()  # see SpecWorker

    @property
    def layout(self) -> StepLayout:
        return self.host.layout

    @classmethod
    def read(
        cls,
        max_draft_len: int,
        given: WorkerArguments,
        *,
        draft_len: int | None = None,
        layer_kwargs: frozenset[str] = frozenset(),
    ) -> Self:
        """Check the arguments; missing ones are taken from ``draft_model``.

        Args:
            draft_len: K of the step; None: read from the host engine's metadata.
            layer_kwargs: see `SpecWorker`.

        Raises:
            TensorContractError, MetadataError: an input that does not fit the others.
        """
        logits, states = read_logits(given.logits), read_states(given.hidden_states)
        ids = flat_integers("input_ids", given.input_ids)
        positions = flat_integers("position_ids", given.position_ids)
        rows = ids.shape[0]
        expect(
            positions.shape[0] == rows and states.shape[0] == rows,
            TensorContractError,
            f"forward: expected T = {rows} positions and states like input_ids, got "
            f"{positions.shape[0]} and {states.shape[0]}",
        )
        attn_metadata, spec_metadata = given.attn_metadata, given.spec_metadata
        return cls(
            host=HostStep.read(
                attn_metadata, spec_metadata, max_draft_len, positions, draft_len=draft_len
            ),
            rows=TargetRows(ids, states),
            positions=positions,
            logits=logits,
            lm_head=given.resolve("lm_head"),
            embed_tokens=given.resolve("embed_tokens"),
            attn_metadata=attn_metadata,
            mtp_layers=given.resolve("mtp_layers"),
            spec_metadata=spec_metadata,
            layer_kwargs=layer_kwargs,
        )

    def with_ranks(self, ranks: Ranks, further_rows: int) -> ForwardInputs:
        """Return a copy with the row counts of all ranks for the first draft pass.

        Args:
            further_rows: query rows of a generation in addition to those of the target pass.

        Raises:
            MetadataError: the host engine's counts do not match this rank's rows.
        """
        if not ranks.attention_dp:
            return self
        layout = self.layout
        rows = layout.num_tokens + layout.num_generations * further_rows
        counts = self.host.ranks.of_first_pass(ranks, rows, further_rows)
        return replace(self, host=replace(self.host, ranks=counts))

    def kv(self, query_rows: int) -> DraftKVLengths | None:
        """Return the metadata's KV lengths for generations with ``query_rows`` rows; None if the
        metadata has none."""
        lens = self.host.kv_lens
        return (
            None if lens is None else DraftKVLengths(lens, kv_floor(self.attn_metadata, query_rows))
        )


def make_verification_inputs(
    step: HostStep, logits: torch.Tensor, input_ids: torch.Tensor | None = None
) -> VerificationInputs:
    """Return what is verified in a step of a host engine.

    Args:
        logits: [C + G*(K+1), V]. input_ids: [T]; None: phases of prompts are not read.

    Raises:
        MetadataError: the step samples, and there are no slots.
        TensorContractError: a step that samples has no positions.
    """
    is_greedy = step.sampling_kind is SamplingKind.GREEDY
    unprepared = "this step needs spec_metadata.slot_ids: call prepare() first"
    return VerificationInputs(
        step.layout,
        logits,
        step.draft_tokens,
        draft_lens=step.draft_lens,
        slots=step.slots if is_greedy else step.sampling_slots(),
        missing_slots=None if step.manager is None or step.slot_ids is not None else unprepared,
        sampling_kind=step.sampling_kind,
        final_context=step.final_context,
        draft_probs=step.draft_probs,
        delta_in_force=step.relaxed_delta_pool,
        # with next_prompt_tokens the whole prompt was scanned when the request got its slot
        prompt_ids=input_ids if step.next_prompt_tokens is None else None,
        rows=None if is_greedy else LogitRows.of_target(step.layout, step.draft_tokens),
    )


def read_history(step: HostStep, max_draft_len: int) -> History:
    """Return the history pools of the manager, with K pairs per slot.

    Raises:
        MetadataError: the step has no manager or no slot ids.
        ConfigError: the pools have another number of pairs per slot.
    """
    manager, slots = step.expect_manager()
    tokens, states = manager.mtp_past_tokens_pool, manager.mtp_past_hidden_states_pool
    if tokens.shape[1] != max_draft_len or states.shape[1] != max_draft_len:
        raise ConfigError(
            f"pools of the MTP manager: expected K = {max_draft_len} past pairs per slot as this "
            f"worker drafts, got {tokens.shape[1]} tokens and {states.shape[1]} states; give "
            f"manager and worker the same max_draft_len"
        )
    return History(tokens, states, slots)


def flat_integers(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return token ids or positions of any shape as [T].

    Raises:
        TensorContractError: not an integer tensor.
    """
    return expect_tensor(name, value, dtype=INTEGERS).reshape(-1)


def read_states(value: torch.Tensor) -> torch.Tensor:
    """Return hidden states [T, H].

    Raises:
        TensorContractError: not a tensor of one of `STATE_DTYPES`, or another shape.
    """
    return expect_tensor("hidden_states", value, dtype=STATE_DTYPES, shape=("T", "H"))


def read_logits(value: torch.Tensor) -> torch.Tensor:
    """Return logits [rows, V]; [V] is one row.

    Raises:
        TensorContractError: not a floating-point tensor.
    """
    logits = expect_tensor("logits", value, dtype=FLOATS)
    return logits.unsqueeze(0) if logits.dim() == 1 else logits
