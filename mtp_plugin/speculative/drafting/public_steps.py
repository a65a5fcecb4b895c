"""The single steps of a worker, with TensorRT-LLM's names and signatures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mtp_plugin.errors import ConfigError, MetadataError, expect
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import INTEGERS, expect_tensor
from mtp_plugin.ops.draft import draft_argmax
from mtp_plugin.ops.draft_inputs import (
    TargetRows,
    accepted_rows,
    advance_history,
    concatenate,
    context_rows,
    generation_window,
)
from mtp_plugin.ops.step import DraftInputs, expect_vocab
from mtp_plugin.speculative.drafting.attention_loop import DraftLoop
from mtp_plugin.speculative.drafting.forward_inputs import (
    flat_integers,
    make_verification_inputs,
    read_history,
    read_logits,
    read_states,
)
from mtp_plugin.speculative.host import HostStep, read_positions
from mtp_plugin.speculative.verification import Verifier

STEPS = (
    "sample_and_accept_draft_tokens",
    "update_mtp_hidden_states",
    "prepare_drafter_inputs",
    "change_attn_metadata",
    "restore_attn_metadata",
    "draft_sampler",
)
"""The single steps of TensorRT-LLM's workers. ``forward`` of a worker calls none of them."""


class PublicSteps:
    """Mixin: the single steps that all workers have."""

    max_draft_len: int
    backend: Backend
    verifier: Verifier
    draft_vocab_ids: torch.Tensor | None
    gather_logits: Callable[[torch.Tensor], torch.Tensor] | None
    _public_loop: DraftLoop | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a subclass that overrides a step, unless its ``forward`` is its own too.

        Raises:
            ConfigError: names the steps.
        """
        super().__init_subclass__(**options)

        def module_of(name: str) -> str:
            owner = next((c for c in cls.__mro__ if name in vars(c)), PublicSteps)
            return owner.__module__

        package = __name__.rpartition(".")[0]
        names = [name for name in STEPS if module_of(name) != __name__]
        expect(
            not names or not module_of("forward").startswith(package),
            ConfigError,
            f"{cls.__name__}: overrides {', '.join(names)}, which forward() does not call; change "
            "acceptance with mtp_plugin.register_verification(name, method), and drafts with a "
            "drafter of your own, mtp_plugin.register_plugin(plugin) (CONTRIBUTING.md)",
        )

    def sample_and_accept_draft_tokens(
        self,
        input_ids: torch.Tensor | None,
        logits: torch.Tensor,
        spec_metadata: Any,
        attn_metadata: Any,
        position_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output tokens [R, K+1] int32 (tail -1) and their counts [R] int32.

        Args:
            position_ids: [1, T] or [T], read where a request samples; None: they follow from
                ``kv_lens_cuda`` of the attention metadata.

        Raises:
            MetadataError: a request samples, and there are neither positions nor KV lengths.
        """
        flat = None if input_ids is None else flat_integers("input_ids", input_ids)
        positions = None if position_ids is None else flat_integers("position_ids", position_ids)
        rows = read_logits(logits)
        step = HostStep.read(attn_metadata, spec_metadata, self.max_draft_len, positions)
        if step.sampling_kind and positions is None:
            positions = read_positions(attn_metadata, step.layout)
            step = replace(step, layout=replace(step.layout, positions=positions))
        inputs = make_verification_inputs(step, rows, flat)
        accepted = self.verifier.verify(inputs, backend=self.backend)
        return accepted.tokens, accepted.num_accepted

    def update_mtp_hidden_states(
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        num_accepted_tokens: torch.Tensor,
        spec_metadata: Any,
        attn_metadata: Any,
    ) -> None:
        """Update the history pools in place by this step's tokens and hidden states."""
        step = HostStep.read(attn_metadata, spec_metadata, self.max_draft_len)
        advance_history(
            step.layout,
            read_history(step, self.max_draft_len),
            TargetRows(flat_integers("input_ids", input_ids), read_states(hidden_states)),
            _counts(num_accepted_tokens),
            backend=self.backend,
        )

    def change_attn_metadata(self, num_accepted_tokens: torch.Tensor, attn_metadata: Any) -> None:
        """Subtract 1 from ``seq_lens`` and K+1-n from ``kv_lens`` of generations, until
        ``restore_attn_metadata``."""
        expect(
            self._public_loop is None,
            MetadataError,
            "change_attn_metadata: the previous change was not restored",
        )
        _counts(num_accepted_tokens)
        draft_len = self.max_draft_len
        if attn_metadata.num_seqs > attn_metadata.num_contexts:
            # the step's own K: its generations have K+1 rows
            draft_len = int(attn_metadata._seq_lens[attn_metadata.num_contexts]) - 1
            expect(
                1 <= draft_len <= self.max_draft_len,
                MetadataError,
                f"change_attn_metadata: expected generations of 2 to K+1 = "
                f"{self.max_draft_len + 1} rows, got {draft_len + 1}",
            )
        loop = DraftLoop(attn_metadata)
        loop.open()
        loop.feed_window(num_accepted_tokens, draft_len + 1, draft_len)
        self._public_loop = loop

    def restore_attn_metadata(self, attn_metadata: Any) -> None:  # noqa: ARG002
        """Undo ``change_attn_metadata``."""
        if self._public_loop is None:
            raise MetadataError("restore_attn_metadata: nothing was changed")
        self._public_loop.close()
        self._public_loop = None

    def draft_sampler(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the greedy drafts [N] int32 of logits [N, V]; [N, V'] with ``draft_vocab_ids``,
        this rank's columns with ``gather_logits``."""
        if self.gather_logits is not None:
            logits = self.gather_logits(logits)
        drafts = draft_argmax(logits, backend=self.backend)
        if self.draft_vocab_ids is None:
            return drafts
        expect_vocab(logits, self.draft_vocab_ids)
        return self.draft_vocab_ids.index_select(0, drafts)


class VanillaPublicSteps(PublicSteps):
    """Mixin: the single steps of vanilla MTP."""

    def prepare_drafter_inputs(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        accepted_tokens: torch.Tensor,
        num_accepted_tokens: torch.Tensor,
        spec_metadata: Any,
        attn_metadata: Any,
    ) -> dict[str, Any]:
        """Return the inputs of depth 1: shifted prompts, K rows per generation from the pools.

        Call it after ``update_mtp_hidden_states``: the pools then end before the bonus token.
        """
        ids, states = flat_integers("input_ids", input_ids), read_states(hidden_states)
        positions = flat_integers("position_ids", position_ids)
        num_accepted = _counts(num_accepted_tokens).to(torch.int64)
        _check_accepted(accepted_tokens)
        step = HostStep.read(attn_metadata, spec_metadata, self.max_draft_len, positions)
        layout = step.layout
        history = read_history(step, self.max_draft_len)
        k, contexts, chunks = layout.draft_len, layout.num_contexts, layout.num_ctx_tokens
        last = accepted_tokens.gather(1, (num_accepted - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
        last = last.clamp_min(0)  # -1 without output tokens
        parts: list[DraftInputs] = []
        if contexts > 0:
            parts.append(
                context_rows(
                    ids[:chunks],
                    positions[:chunks],
                    states[:chunks],
                    layout.context_lens,
                    step.next_context_tokens(last),
                )
            )
        if layout.num_generations > 0:
            slots = history.slots()[contexts:]
            parts.append(
                generation_window(
                    history.tokens[slots],
                    history.states[slots],
                    torch.full_like(slots, self.max_draft_len - k),
                    last[contexts:],
                    positions[chunks :: layout.step_rows] + num_accepted[contexts:] - k,
                    k,
                )
            )
        return _as_given(parts, position_ids, attn_metadata)


class EaglePublicSteps(PublicSteps):
    """Mixin: the single steps of eagle MTP."""

    def prepare_drafter_inputs(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        last_tokens_idx: torch.Tensor,
        hidden_states: torch.Tensor,
        accepted_tokens: torch.Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
    ) -> dict[str, Any]:
        """Return the inputs of pass 1: shifted prompts, all accepted columns of generations.

        Args:
            last_tokens_idx: [R] last flat row of each sequence (read for contexts).
            accepted_tokens: [R, K+1], negative after the accepted ones.
        """
        contexts, chunks = attn_metadata.num_contexts, attn_metadata.num_ctx_tokens
        ids, states = flat_integers("input_ids", input_ids), read_states(hidden_states)
        positions = flat_integers("position_ids", position_ids)
        expect_tensor("last_tokens_idx", last_tokens_idx, dtype=INTEGERS, shape=("R",))
        _check_accepted(accepted_tokens)
        parts: list[DraftInputs] = []
        if contexts > 0:
            ends = last_tokens_idx[:contexts].to(torch.int64)
            step = HostStep.read(attn_metadata, spec_metadata, self.max_draft_len)
            sampled = accepted_tokens[:, 0].clamp_min(0)  # -1 without output tokens
            parts.append(
                context_rows(
                    ids[:chunks],
                    positions[:chunks],
                    states[:chunks],
                    torch.diff(ends, prepend=ends.new_full((1,), -1)),
                    step.next_context_tokens(sampled),
                )
            )
        if accepted_tokens.shape[0] > contexts:
            parts.append(
                accepted_rows(accepted_tokens[contexts:], positions[chunks:], states[chunks:])
            )
        return _as_given(parts, position_ids, attn_metadata)


def _counts(num_accepted_tokens: torch.Tensor) -> torch.Tensor:
    return expect_tensor("num_accepted_tokens", num_accepted_tokens, dtype=INTEGERS, shape=("R",))


def _check_accepted(accepted_tokens: torch.Tensor) -> None:
    expect_tensor("accepted_tokens", accepted_tokens, dtype=INTEGERS, shape=("R", "K+1"))


def _as_given(
    parts: list[DraftInputs], position_ids: torch.Tensor, attn_metadata: Any
) -> dict[str, Any]:
    """Return the rows by TensorRT-LLM's names, positions with the given shape [T] or [1, T]."""
    inputs = parts[0] if len(parts) == 1 else concatenate(*parts)
    like = (*position_ids.shape[:-1], -1)
    return {
        "input_ids": inputs.input_ids,
        "position_ids": inputs.position_ids.to(position_ids.dtype).view(like),
        "hidden_states": inputs.hidden_states,
        "attn_metadata": attn_metadata,
    }
