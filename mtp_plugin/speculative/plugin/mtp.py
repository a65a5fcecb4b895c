"""The multi-token prediction plugin: its plan and its components."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mtp_plugin.config import MTPDecodingConfig, SpeculativeDecodingMode
from mtp_plugin.config.draft_vocab import add_draft_ids, resolve_draft_vocab
from mtp_plugin.errors import ConfigError
from mtp_plugin.requests.thinking import resolve_thinking_tokens
from mtp_plugin.speculative.draft_length.controller import DraftLengthController
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker
from mtp_plugin.speculative.drafting.trace_check import deferred_checks
from mtp_plugin.speculative.drafting.worker import SpecWorker
from mtp_plugin.speculative.host import DecodingOptions
from mtp_plugin.speculative.metadata import MTPSpecMetadata
from mtp_plugin.speculative.metrics.alarms import AcceptanceAlarms
from mtp_plugin.speculative.plugin.contract import (
    DraftPlan,
    HostFacts,
    SpeculativePieces,
    thinking_end_of,
)
from mtp_plugin.speculative.sampler import MTPSampler, SamplerHooks
from mtp_plugin.speculative.state import MTPHiddenStatesManager, SlotStateManager
from mtp_plugin.speculative.verification import (
    changes_text,
    check_modes,
    label_of,
    most_draft_probs,
    refusals,
)

_logger = logging.getLogger("mtp_plugin")


class MTPPlugin:
    """Multi-token prediction with the checkpoint's own MTP layers."""

    decoding_type = "MTP"

    def plan(self, config: Any, num_mtp_layers: int) -> DraftPlan:
        """Plan one layer that writes K-1 KV rows in its loop (eagle), or K layers (vanilla)."""
        config = self._own(config).resolve(num_mtp_layers)
        resolve_draft_vocab(config.mtp.draft_vocab)
        k = config.draft_len
        options = DecodingOptions.read(config, defer_thinking_end=True)
        check_modes(options)
        probs = most_draft_probs(options)
        if config.use_mtp_vanilla:
            return DraftPlan(k, k, history_rows=k, past_pairs=k, num_draft_probs=probs)
        return DraftPlan(k, 1, loop_rows=k - 1, num_draft_probs=probs)

    def build(self, config: Any, plan: DraftPlan, host: HostFacts) -> SpeculativePieces:
        """Build manager, worker and sampler for the planned draft length."""
        k = plan.max_draft_len
        config = self._own(config)
        if config.max_draft_len is None:
            config = config.model_copy(update={"max_draft_len": k})
        options = DecodingOptions.read(
            config, thinking_tokens=self._thinking(config, host), defer_thinking_end=True
        )
        options = replace(options, thinking_end=thinking_end_of(config, host))
        draft_vocab_ids = self._draft_vocab(config, options, host)
        vanilla = config.use_mtp_vanilla
        worker_class = MTPWorker if vanilla else MTPEagleWorker
        worker = worker_class(
            options,
            chain=config.mtp.chain or host.chain,
            device=host.device,
            draft_vocab_ids=draft_vocab_ids,
        )
        worker.may_overwrite_states = not host.reads_states
        manager = self._manager(options, worker, host, keeps_history=vanilla)
        manager.engine_seed = options.mtp.seed or host.engine_seed
        mode = (
            SpeculativeDecodingMode.MTP if vanilla else SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL
        )

        def make_metadata() -> MTPSpecMetadata:
            return MTPSpecMetadata(
                max_num_requests=host.max_batch_size,
                max_draft_len=k,
                spec_dec_mode=mode,
                mtp_num_modules=k if vanilla else 1,
                mtp_hidden_states_manager=manager,
                max_position=host.max_seq_len - 1,
                draft_window=config.mtp.draft_window,
                device=host.device,
            )

        lengths = DraftLengthController(
            config, max_batch_size=host.max_batch_size, padded_sizes=host.padded_sizes
        )
        label = label_of(options)
        # synthetic acceptance does not measure the drafts
        alarms = None if label is not None and label.is_drawn else AcceptanceAlarms()

        def on_step(request: Any, num_emitted: int, num_drafted: int) -> None:
            lengths.record(num_emitted, num_drafted, request)
            if alarms is not None:
                alarms.record(request, num_emitted, num_drafted)

        sampler = MTPSampler(
            host.sampler_args,
            nextn=k,
            device=host.device,
            kernels=config.mtp.kernels,
            served_options=worker.served_options,
            refusals=partial(refusals, worker.verifier.modes),
            hooks=SamplerHooks(on_step=on_step),
        )

        return SpeculativePieces(
            manager,
            worker,
            sampler,
            make_metadata,
            plan,
            lengths,
            alarms,
            label,
            changes_text=partial(changes_text, worker.verifier.modes, options),
            shorter_steps=True,
            draft_vocab_ids=draft_vocab_ids,
            backend=worker.backend,
            checks_metadata=config.mtp.check_metadata,
            replay_checks=deferred_checks,
            make_graph_metadata=MTPSpecMetadata.create_cuda_graph_metadata,
            memory_report=manager.memory_report,
        )

    @staticmethod
    def _draft_vocab(
        config: MTPDecodingConfig, options: DecodingOptions, host: HostFacts
    ) -> torch.Tensor | None:
        """Return the ids that may be drafted [V'] int32, stop ids and thinking tags among them."""
        listed = resolve_draft_vocab(config.mtp.draft_vocab, host.vocab_size)
        if listed is None:
            return None
        always = {*host.end_ids, *options.thinking_tokens}
        if (end := options.thinking_end) is not None:
            always.update((end.begin, *end.end, end.end_token))
        ids = add_draft_ids(listed, always, host.vocab_size)
        if len(ids) > len(listed):
            _logger.info(
                "draft vocabulary: added %d stop ids and thinking tags", len(ids) - len(listed)
            )
        return torch.tensor(ids, dtype=torch.int32, device=host.device)

    @staticmethod
    def _manager(
        options: DecodingOptions, worker: SpecWorker, host: HostFacts, *, keeps_history: bool
    ) -> SlotStateManager:
        """Build the manager, with past hidden states and tokens if ``keeps_history``."""
        if keeps_history:
            return MTPHiddenStatesManager(
                options,
                host.dtype,
                host.hidden_size,
                host.max_batch_size,
                device=host.device,
                num_seq_slots=host.max_num_sequences,
                vocab_size=host.vocab_size,
            )
        return SlotStateManager(
            worker.verifier.modes,
            host.max_batch_size,
            device=host.device,
            num_seq_slots=host.max_num_sequences,
            vocab_size=host.vocab_size,
            thinking_end=options.thinking_end,
        )

    @staticmethod
    def _thinking(config: MTPDecodingConfig, host: HostFacts) -> tuple[int, int] | None:
        """Return the (begin, end) thinking ids if relaxed acceptance needs them."""
        if not config.use_relaxed_acceptance_for_thinking:
            return None
        begin, end = resolve_thinking_tokens(config, host.encode)
        for edge, token in (("begin", begin), ("end", end)):
            if not 0 <= token < host.vocab_size:
                raise ConfigError(
                    f"{edge}_thinking_phase_token: {token} is outside the vocabulary of "
                    f"{host.vocab_size}"
                )
        return begin, end

    @staticmethod
    def _own(config: Any) -> MTPDecodingConfig:
        if not isinstance(config, MTPDecodingConfig):
            raise ConfigError(f"MTP: expected an MTPDecodingConfig, got {type(config).__name__}")
        return config
