"""The plugin around a `CustomDrafter`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from mtp_plugin.config import MTPDecodingConfig, SpeculativeDecodingMode
from mtp_plugin.config.frozen import thaw
from mtp_plugin.errors import ConfigError, expect, format_value
from mtp_plugin.speculative.draft_length.controller import DraftLengthController
from mtp_plugin.speculative.drafting import CustomDrafter, CustomDraftWorker
from mtp_plugin.speculative.host import DecodingOptions
from mtp_plugin.speculative.metadata import MTPSpecMetadata
from mtp_plugin.speculative.plugin.contract import (
    DraftPlan,
    HostFacts,
    SpeculativePieces,
    thinking_end_of,
)
from mtp_plugin.speculative.sampler import MTPSampler, SamplerHooks
from mtp_plugin.speculative.state import SlotStateManager
from mtp_plugin.speculative.verification import changes_text, check_modes, label_of, refusals
from mtp_plugin.verifications import is_custom

DEFAULT_DRAFT_LEN = 3


class TokenManager(SlotStateManager):
    """State slots with the tokens of each request: ``tokens`` [S, max_seq_len + 1] int32."""

    def __init__(self, *args: Any, max_seq_len: int, **options: Any) -> None:
        super().__init__(*args, **options)
        shape = (self.num_rows, max_seq_len + 1)
        self.tokens = torch.zeros(shape, dtype=torch.int32, device=self.device)

    @override
    def bytes_per_slot(self) -> int:
        return super().bytes_per_slot() + 4 * self.tokens.shape[1]


class CustomDrafterPlugin:
    """Decoding with a drafter from outside the package; its name is the decoding type."""

    def __init__(self, name: str, drafter: CustomDrafter) -> None:
        self.decoding_type, self.drafter = name, drafter

    def plan(self, config: Any, num_mtp_layers: int) -> DraftPlan:  # noqa: ARG002
        """Plan K drafts without draft layers.

        Raises:
            ConfigError: an invalid option.
        """
        options = self._options(self._config(config))
        check_modes(options)
        return DraftPlan(options.max_draft_len)

    def build(self, config: Any, plan: DraftPlan, host: HostFacts) -> SpeculativePieces:
        """Build manager, worker and sampler."""
        k, checked = plan.max_draft_len, self._config(config)
        thinking_end = thinking_end_of(None, host)
        options = self._options(checked, thinking_end=thinking_end)
        worker = CustomDraftWorker(self.decoding_type, self.drafter, options, device=host.device)
        modes = worker.verifier.modes
        manager = TokenManager(
            modes,
            host.max_batch_size,
            max_seq_len=host.max_seq_len,
            device=host.device,
            num_seq_slots=host.max_num_sequences,
            vocab_size=host.vocab_size,
            thinking_end=thinking_end,
            engine_seed=host.engine_seed,
        )

        def make_metadata() -> MTPSpecMetadata:
            return MTPSpecMetadata(
                max_num_requests=host.max_batch_size,
                max_draft_len=k,
                spec_dec_mode=SpeculativeDecodingMode.NONE,
                mtp_num_modules=0,
                mtp_hidden_states_manager=manager,
                max_position=host.max_seq_len - 1,
                device=host.device,
            )

        lengths = DraftLengthController(
            checked, max_batch_size=host.max_batch_size, padded_sizes=host.padded_sizes
        )

        def on_step(request: Any, num_emitted: int, num_drafted: int) -> None:
            lengths.record(num_emitted, num_drafted, request)

        sampler = MTPSampler(
            host.sampler_args,
            nextn=k,
            device=host.device,
            served_options=worker.served_options,
            refusals=partial(refusals, modes),
            hooks=SamplerHooks(on_step=on_step),
        )
        return SpeculativePieces(
            manager,
            worker,
            sampler,
            make_metadata,
            plan,
            lengths,
            label=label_of(options),
            changes_text=partial(changes_text, modes, options),
            shorter_steps=True,
            backend=worker.backend,
            make_graph_metadata=MTPSpecMetadata.create_cuda_graph_metadata,
            memory_report=partial(manager.memory_report, "tokens"),
        )

    @staticmethod
    def _options(config: MTPDecodingConfig, **others: Any) -> DecodingOptions:
        return DecodingOptions(max_draft_len=config.draft_len, mtp=config.mtp, **others)

    def _config(self, config: Any) -> MTPDecodingConfig:
        """Return the options as a config of MTP: ``max_draft_len`` and ``mtp.verification``."""
        given = {"max_draft_len": DEFAULT_DRAFT_LEN, **thaw(config.options)}
        mtp = given.get("mtp", {})
        unknown = {*given} - {"max_draft_len", "mtp"}
        if isinstance(mtp, Mapping):
            unknown |= {f"mtp.{name}" for name in mtp if name != "verification"}
        expect(
            not unknown,
            ConfigError,
            f"speculative_config: {', '.join(sorted(map(str, unknown)))}: drafter "
            f"{self.decoding_type!r} takes max_draft_len and mtp.verification alone",
        )
        checked = MTPDecodingConfig.model_validate({"decoding_type": "MTP", **given})
        for method in checked.mtp.verifications:
            expect(
                method == "coupled" or is_custom(method),
                ConfigError,
                f"mtp.verification: expected 'coupled' or a registered method with drafter "
                f"{self.decoding_type!r}, got {format_value(method)}",
            )
        return checked
