"""The slot-based resource manager of MTP: past pairs and acceptance phase per request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.requests.slots import SlotManager
from mtp_plugin.requests.states import is_graph_dummy_id
from mtp_plugin.requests.stop_ids import MAX_STOP_IDS, NO_STOP, TOO_MANY_STOPS, stop_ids_of
from mtp_plugin.requests.thinking import NO_TOKEN, thinking_after, thinking_tokens_of
from mtp_plugin.speculative.host import refuse_unserved
from mtp_plugin.speculative.state.draft_len import read_draft_len
from mtp_plugin.speculative.step import to_device

ATTENTION_DP_DUMMIES = 2

_logger = logging.getLogger("mtp_plugin")


class MTPHiddenStatesManager:
    """Owns a slot per request and the pools that a slot indexes.

    Pools (S slots; plain attributes that a host may replace, read afresh at every use):
    ``mtp_past_hidden_states_pool`` [S, K, H] dtype, ``mtp_past_tokens_pool`` [S, K] int32, and with
    relaxed acceptance ``mtp_relaxed_delta_pool`` [S] float32 (the delta in force: 0 outside the
    thinking phase; a host that writes another is obeyed), ``thinking_pool`` [S] int8 (follows it),
    ``relaxed_topk_pool`` [S] int32, ``relaxed_limit_pool`` [S] float32 (the request's own delta),
    ``stop_ids_pool`` [S, P] int32 (ids accepted only as first choice, read where the host sets no
    ``row_parameters``; -1 behind them; P = :data:`~mtp_plugin.requests.stop_ids.MAX_STOP_IDS`, and
    a request that has more is accepted strictly there, which is logged).

    S covers live and in-flight requests, warm-up and attention-DP dummies, and the sentinel slot,
    the last one, which takes every write of a graph-padding row. A slot's rows are zeroed when it
    is handed out, and its thinking phase is read from the whole prompt.

    Args:
        config: any object with ``max_draft_len`` or ``num_nextn_predict_layers`` (K; the first
            counts where both are given), and optionally the relaxed-acceptance fields.
        dtype: of the hidden states. hidden_size: H.
        max_num_requests: requests that one batch holds.
        device: default CUDA where present, else CPU.
        num_seq_slots: sequences that hold a slot at a time; default 2 * max_num_requests, since
            under overlap a finishing request and its replacement both hold one.
        thinking_tokens: (begin, end) ids for relaxed acceptance; default: those of the config.

    Raises:
        ConfigError: K or a size below 1, or relaxed acceptance without two thinking tokens, or an
            argument of a host that this version does not serve, as ``sa_manager``.
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
        thinking_tokens: tuple[int, int] | None = None,
        **others: Any,
    ) -> None:
        refuse_unserved("MTPHiddenStatesManager", others)
        draft_len = read_draft_len(config)
        for name, value in (
            ("hidden_size", hidden_size),
            ("max_num_requests", max_num_requests),
        ):
            expect(
                isinstance(value, int) and value >= 1,
                ConfigError,
                f"MTPHiddenStatesManager: {name} must be an integer >= 1, got {value!r}",
            )
        self.dtype = dtype
        self.hidden_size = hidden_size
        self.max_num_requests = max_num_requests
        self.num_nextn_predict_layers = draft_len
        self.use_relaxed_acceptance_for_thinking = bool(
            getattr(config, "use_relaxed_acceptance_for_thinking", False)
        )
        self.relaxed_topk = int(getattr(config, "relaxed_topk", 1))
        self.relaxed_delta = float(getattr(config, "relaxed_delta", 0.0))
        self.thinking_tokens = (NO_TOKEN, NO_TOKEN)
        if self.use_relaxed_acceptance_for_thinking:
            self.thinking_tokens = thinking_tokens_of(config, thinking_tokens)
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)

        sequences = num_seq_slots if num_seq_slots is not None else 2 * max_num_requests
        self.slot_manager = SlotManager(
            max(sequences, max_num_requests) + ATTENTION_DP_DUMMIES + max_num_requests
        )
        self.sentinel_slot = self.slot_manager.max_num_requests
        num_rows = self.sentinel_slot + 1
        self._told_of_stop_ids = False
        k = self.num_nextn_predict_layers
        self.mtp_past_hidden_states_pool = torch.zeros(
            num_rows, k, hidden_size, dtype=dtype, device=self.device
        )
        self.mtp_past_tokens_pool = torch.zeros(num_rows, k, dtype=torch.int32, device=self.device)
        if self.use_relaxed_acceptance_for_thinking:
            self.mtp_relaxed_delta_pool = torch.zeros(
                num_rows, dtype=torch.float32, device=self.device
            )
            self.thinking_pool = torch.zeros(num_rows, dtype=torch.int8, device=self.device)
            self.relaxed_topk_pool = torch.full(
                (num_rows,), self.relaxed_topk, dtype=torch.int32, device=self.device
            )
            self.relaxed_limit_pool = torch.full(
                (num_rows,), self.relaxed_delta, dtype=torch.float32, device=self.device
            )
            self.stop_ids_pool = torch.full(
                (num_rows, MAX_STOP_IDS), NO_STOP, dtype=torch.int32, device=self.device
            )

    def prepare_resources(self, scheduled_batch: Any) -> None:
        """Give every request on its first prompt chunk a slot with zeroed rows.

        Raises:
            NoFreeSlotsError: more sequences than slots.
        """
        for request in scheduled_batch.context_requests:
            if request.is_first_context_chunk:
                slot = self.slot_manager.add_slot(request.request_id)
                self._reset(slot, request)

    def update_resources(self, scheduled_batch: Any) -> None:
        """Nothing to do: the pools advance on the device."""

    def free_resources(self, request: Any) -> None:
        """Give the request's slot back; a request that never had one changes nothing."""
        slot = self.slot_manager.get_slot(request.request_id)
        if slot is not None:
            self._zero(slot)
            self.slot_manager.remove_slot(request.request_id)

    def add_dummy_requests(self, request_ids: Sequence[int]) -> None:
        """Slots for warm-up and attention-DP dummies; graph-padding ids share the sentinel slot."""
        for request_id in request_ids:
            if is_graph_dummy_id(request_id):
                self.slot_manager.remove_slot(request_id)
            else:
                self._zero(self.slot_manager.add_slot(request_id))

    def shutdown(self) -> None:
        """Give every slot back."""
        self.slot_manager.shutdown()

    def get_max_resource_count(self) -> int:
        """Requests that one batch may hold."""
        return self.max_num_requests

    def get_needed_resource_to_completion(self, request: Any) -> int:  # noqa: ARG002
        """Always 0: a slot is never the reason to hold a request back."""
        return 0

    def bytes_per_slot(self) -> int:
        """Device bytes that one slot takes in all pools."""
        pair = self.hidden_size * self.mtp_past_hidden_states_pool.element_size() + 4
        relaxed = 4 + 1 + 4 + 4 + 4 * MAX_STOP_IDS
        pairs = self.num_nextn_predict_layers * pair
        return pairs + (relaxed if self.use_relaxed_acceptance_for_thinking else 0)

    def _reset(self, slot: int, request: Any) -> None:
        """Zero the slot and take over the request's acceptance options."""
        self._zero(slot)
        if not self.use_relaxed_acceptance_for_thinking:
            return
        relaxed = getattr(request, "py_relaxed_acceptance", True)
        topk, limit = (self.relaxed_topk, self.relaxed_delta) if relaxed else (1, 0.0)
        # a preempted request starts over with its emitted tokens as part of the prompt
        thinking = thinking_after(request.get_tokens(0), *self.thinking_tokens)
        self.relaxed_topk_pool[slot].fill_(topk)
        self.relaxed_limit_pool[slot].fill_(limit)
        self.thinking_pool[slot].fill_(int(thinking))
        self.mtp_relaxed_delta_pool[slot].fill_(limit if thinking else 0.0)
        stops = self._stop_ids(request)
        if stops:
            row = to_device(stops, torch.int32, self.stop_ids_pool.device)
            self.stop_ids_pool[slot, : len(stops)].copy_(row)

    def _stop_ids(self, request: Any) -> list[int]:
        """What the request's row of ``stop_ids_pool`` starts with."""
        stops = stop_ids_of(request)
        if len(stops) <= MAX_STOP_IDS:
            return stops
        if not self._told_of_stop_ids:
            self._told_of_stop_ids = True
            _logger.warning(
                "request %s has %d stop ids, and relaxed acceptance keeps %d of a request: where "
                "the host sets no row_parameters, requests with more are accepted strictly",
                request.request_id,
                len(stops),
                MAX_STOP_IDS,
            )
        return [TOO_MANY_STOPS]

    def _zero(self, slot: int) -> None:
        self.mtp_past_hidden_states_pool[slot].zero_()
        self.mtp_past_tokens_pool[slot].zero_()
        if self.use_relaxed_acceptance_for_thinking:
            self.mtp_relaxed_delta_pool[slot].zero_()
            self.thinking_pool[slot].zero_()
            self.stop_ids_pool[slot].fill_(NO_STOP)
