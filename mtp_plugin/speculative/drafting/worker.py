"""What both workers share: acceptance, the result, and TensorRT-LLM's public steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mtp_plugin.errors import ConfigError, MetadataError, TensorContractError, expect
from mtp_plugin.requests.stop_ids import TOO_MANY_STOPS
from mtp_plugin.requests.thinking import NO_TOKEN, thinking_tokens_of
from mtp_plugin.speculative.drafting.attention_loop import DraftLoop
from mtp_plugin.speculative.drafting.trace_check import MetadataFingerprint
from mtp_plugin.speculative.host import refuse_unserved
from mtp_plugin.speculative.ops.acceptance import RelaxedRule
from mtp_plugin.speculative.ops.backend import select_ops
from mtp_plugin.speculative.ops.logits import LogitRows
from mtp_plugin.speculative.ops.synthetic_acceptance import SyntheticRule, synthetic_rule
from mtp_plugin.speculative.state.draft_len import read_draft_len
from mtp_plugin.speculative.step import PAD_TOKEN, Accepted, DraftColumn, StepOutput, expect_vocab


@dataclass(frozen=True)
class Step:
    """The inputs of one ``forward``, checked, with flat positions."""

    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    hidden_states: torch.Tensor  # [T, H]
    logits: torch.Tensor  # [C + G*(K+1), V]
    lm_head: Any
    embed_tokens: Any
    attn_metadata: Any
    spec_metadata: Any
    mtp_layers: Any

    @property
    def num_contexts(self) -> int:
        return int(self.attn_metadata.num_contexts)

    @property
    def num_seqs(self) -> int:
        return int(self.attn_metadata.num_seqs)

    @property
    def num_ctx_tokens(self) -> int:
        return int(self.attn_metadata.num_ctx_tokens)

    @property
    def context_lens(self) -> torch.Tensor:
        """[C] on the device."""
        lens: torch.Tensor = self.attn_metadata.seq_lens_cuda[: self.num_contexts]
        return lens


class SpecWorker(nn.Module, ABC):
    """One MTP step on the device: accept, advance history, draft, leave no trace.

    Args:
        spec_config: the project's ``MTPDecodingConfig`` or a host's object with the same fields.
        model_config: a host's; its ``mapping`` is read as that below.
        use_separate_draft_kv_cache: must be False: drafts share the target's block table.
        mapping: a host's ranks; must be one.
        chain: how depths hand states on, ``output``, ``target_shift`` or ``none``; default: what
            the config says, else ``output``.
        thinking_tokens: (begin, end) ids for relaxed acceptance; default: those of the config.
        device: that the step runs on; decides what ``kernels: auto`` means. Default: CUDA where
            present.
        step_draft_len: drafts that a step verifies and makes, for shorter steps; default: K of
            the config. What :mod:`mtp_plugin.speculative.draft_length.controller` asks of
            such steps holds.
        draft_vocab_ids: [V'] int32, ascending: ids that may be drafted; the ``lm_head`` of a step
            is then one over these rows. Needed where the config has a ``draft_vocab``.

    Raises:
        ConfigError: an option of the config that cannot be, or an argument of a host, named here or
            not, that this version does not serve.
    """

    min_draft_len = 1
    synthetic_thresholds: torch.Tensor
    synthetic_seed: torch.Tensor
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
        step_draft_len: int | None = None,
        draft_vocab_ids: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        unserved = {
            "use_separate_draft_kv_cache": use_separate_draft_kv_cache,
            "mapping": mapping if mapping is not None else getattr(model_config, "mapping", None),
        }
        refuse_unserved(type(self).__name__, unserved | others)
        options = getattr(spec_config, "mtp", None)
        self.spec_config = spec_config
        self.full_draft_len = read_draft_len(spec_config, self.min_draft_len)
        self.max_draft_len = self.full_draft_len if step_draft_len is None else step_draft_len
        expect(
            0 <= self.max_draft_len <= self.full_draft_len,
            ConfigError,
            f"step_draft_len: expected 0 to {self.full_draft_len}, got {step_draft_len}",
        )
        self.keeps_warm = bool(getattr(options, "keep_warm", True))
        self.use_relaxed_acceptance = bool(
            getattr(spec_config, "use_relaxed_acceptance_for_thinking", False)
        )
        self.chain = chain or getattr(options, "chain", None) or "output"
        self.draft_window = getattr(options, "draft_window", "exact")
        self.check_metadata = bool(getattr(options, "check_metadata", False))
        self.may_overwrite_states = False
        """Set by a host that does not read a step's ``hidden_states`` after :meth:`forward`: prompt
        rows then need no copy beside generations."""
        self.ops = select_ops(getattr(options, "kernels", "auto"), device)
        self.is_synthetic = getattr(options, "verification", None) == "synthetic"
        if self.is_synthetic:
            self._take_synthetic_rule(options, device)
        self.begin_token, self.end_token = NO_TOKEN, NO_TOKEN
        if self.use_relaxed_acceptance:
            tokens = thinking_tokens_of(spec_config, thinking_tokens)
            self.begin_token, self.end_token = tokens
        self._take_draft_vocab(options, draft_vocab_ids, device)
        self._public_loop: DraftLoop | None = None

    def _take_synthetic_rule(self, options: Any, device: torch.device | str | None) -> None:
        expect(
            not self.use_relaxed_acceptance,
            ConfigError,
            "synthetic acceptance cannot be relaxed; expected "
            "use_relaxed_acceptance_for_thinking: false",
        )
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        shares = options.acceptance_shares(self.full_draft_len)[: self.max_draft_len]
        rule = synthetic_rule(shares, options.synthetic_seed, device)
        # captured graphs read the rates where they lie
        self.register_buffer("synthetic_thresholds", rule.thresholds, persistent=False)
        self.register_buffer("synthetic_seed", rule.seed, persistent=False)

    def _take_draft_vocab(
        self, options: Any, ids: torch.Tensor | None, device: torch.device | str | None
    ) -> None:
        if ids is None:
            asked = getattr(options, "draft_vocab", None)
            expect(
                asked is None,
                ConfigError,
                f"mtp.draft_vocab: {asked!r} would be ignored; expected draft_vocab_ids beside it",
            )
        else:
            expect(
                ids.dim() == 1 and ids.shape[0] > 0 and ids.dtype == torch.int32,
                ConfigError,
                "draft_vocab_ids: expected a vector of torch.int32, of one id at least, got "
                f"{ids.dtype} {list(ids.shape)}",
            )
            ids = ids.to(device=device).contiguous()
        # captured graphs read the ids where they lie
        self.register_buffer("draft_vocab_ids", ids, persistent=False)

    # ---- the step -------------------------------------------------------------------------

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
        **_: Any,
    ) -> dict[str, torch.Tensor]:
        """Accept this step's drafts and draft the next ones.

        Args:
            input_ids: [T] contexts first, K+1 rows per generation. position_ids: [1, T] or [T].
            hidden_states: [T, H] the target's states. logits: [C + G*(K+1), V], or [V] for one row.
            lm_head, embed_tokens, mtp_layers: the head of drafts (the target's, or its rows of
                ``draft_vocab_ids``), the target's embedding, the draft layers; or ``draft_model``
                with these as attributes.
            attn_metadata, spec_metadata: of the target's forward; unchanged on return.

        Returns:
            The mapping of :class:`~mtp_plugin.speculative.step.StepOutput`.

        Raises:
            TensorContractError, MetadataError: an input that does not fit the others.
        """
        step = self._step(
            input_ids,
            position_ids,
            hidden_states,
            logits,
            lm_head if lm_head is not None else getattr(draft_model, "lm_head", None),
            embed_tokens
            if embed_tokens is not None
            else getattr(draft_model, "embed_tokens", None),
            attn_metadata,
            spec_metadata,
            mtp_layers if mtp_layers is not None else getattr(draft_model, "mtp_layers", None),
        )
        int32: dict[str, Any] = {"dtype": torch.int32, "device": step.logits.device}
        drafts = torch.empty(step.num_seqs, self.max_draft_len, **int32)
        next_tokens = torch.empty(step.num_seqs, self.max_draft_len + 1, **int32)
        accepted = self._accept(
            step.input_ids,
            step.positions,
            step.logits,
            spec_metadata,
            attn_metadata,
            next_tokens[:, 0],
        )
        before = MetadataFingerprint.take(attn_metadata) if self.check_metadata else None
        self._draft(step, accepted, drafts, next_tokens)
        if before is not None:
            before.compare(attn_metadata)
        return StepOutput(
            logits=logits,
            new_tokens=accepted.tokens,
            new_tokens_lens=accepted.num_accepted,
            next_draft_tokens=drafts,
            next_new_tokens=next_tokens,
            status=accepted.status,
        ).as_dict()

    @abstractmethod
    def _draft(
        self, step: Step, accepted: Accepted, drafts: torch.Tensor, next_tokens: torch.Tensor
    ) -> None:
        """Fill ``drafts`` [R, K] and columns 1.. of ``next_tokens`` [R, K+1]; column 0 is there."""

    def skip_forward(
        self,
        input_ids: torch.Tensor,  # noqa: ARG002
        position_ids: torch.Tensor,  # noqa: ARG002
        hidden_states: torch.Tensor,  # noqa: ARG002
        logits: torch.Tensor,
        lm_head: Any = None,  # noqa: ARG002
        embed_tokens: Any = None,  # noqa: ARG002
        attn_metadata: Any = None,
        spec_metadata: Any = None,  # noqa: ARG002
        mtp_layers: Any = None,  # noqa: ARG002
        **_: Any,
    ) -> dict[str, torch.Tensor]:
        """The keys and shapes of :meth:`forward` with valid ids, for ranks without the last
        stage."""
        num_seqs = attn_metadata.num_seqs
        device = logits.device if logits is not None else attn_metadata.seq_lens_cuda.device
        int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
        tokens = torch.full((num_seqs, self.max_draft_len + 1), PAD_TOKEN, **int32)
        tokens[:, 0] = 0
        return StepOutput(
            logits=logits,
            new_tokens=tokens,
            new_tokens_lens=torch.ones(num_seqs, **int32),
            next_draft_tokens=torch.zeros(num_seqs, self.max_draft_len, **int32),
            next_new_tokens=torch.zeros(num_seqs, self.max_draft_len + 1, **int32),
            status=torch.zeros(num_seqs, **int32),
        ).as_dict()

    # ---- public steps with TensorRT-LLM's behaviour -----------------------------------------

    def sample_and_accept_draft_tokens(
        self,
        input_ids: torch.Tensor | None,
        logits: torch.Tensor,
        spec_metadata: Any,
        attn_metadata: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Emitted tokens [R, K+1] int32 (tail -1) and their counts [R] int32."""
        flat = None if input_ids is None else input_ids.reshape(-1)
        accepted = self._accept(flat, None, _two_dim(logits), spec_metadata, attn_metadata)
        return accepted.tokens, accepted.num_accepted

    def update_mtp_hidden_states(
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        num_accepted_tokens: torch.Tensor,
        spec_metadata: Any,
        attn_metadata: Any,
    ) -> None:
        """Advance the slot pools in place by this step's inputs and states."""
        manager = self._history(spec_metadata)
        num_contexts = attn_metadata.num_contexts
        self.ops.advance_history(
            manager.mtp_past_tokens_pool,
            manager.mtp_past_hidden_states_pool,
            spec_metadata.slot_ids[: attn_metadata.num_seqs],
            input_ids.reshape(-1),
            hidden_states,
            num_accepted_tokens,
            attn_metadata.seq_lens_cuda[:num_contexts],
            num_contexts=num_contexts,
            num_ctx_tokens=attn_metadata.num_ctx_tokens,
            step_rows=self.max_draft_len + 1,
        )

    def change_attn_metadata(self, num_accepted_tokens: torch.Tensor, attn_metadata: Any) -> None:
        """Generations: ``seq_lens`` - 1 and ``kv_lens`` - (K+1-n), until
        ``restore_attn_metadata``."""
        expect(
            self._public_loop is None,
            MetadataError,
            "change_attn_metadata: the previous change was not restored",
        )
        loop = DraftLoop(attn_metadata)
        loop.open()
        loop.feed_window(num_accepted_tokens, self.max_draft_len + 1, self.max_draft_len)
        self._public_loop = loop

    def restore_attn_metadata(self, attn_metadata: Any) -> None:  # noqa: ARG002
        """Undo ``change_attn_metadata``."""
        if self._public_loop is None:
            raise MetadataError("restore_attn_metadata: nothing was changed")
        self._public_loop.close()
        self._public_loop = None

    def draft_sampler(self, logits: torch.Tensor) -> torch.Tensor:
        """Greedy drafts of logits [N, V] -> [N] int32; of [N, V'] with ``draft_vocab_ids``."""
        drafts: torch.Tensor = self.ops.draft_argmax(logits)
        if self.draft_vocab_ids is None:
            return drafts
        expect_vocab(logits, self.draft_vocab_ids)
        return self.draft_vocab_ids.index_select(0, drafts)

    # ---- shared parts ---------------------------------------------------------------------

    def _step(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        logits: torch.Tensor,
        lm_head: Any,
        embed_tokens: Any,
        attn_metadata: Any,
        spec_metadata: Any,
        mtp_layers: Any,
    ) -> Step:
        ids = input_ids.reshape(-1)
        positions = position_ids.reshape(-1)
        rows = ids.shape[0]
        expect(
            positions.shape[0] == rows and hidden_states.shape[0] == rows,
            TensorContractError,
            f"forward: expected T = {rows} positions and states like input_ids, got "
            f"{positions.shape[0]} and {hidden_states.shape[0]}",
        )
        return Step(
            ids,
            positions,
            hidden_states,
            _two_dim(logits),
            lm_head,
            embed_tokens,
            attn_metadata,
            spec_metadata,
            mtp_layers,
        )

    def _accept(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor | None,
        logits: torch.Tensor,
        spec_metadata: Any,
        attn_metadata: Any,
        last_tokens: torch.Tensor | None = None,
    ) -> Accepted:
        num_contexts = attn_metadata.num_contexts
        num_generations = attn_metadata.num_seqs - num_contexts
        k = self.max_draft_len
        drafts = spec_metadata.draft_tokens
        if drafts is None:
            drafts = torch.empty(0, dtype=torch.int32, device=logits.device)
        draft_lens = getattr(spec_metadata, "draft_lens", None)
        next_prompt = getattr(spec_metadata, "next_prompt_tokens", None)
        shape = {
            "num_contexts": num_contexts,
            "max_draft_len": k,
            "draft_lens": None if draft_lens is None else draft_lens[:num_generations],
            # a generation-only batch has no prompt to end
            "final_context": (
                None if next_prompt is None or num_contexts == 0 else next_prompt[:num_contexts] < 0
            ),
            "last_tokens": last_tokens,
        }
        drafts = drafts.reshape(-1)[: num_generations * k]
        parameters = getattr(spec_metadata, "row_parameters", None)
        with self._without_early_stops(logits, positions, parameters, attn_metadata) as masked:
            if self.use_relaxed_acceptance:
                return self._accept_relaxed(
                    input_ids, masked, drafts, shape, spec_metadata, attn_metadata
                )
            forced = self._forced_matches(positions, parameters, attn_metadata)
            accepted: Accepted = self.ops.accept_strict(
                masked, drafts, **shape, forced_matches=forced
            )
            return accepted

    def _accept_relaxed(
        self,
        input_ids: torch.Tensor | None,
        logits: torch.Tensor,
        drafts: torch.Tensor,
        shape: dict[str, Any],
        spec_metadata: Any,
        attn_metadata: Any,
    ) -> Accepted:
        manager = self._manager(spec_metadata)
        slots = spec_metadata.slot_ids[: attn_metadata.num_seqs]
        thinking, limit = self._phase(manager, slots)
        if getattr(spec_metadata, "next_prompt_tokens", None) is None and input_ids is not None:
            # a host that gives no look-ahead tokens gives no prompt phase either
            thinking = self._scan_prompts(input_ids, thinking, attn_metadata)
        topk = manager.relaxed_topk_pool[slots]
        parameters = getattr(spec_metadata, "row_parameters", None)
        if parameters is not None:
            stop_ids = parameters.stop_ids
        else:
            stop_ids = manager.stop_ids_pool[slots]
            topk = topk.masked_fill(stop_ids[:, 0] == TOO_MANY_STOPS, 1)
        rule = RelaxedRule(
            thinking=thinking,
            topk=topk,
            delta=limit,
            stop_ids=stop_ids,
            begin_token=self.begin_token,
            end_token=self.end_token,
        )
        result = self.ops.accept_relaxed(logits, drafts, rule, **shape)
        manager.thinking_pool[slots] = result.thinking.to(torch.int8)
        manager.mtp_relaxed_delta_pool[slots] = torch.where(result.thinking, limit, 0.0)
        accepted: Accepted = result.accepted
        return accepted

    @staticmethod
    def _phase(manager: Any, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which requests think [R] bool, and the delta that each has or would have [R] float32.

        The delta in force says so, whoever wrote it: 0 ends the phase, anything above begins it.
        """
        limit = manager.relaxed_limit_pool[slots]
        in_force = manager.mtp_relaxed_delta_pool[slots]
        begins = in_force > 0
        # without a delta of its own a phase shows in the other pool alone
        unseen = (manager.thinking_pool[slots] > 0) & (limit == 0)
        return begins | unseen, torch.where(begins, in_force, limit)

    def _scan_prompts(
        self, input_ids: torch.Tensor, thinking: torch.Tensor, attn_metadata: Any
    ) -> torch.Tensor:
        """The phase of each context after its prompt rows: the last thinking token counts."""
        num_contexts = attn_metadata.num_contexts
        if num_contexts == 0:
            return thinking
        num_rows = attn_metadata.num_ctx_tokens
        rows = torch.arange(num_rows, device=input_ids.device)
        lens = attn_metadata.seq_lens_cuda[:num_contexts].to(torch.int64)
        owner = torch.searchsorted(lens.cumsum(0), rows, right=True)
        ids = input_ids[:num_rows]
        last = []
        for token in (self.begin_token, self.end_token):
            where = torch.where(ids == token, rows, -1)
            none = torch.full((num_contexts,), -1, dtype=rows.dtype, device=rows.device)
            last.append(none.scatter_reduce(0, owner, where, reduce="amax"))
        begin, end = last
        contexts = torch.where((begin < 0) & (end < 0), thinking[:num_contexts], begin > end)
        return torch.cat([contexts, thinking[num_contexts:]])

    def _without_early_stops(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor | None,
        parameters: Any,
        attn_metadata: Any,
    ) -> AbstractContextManager[torch.Tensor]:
        if parameters is None or parameters.min_tokens_end is None:
            return nullcontext(logits)
        if positions is None:
            raise MetadataError("min_tokens_end: acceptance needs position_ids to obey it")
        num_contexts = attn_metadata.num_contexts
        step = LogitRows(
            positions,
            attn_metadata.seq_lens_cuda[:num_contexts],
            num_contexts,
            attn_metadata.num_ctx_tokens,
            self.max_draft_len,
        )
        masked: AbstractContextManager[torch.Tensor] = self.ops.early_stops_masked(
            logits, parameters, step
        )
        return masked

    def _forced_matches(
        self, positions: torch.Tensor | None, parameters: Any, attn_metadata: Any
    ) -> torch.Tensor | None:
        """How many drafts the draws accept [G]; None where the target decides."""
        if not self.is_synthetic or self.max_draft_len == 0:
            return None
        if positions is None:
            raise MetadataError("synthetic acceptance: its draws need position_ids")
        rule = SyntheticRule(self.synthetic_thresholds, self.synthetic_seed)
        first_rows = positions[attn_metadata.num_ctx_tokens :: self.max_draft_len + 1]
        numbers = getattr(parameters, "request_numbers", None)
        if numbers is not None:
            numbers = numbers[attn_metadata.num_contexts : attn_metadata.num_seqs]
        forced: torch.Tensor = self.ops.forced_matches(first_rows, rule, numbers)
        return forced

    def _context_successors(self, step: Step, last_tokens: torch.Tensor) -> torch.Tensor | None:
        """The token behind each context's last row [C]: emitted, or the known next prompt token;
        None without contexts."""
        if step.num_contexts == 0:
            return None
        emitted = last_tokens[: step.num_contexts]
        next_prompt = getattr(step.spec_metadata, "next_prompt_tokens", None)
        if next_prompt is None:
            return emitted
        known = next_prompt[: step.num_contexts].to(emitted.dtype)
        return torch.where(known >= 0, known, emitted)

    def _run_layer(
        self,
        layer: Any,
        step: Step,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        *,
        single_rows: bool = False,
        output_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """States [T, H]; with ``output_rows`` [N], of flat rows, those rows alone [N, H]."""
        spec = step.spec_metadata
        counts = getattr(spec, "all_rank_num_tokens", None)
        largest = getattr(spec, "all_rank_max_num_tokens", None)
        if single_rows:
            counts = getattr(spec, "subseq_all_rank_num_tokens", None)
            largest = max(counts) if largest is not None and counts is not None else largest
        given = {"all_rank_num_tokens": counts, "all_rank_max_num_tokens": largest}
        extra: dict[str, Any] = {name: v for name, v in given.items() if v is not None}
        # ranks that exchange rows count all of them
        selects = output_rows is not None and counts is None and takes_output_rows(layer)
        if selects:
            extra["output_rows"] = output_rows
        states: torch.Tensor = layer(
            embed_tokens=step.embed_tokens,
            input_ids=input_ids,
            position_ids=positions.unsqueeze(0),
            hidden_states=hidden_states,
            attn_metadata=step.attn_metadata,
            **extra,
        )
        if output_rows is None:
            return states
        if not selects:
            return states[output_rows]
        expect(
            states.shape[0] == output_rows.shape[0],
            TensorContractError,
            f"a layer with takes_output_rows returned {states.shape[0]} rows where "
            f"{output_rows.shape[0]} were asked for",
        )
        return states

    def _propose(self, logits: torch.Tensor, place: DraftColumn) -> None:
        """Draft from ``logits`` [R, V] into every place that reads the draft."""
        if self.draft_vocab_ids is not None:
            place = replace(place, vocab_ids=self.draft_vocab_ids)
        self.ops.propose(logits, place)

    @staticmethod
    def _manager(spec_metadata: Any) -> Any:
        manager = getattr(spec_metadata, "mtp_hidden_states_manager", None)
        if manager is None:
            raise MetadataError("this step needs spec_metadata.mtp_hidden_states_manager, got None")
        if spec_metadata.slot_ids is None:
            raise MetadataError("this step needs spec_metadata.slot_ids: call prepare() first")
        return manager

    def _history(self, spec_metadata: Any) -> Any:
        """The manager, whose pools keep K pairs per slot.

        Raises:
            ConfigError: they keep another number.
        """
        manager = self._manager(spec_metadata)
        tokens, states = manager.mtp_past_tokens_pool, manager.mtp_past_hidden_states_pool
        k = self.full_draft_len
        if tokens.shape[1] != k or states.shape[1] != k:
            raise ConfigError(
                f"pools of the MTP manager: expected K = {k} past pairs per slot as this worker "
                f"drafts, got {tokens.shape[1]} tokens and {states.shape[1]} states; give manager "
                f"and worker the same max_draft_len"
            )
        return manager


def takes_output_rows(layer: Any) -> bool:
    """Whether a draft layer may be told which rows are read, see `DraftLayer`."""
    return bool(getattr(layer, "takes_output_rows", False))


def _two_dim(logits: torch.Tensor) -> torch.Tensor:
    return logits.unsqueeze(0) if logits.dim() == 1 else logits
