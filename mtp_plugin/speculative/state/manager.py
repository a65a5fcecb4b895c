"""The slot-based resource manager of MTP: past pairs and acceptance phase per request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mtp_plugin.errors import ConfigError, MetadataError, expect
from mtp_plugin.requests.slots import SlotManager, slot_or_sentinel
from mtp_plugin.requests.states import is_graph_dummy_id
from mtp_plugin.speculative.host import refuse_unserved
from mtp_plugin.speculative.state.draft_len import read_draft_len
from mtp_plugin.speculative.step import to_device
from mtp_plugin.speculative.verification import (
    ModeOptions,
    RelaxedVerification,
    SlotColumn,
    make_modes,
)

ATTENTION_DP_DUMMIES = 2


class MTPHiddenStatesManager:
    """Owns a slot per request and the pools that a slot indexes.

    Pools (S slots; plain attributes that a host may replace, read afresh at every use):
    ``mtp_past_hidden_states_pool`` [S, K, H] dtype, ``mtp_past_tokens_pool`` [S, K] int32, and one
    for each column of the verification modes that the config enables, by its name: see
    :class:`~mtp_plugin.speculative.verification.relaxed.RelaxedVerification`.

    S covers live and in-flight requests, warm-up and attention-DP dummies, and the sentinel slot,
    the last one, which takes every write of a graph-padding row. A slot's rows are zeroed when it
    is handed out, and what its modes keep is read from the whole prompt.

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
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self.use_relaxed_acceptance_for_thinking = RelaxedVerification.is_enabled(config)
        self.modes = make_modes(ModeOptions(config, draft_len, self.device, thinking_tokens))

        sequences = num_seq_slots if num_seq_slots is not None else 2 * max_num_requests
        self.slot_manager = SlotManager(
            max(sequences, max_num_requests) + ATTENTION_DP_DUMMIES + max_num_requests
        )
        self.sentinel_slot = self.slot_manager.max_num_requests
        num_rows = self.sentinel_slot + 1
        k = self.num_nextn_predict_layers
        self.mtp_past_hidden_states_pool = torch.zeros(
            num_rows, k, hidden_size, dtype=dtype, device=self.device
        )
        self.mtp_past_tokens_pool = torch.zeros(num_rows, k, dtype=torch.int32, device=self.device)
        for column in self._columns:
            shape = (num_rows,) if column.width is None else (num_rows, column.width)
            pool = torch.full(shape, column.empty, dtype=column.dtype, device=self.device)
            setattr(self, column.name, pool)

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

    def slot_of(self, request_id: int) -> int:
        """The request's row in the pools; graph-padding ids have the sentinel's.

        Raises:
            MetadataError: the request has no slot.
        """
        slot = slot_or_sentinel(self.slot_manager, request_id, self.sentinel_slot)
        if slot is None:
            raise MetadataError(f"request {request_id} has no slot in the MTP manager")
        return slot

    def memory_report(self) -> str:
        """What the pools take of the device, in words."""
        slots, size = self.sentinel_slot + 1, self.bytes_per_slot()
        return f"MTP state {slots * size / 2**20:.1f} MiB ({slots} slots of {size} bytes)"

    def bytes_per_slot(self) -> int:
        """Device bytes that one slot takes in all pools."""
        pair = self.hidden_size * self.mtp_past_hidden_states_pool.element_size() + 4
        kept = sum(column.dtype.itemsize * (column.width or 1) for column in self._columns)
        return self.num_nextn_predict_layers * pair + kept

    @property
    def _columns(self) -> list[SlotColumn]:
        return [column for mode in self.modes for column in mode.columns]

    def _reset(self, slot: int, request: Any) -> None:
        """Zero the slot and take over what the request asks of its modes."""
        self._zero_history(slot)
        for mode in self.modes:
            values = mode.slot_values(request)
            for column in mode.columns:
                self._fill(column, slot, values.get(column.name, column.empty))

    def _fill(self, column: SlotColumn, slot: int, value: float | Sequence[float]) -> None:
        row = getattr(self, column.name)[slot]
        given = value if isinstance(value, Sequence) else ()
        if given:
            rest = [column.empty] * (row.shape[0] - len(given))
            row.copy_(to_device([*given, *rest], column.dtype, row.device))
        else:
            row.fill_(column.empty if isinstance(value, Sequence) else value)

    def _zero(self, slot: int) -> None:
        self._zero_history(slot)
        for column in self._columns:
            self._fill(column, slot, column.empty)

    def _zero_history(self, slot: int) -> None:
        self.mtp_past_hidden_states_pool[slot].zero_()
        self.mtp_past_tokens_pool[slot].zero_()
