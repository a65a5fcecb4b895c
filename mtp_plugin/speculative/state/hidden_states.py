"""Pools of past hidden states and tokens, for MTP layers per depth."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.speculative.host import DecodingOptions, refuse_unserved
from mtp_plugin.speculative.state.manager import SlotStateManager, resolve_device
from mtp_plugin.speculative.verification import make_modes


class MTPHiddenStatesManager(SlotStateManager):
    """Also owns the past hidden states and tokens of each slot, for models with a layer per depth.

    Pools (plain attributes that a host may replace, read again at every use):
    ``mtp_past_hidden_states_pool`` [S, K, H] dtype and ``mtp_past_tokens_pool`` [S, K] int32. A
    slot's rows are zeroed when it is allocated.

    Args:
        config: any object with ``max_draft_len`` or ``num_nextn_predict_layers`` (K; the first
            has priority), and optionally the relaxed-acceptance fields.
        dtype: dtype of the hidden states.
        hidden_size: H.
        max_num_requests, device, num_seq_slots, vocab_size: as `SlotStateManager`.
        thinking_tokens: (begin, end) ids for relaxed acceptance; default: those of the config.

    Raises:
        ConfigError: K or a size below 1, a dtype that is not floating-point, relaxed acceptance
            without two thinking tokens, or a host's argument that this version does not support,
            such as ``sa_manager``.
    """

    def __init__(
        self,
        config: Any,
        dtype: torch.dtype,
        hidden_size: int,
        max_num_requests: int,
        *,
        device: torch.device | str | None = None,
        num_seq_slots: int | None = None,
        vocab_size: int | None = None,
        thinking_tokens: tuple[int, int] | None = None,
        **others: Any,
    ) -> None:
        refuse_unserved("MTPHiddenStatesManager", others)
        options = DecodingOptions.read(config, thinking_tokens=thinking_tokens)
        hidden_size = self._expect_size("hidden_size", hidden_size)
        expect(
            isinstance(dtype, torch.dtype) and dtype.is_floating_point,
            ConfigError,
            f"MTPHiddenStatesManager: dtype: expected a floating-point torch.dtype, got {dtype!r}",
        )
        modes = make_modes(options, resolve_device(device))
        super().__init__(
            modes,
            max_num_requests,
            device=device,
            num_seq_slots=num_seq_slots,
            vocab_size=vocab_size,
            thinking_end=options.thinking_end,
            engine_seed=options.mtp.seed,
        )
        self.dtype = dtype
        self.hidden_size = hidden_size
        self.num_nextn_predict_layers = options.max_draft_len
        self.use_relaxed_acceptance_for_thinking = options.use_relaxed_acceptance_for_thinking
        pairs = (self.num_rows, self.num_nextn_predict_layers)
        self.mtp_past_hidden_states_pool = torch.zeros(
            *pairs, hidden_size, dtype=dtype, device=self.device
        )
        self.mtp_past_tokens_pool = torch.zeros(pairs, dtype=torch.int32, device=self.device)

    @override
    def bytes_per_slot(self) -> int:
        pair = self.hidden_size * self.mtp_past_hidden_states_pool.element_size() + 4
        return super().bytes_per_slot() + self.num_nextn_predict_layers * pair

    @override
    def _zero(self, slots: torch.Tensor) -> None:
        super()._zero(slots)
        for pool in (self.mtp_past_hidden_states_pool, self.mtp_past_tokens_pool):
            pool.index_fill_(0, slots.to(pool.device), 0)
