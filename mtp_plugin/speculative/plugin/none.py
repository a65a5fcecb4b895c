"""The plugin for decoding without speculation."""

from __future__ import annotations

from functools import partial
from typing import Any

from mtp_plugin.config import OtherDecodingConfig, SpeculativeDecodingMode
from mtp_plugin.errors import ConfigError
from mtp_plugin.speculative.drafting import NoDraftsWorker
from mtp_plugin.speculative.host import DecodingOptions
from mtp_plugin.speculative.metadata import MTPSpecMetadata
from mtp_plugin.speculative.plugin.contract import (
    DraftPlan,
    HostFacts,
    SpeculativePieces,
    thinking_end_of,
)
from mtp_plugin.speculative.sampler import MTPSampler
from mtp_plugin.speculative.state import SlotStateManager
from mtp_plugin.speculative.verification import refusals

NO_SPECULATION = "none"


class NoSpeculationPlugin:
    """Decoding without speculation (K = 0)."""

    decoding_type = NO_SPECULATION

    def plan(self, config: Any, num_mtp_layers: int) -> DraftPlan:  # noqa: ARG002
        """Plan one token per step without drafts.

        Raises:
            ConfigError: there are options in addition to the decoding type.
        """
        options = config.options if isinstance(config, OtherDecodingConfig) else {}
        if options:
            raise ConfigError(
                f"speculative_config: decoding_type {NO_SPECULATION!r} takes no options, got "
                f"{', '.join(sorted(options))}"
            )
        return DraftPlan(max_draft_len=0)

    def build(self, config: Any, plan: DraftPlan, host: HostFacts) -> SpeculativePieces:  # noqa: ARG002
        """Build a worker that samples one token per request, without drafts."""

        def make_metadata() -> MTPSpecMetadata:
            return MTPSpecMetadata(
                max_num_requests=host.max_batch_size,
                max_draft_len=0,
                spec_dec_mode=SpeculativeDecodingMode.NONE,
                mtp_num_modules=0,
                mtp_hidden_states_manager=manager,
                max_position=host.max_seq_len - 1,
                device=host.device,
            )

        thinking_end = thinking_end_of(None, host)
        options = DecodingOptions(max_draft_len=0, thinking_end=thinking_end)
        worker = NoDraftsWorker(options, device=host.device)
        manager = SlotStateManager(
            worker.verifier.modes,
            host.max_batch_size,
            device=host.device,
            num_seq_slots=host.max_num_sequences,
            vocab_size=host.vocab_size,
            thinking_end=thinking_end,
            engine_seed=host.engine_seed,
        )
        sampler = MTPSampler(
            host.sampler_args,
            nextn=0,
            device=host.device,
            served_options=worker.served_options,
            refusals=partial(refusals, worker.verifier.modes),
        )
        return SpeculativePieces(
            manager,
            worker,
            sampler,
            make_metadata,
            plan,
            backend=worker.backend,
            make_graph_metadata=MTPSpecMetadata.create_cuda_graph_metadata,
            memory_report=partial(manager.memory_report, "request state"),
        )
