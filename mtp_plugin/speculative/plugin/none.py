"""Decoding without speculation, as a plugin like any other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mtp_plugin.config import SpeculativeDecodingMode
from mtp_plugin.errors import ConfigError
from mtp_plugin.speculative.drafting import NoDraftsWorker
from mtp_plugin.speculative.metadata import MTPSpecMetadata
from mtp_plugin.speculative.plugin.contract import (
    DraftPlan,
    HostFacts,
    SpeculativePieces,
)
from mtp_plugin.speculative.sampler import MTPSampler

NO_SPECULATION = "none"


class NoSpeculationPlugin:
    """Decoding without speculation (K = 0)."""

    decoding_type = NO_SPECULATION

    def plan(self, config: Any, num_mtp_layers: int) -> DraftPlan:  # noqa: ARG002
        """One token per step, nothing drafted.

        Raises:
            ConfigError: options beside the decoding type, which nothing would read.
        """
        options = dict(getattr(config, "options", None) or {})
        if options:
            raise ConfigError(
                f"speculative_config: decoding_type {NO_SPECULATION!r} takes no options, got "
                f"{', '.join(sorted(options))}"
            )
        return DraftPlan(max_draft_len=0)

    def build(self, config: Any, plan: DraftPlan, host: HostFacts) -> SpeculativePieces:  # noqa: ARG002
        """A worker that only emits, and the sampler with an empty draft store."""

        def make_metadata() -> MTPSpecMetadata:
            return MTPSpecMetadata(
                max_num_requests=host.max_batch_size,
                max_draft_len=0,
                spec_dec_mode=SpeculativeDecodingMode.NONE,
                mtp_num_modules=0,
                max_position=host.max_seq_len - 1,
                device=host.device,
            )

        sampler = MTPSampler(host.sampler_args, nextn=0, device=host.device)
        worker = NoDraftsWorker(SimpleNamespace(max_draft_len=0), device=host.device)
        return SpeculativePieces(None, worker, sampler, make_metadata, plan, backend=worker.backend)
