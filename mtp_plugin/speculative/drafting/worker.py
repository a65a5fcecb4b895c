"""The base class of MTP workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mtp_plugin.errors import ConfigError, TensorContractError, expect, format_value
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import expect_tensor
from mtp_plugin.ops.logit_rows import ThinkingRule
from mtp_plugin.ops.logprobs import LOGPROB_OPTIONS, compute_logprobs
from mtp_plugin.ops.step import PAD_TOKEN, Accepted, DraftOutput, SamplingKind
from mtp_plugin.requests.options import LOGPROBS_MODE
from mtp_plugin.speculative.drafting.draft_layers import LAYER_ARGUMENTS
from mtp_plugin.speculative.drafting.draft_vocab import place_draft_vocab
from mtp_plugin.speculative.drafting.forward_inputs import (
    ForwardInputs,
    WorkerArguments,
    make_verification_inputs,
)
from mtp_plugin.speculative.drafting.trace_check import MetadataFingerprint
from mtp_plugin.speculative.host import (
    DecodingOptions,
    Ranks,
    own_vocabulary,
    part_of,
    read_num_seqs,
    read_step_draft_len,
    refuse_unserved,
    unserved_ranks,
)
from mtp_plugin.speculative.step_output import StepOutput
from mtp_plugin.speculative.verification import (
    DraftPass,
    Verifier,
    make_modes,
)


class SpecWorker(nn.Module, ABC):
    """Runs one MTP step on the device: verify drafts, update the history, generate the next drafts.

    A step verifies and generates ``spec_metadata.runtime_draft_len`` drafts, K if that is None; one
    worker supports every draft length up to K. See
    :mod:`mtp_plugin.speculative.draft_length.controller` for steps with fewer drafts.

    Args:
        spec_config: ``MTPDecodingConfig`` or an object with the same fields.
        model_config: read for its ``mapping`` if ``mapping`` is not given.
        use_separate_draft_kv_cache: must be False: drafts use the target's block table.
        mapping: the ranks: a single one; tensor parallelism, with ``gather_logits`` or with
            ``enable_attention_dp``; or a pipeline stage other than the last, which only calls
            :meth:`skip_forward`.
        chain: which hidden states a depth reads, ``output``, ``target_shift`` or ``none``; default:
            that of the config, else ``output``.
        thinking_tokens: (begin, end) ids for relaxed acceptance; default: those of the config.
        device: on which steps run; resolves ``kernels: auto``. Default: CUDA if available.
        draft_vocab_ids: [V'] int32, ascending: ids that may be drafted, whose rows the ``lm_head``
            of a step then has. Required if the config has a ``draft_vocab``.
        gather_logits: gathers the columns of a draft head that is split over the vocabulary: from
            [R, V/ranks] of this rank to [R, V] of all, in the order of ranks; columns past V are
            padding. All ranks then sample the same drafts.
        layer_kwargs: of ``all_rank_num_tokens`` and ``spec_metadata``, the names to pass to draft
            layers with ``**kwargs`` that do not name them, such as wrappers.

    Raises:
        ConfigError: an invalid option of the config, or an argument that is not served.
    """

    min_draft_len = 1
    draft_vocab_ids: torch.Tensor | None

    def __init__(
        self,
        spec_config: Any,
        model_config: Any = None,
        use_separate_draft_kv_cache: bool = False,
        *,
        mapping: Any = None,
        chain: str | None = None,
        thinking_tokens: tuple[int, int] | None = None,
        device: torch.device | str | None = None,
        draft_vocab_ids: torch.Tensor | None = None,
        gather_logits: Callable[[torch.Tensor], torch.Tensor] | None = None,
        layer_kwargs: Collection[str] = (),
        **others: Any,
    ) -> None:
        super().__init__()
        expect(
            not isinstance(layer_kwargs, str) and set(layer_kwargs) <= set(LAYER_ARGUMENTS),
            ConfigError,
            f"layer_kwargs: expected a list with names of {', '.join(LAYER_ARGUMENTS)}, got "
            f"{format_value(layer_kwargs)}",
        )
        mapping = mapping if mapping is not None else part_of(model_config, "mapping")
        reason = unserved_ranks(mapping, gathers_logits=gather_logits is not None)
        refuse_unserved(
            type(self).__name__,
            {"use_separate_draft_kv_cache": use_separate_draft_kv_cache, "mapping": mapping}
            | others,
            {"mapping": reason},
        )
        self.ranks = Ranks.read(mapping)
        self.gather_logits = None if self.ranks.attention_dp else gather_logits
        options = DecodingOptions.read(
            spec_config, least_draft_len=self.min_draft_len, thinking_tokens=thinking_tokens
        )
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.spec_config = spec_config
        self.max_draft_len = options.max_draft_len
        self.keeps_warm = options.mtp.keep_warm
        self.chain = chain or options.mtp.chain or "output"
        self.draft_window = options.mtp.draft_window
        self.check_metadata = options.mtp.check_metadata
        self.may_overwrite_states = False
        """Set to True if the host engine does not read ``hidden_states`` after :meth:`forward`;
        prompt rows of a batch with generations are then not copied."""
        self.layer_kwargs = frozenset(layer_kwargs)
        self.draft_cache: Callable[[Any], AbstractContextManager[Any]] | None = None
        """Set if draft layers have their own KV cache: called with the target's attention
        metadata, it returns a context manager around the draft loop, whose value is the metadata of
        the draft layers, or None if that is the same object."""
        self.backend = Backend.of(options.mtp.kernels, device)
        thinking = options.thinking_end
        self.verifier = Verifier(
            make_modes(options, device),
            None if thinking is None else ThinkingRule.of(thinking, device),
            keeps_scores=options.mtp.logprobs_mode == "processed",
        )
        # captured graphs read this buffer
        ids = place_draft_vocab(options.mtp.draft_vocab, draft_vocab_ids, device)
        self.register_buffer("draft_vocab_ids", ids, persistent=False)

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        logits: torch.Tensor,
        lm_head: Any = None,
        embed_tokens: Any = None,
        attn_metadata: Any = None,
        spec_metadata: Any = None,
        mtp_layers: Any = None,
        draft_model: Any = None,
        **others: Any,
    ) -> dict[str, torch.Tensor]:
        """Verify the drafts of this step and generate the next ones.

        Args:
            input_ids: [T] contexts first, K+1 rows per generation. position_ids: [1, T] or [T].
            hidden_states: [T, H] the target's states. logits: [C + G*(K+1), V], or [V] for one row.
            lm_head, embed_tokens, mtp_layers: the target's head, or its rows of
                ``draft_vocab_ids``; the target's embedding; the draft layers. Those that are None
                are attributes of ``draft_model``.
            attn_metadata, spec_metadata: of the target's forward; unchanged on return.

        Returns:
            The mapping of :class:`~mtp_plugin.ops.step.StepOutput`, K of this step.

        Raises:
            TensorContractError, MetadataError: inputs that do not fit each other.
            ConfigError: a pipeline stage other than the last, or an unknown keyword.
        """
        given = self._arguments(
            "forward",
            input_ids,
            position_ids,
            hidden_states,
            logits,
            lm_head,
            embed_tokens,
            attn_metadata,
            spec_metadata,
            mtp_layers,
            draft_model,
            **others,
        )
        return self._run(self._read(given), logits)

    @torch.no_grad()
    def skip_drafting(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        logits: torch.Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
        draft_model: Any = None,
        **others: Any,
    ) -> dict[str, torch.Tensor]:
        """Run :meth:`forward` with K = 0: one token per request and no drafts.

        ``spec_metadata.runtime_draft_len`` is ignored.

        Args:
            logits: [C + G, V], one row per request.
            others: ``lm_head``, ``embed_tokens``, ``mtp_layers``, as :meth:`forward`.

        Raises:
            TensorContractError, MetadataError: inputs that do not fit each other.
            ConfigError: a pipeline stage other than the last, or an unknown keyword.
        """
        given = self._arguments(
            "skip_drafting",
            input_ids,
            position_ids,
            hidden_states,
            logits,
            attn_metadata=attn_metadata,
            spec_metadata=spec_metadata,
            draft_model=draft_model,
            **others,
        )
        return self._run(self._read(given, draft_len=0), logits)

    def _arguments(self, method: str, *args: Any, **named: Any) -> WorkerArguments:
        return WorkerArguments.read(f"{type(self).__name__}.{method}", *args, **named)

    def _read(self, given: WorkerArguments, draft_len: int | None = None) -> ForwardInputs:
        return ForwardInputs.read(
            self.max_draft_len, given, draft_len=draft_len, layer_kwargs=self.layer_kwargs
        )

    def _run(self, step: ForwardInputs, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run a step; ``logits`` are returned unchanged."""
        expect(
            self.ranks.is_last_stage,
            ConfigError,
            f"{type(self).__name__}: a pipeline stage other than the last runs no step; call "
            f"skip_forward",
        )
        layout = step.layout
        int32: dict[str, Any] = {"dtype": torch.int32, "device": step.logits.device}
        drafts = torch.empty(layout.num_requests, layout.draft_len, **int32)
        next_tokens = torch.empty(layout.num_requests, layout.step_rows, **int32)
        inputs = make_verification_inputs(step.host, step.logits, step.rows.input_ids)
        accepted = self.verifier.verify(inputs, last_tokens=next_tokens[:, 0], backend=self.backend)
        if step.host.after_acceptance is not None:
            step.host.after_acceptance(accepted.num_accepted)
        logprob_entries = self._logprobs(step, accepted)
        if step.host.after_verification is not None:
            step.host.after_verification(accepted, logprob_entries)
        if layout.draft_len > 0 or (self.keeps_warm and self.max_draft_len > 0):
            metadata = step.attn_metadata
            before = MetadataFingerprint.take(metadata) if self.check_metadata else None
            if self.draft_cache is None:
                self._draft(step, accepted, drafts, next_tokens)
            else:
                with self.draft_cache(metadata) as own:
                    drafting = step if own is None else replace(step, attn_metadata=own)
                    self._draft(drafting, accepted, drafts, next_tokens)
            if before is not None:
                before.compare(metadata)
        return StepOutput(
            logits=logits,
            new_tokens=accepted.tokens,
            new_tokens_lens=accepted.num_accepted,
            next_draft_tokens=drafts,
            next_new_tokens=next_tokens,
            status=accepted.status,
            logprob_entries=logprob_entries,
        ).as_dict()

    @property
    def served_options(self) -> frozenset[str]:
        served = self.verifier.served_options | LOGPROB_OPTIONS
        return served | {LOGPROBS_MODE} if self.verifier.keeps_scores else served

    def _logprobs(self, step: ForwardInputs, accepted: Accepted) -> torch.Tensor | None:
        """Return the log-probabilities [R, K+1, ENTRY_WIDTH] int32; None for a greedy step, whose
        requests return none."""
        if step.host.sampling_kind is SamplingKind.GREEDY:
            return None
        return compute_logprobs(
            step.layout,
            step.logits if accepted.scores is None else accepted.scores,
            accepted.tokens,
            accepted.num_accepted,
            step.host.expect_slots(),
            sums=accepted.sums,
            backend=self.backend,
        ).entries

    @abstractmethod
    def _draft(
        self,
        step: ForwardInputs,
        accepted: Accepted,
        drafts: torch.Tensor,
        next_tokens: torch.Tensor,
    ) -> None:
        """Write ``drafts`` [R, K] and columns 1 to K of ``next_tokens`` [R, K+1].

        Column 0 has the last output token of each request.
        """

    def skip_forward(self, *args: Any, **named: Any) -> dict[str, torch.Tensor]:
        """Return the keys and shapes of :meth:`forward` with valid ids, on pipeline stages other
        than the last. The arguments are those of :meth:`forward`.

        Raises:
            MetadataError: no attention metadata.
            ConfigError: an unknown keyword.
            TensorContractError: logits that are neither a tensor nor None.
        """
        given = self._arguments("skip_forward", *args, **named)
        num_seqs = read_num_seqs(given.attn_metadata)
        draft_len = read_step_draft_len(given.spec_metadata, self.max_draft_len)
        logits, attn_metadata = given.logits, given.attn_metadata
        sample = attn_metadata.seq_lens_cuda if logits is None else expect_tensor("logits", logits)
        int32: dict[str, Any] = {"dtype": torch.int32, "device": sample.device}
        tokens = torch.full((num_seqs, draft_len + 1), PAD_TOKEN, **int32)
        tokens[:, 0] = 0
        return StepOutput(
            logits=logits,
            new_tokens=tokens,
            new_tokens_lens=torch.ones(num_seqs, **int32),
            next_draft_tokens=torch.zeros(num_seqs, draft_len, **int32),
            next_new_tokens=torch.zeros(num_seqs, draft_len + 1, **int32),
            status=torch.zeros(num_seqs, **int32),
        ).as_dict()

    def set_guided_decoder(self, guided_decoder: Any) -> bool:  # noqa: ARG002
        """Return False: guided decoding is not supported, so the host engine refuses it."""
        return False

    def set_draft_model(self, draft_model: Any) -> None:
        """Check the host engine's draft model; its layers are arguments of every step.

        Raises:
            ConfigError: the draft model has its own vocabulary.
        """
        ids = own_vocabulary(draft_model)
        expect(
            ids is None,
            ConfigError,
            f"{type(self).__name__}: expected a draft model with the target's vocabulary, got one "
            f"with a map d2t",
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Apply ``fn`` to the tensors of verification modes too."""
        self.verifier.move(fn)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _propose(
        self, step: ForwardInputs, accepted: Accepted, logits: torch.Tensor, output: DraftOutput
    ) -> None:
        """Select drafts from ``logits`` [R, V], or this rank's columns, and write them."""
        logits = self._gather_vocabulary(logits, step.logits.shape[1])
        if self.draft_vocab_ids is not None:
            output = replace(output, vocab_ids=self.draft_vocab_ids)
        draft_pass = DraftPass(step.host, accepted.num_accepted, output, self.verifier.thinking)
        self.verifier.draft_rule.propose(logits, draft_pass, backend=self.backend)

    def _gather_vocabulary(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Return the logits of all ranks [R, V], or [R, V'] with a draft vocabulary.

        Raises:
            TensorContractError: the ranks have fewer columns in total.
        """
        if self.gather_logits is None:
            return logits
        if self.draft_vocab_ids is not None:
            vocab_size = self.draft_vocab_ids.shape[0]
        if logits.shape[-1] == vocab_size:
            return logits  # the head gathered them
        whole = self.gather_logits(logits)
        expect(
            whole.dim() == 2 and len(whole) == len(logits) and whole.shape[1] >= vocab_size,
            TensorContractError,
            f"gather_logits: expected [{len(logits)}, {vocab_size}] of columns "
            f"{list(logits.shape)} of each rank, got {list(whole.shape)}",
        )
        return whole[:, :vocab_size]
