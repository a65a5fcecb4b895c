"""Resource managers: a slot per request, what is kept of it, and vanilla's past pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from mtp_plugin.errors import ConfigError, MetadataError, NoFreeSlotsError, expect
from mtp_plugin.requests.columns import NO_ROW, NO_TOKEN, POOL_ROWS, REQUEST_COLUMNS, TableColumns
from mtp_plugin.requests.options import MAX_BAD_WORD_LEN, OPTIONS
from mtp_plugin.requests.seeds import ENGINE_SEED
from mtp_plugin.requests.slots import SlotManager, slot_or_sentinel
from mtp_plugin.requests.states import RequestState, is_graph_dummy_id
from mtp_plugin.requests.thinking import ThinkingEnd
from mtp_plugin.speculative.host import (
    DecodingOptions,
    RequestFacts,
    ScheduledBatch,
    SpecRequest,
    ends_prompt,
    own_facts,
    phase_of,
    read_request,
    refuse,
    refuse_unserved,
    token_after_chunk,
)
from mtp_plugin.speculative.state.edit_rows import POOLED_OPTIONS, EditRows
from mtp_plugin.speculative.state.slot_table import SlotTable, SlotValues
from mtp_plugin.speculative.step import SamplingKind, SlotRows
from mtp_plugin.speculative.verification import VerificationMode, make_modes

ATTENTION_DP_DUMMIES = 2
BUDGET = "thinking_token_budget"
DRAWN = frozenset(name for name, option in OPTIONS.items() if option.draws)
"""Options that say how tokens are drawn."""


class SlotStateManager:
    """Owns a slot per request, and a row of the slot table per slot.

    S covers live and in-flight requests, warm-up and attention-DP dummies, and the sentinel slot,
    the last one, which takes every write of a graph-padding row. A row is written when its slot is
    handed out, and what its modes keep is read from the whole prompt. Columns that hosts may write
    are attributes too, views of the table that may be replaced and are read afresh at every use: of
    :class:`~mtp_plugin.speculative.verification.relaxed.RelaxedVerification` the
    ``mtp_relaxed_delta_pool`` [S] float32.

    ``draft_probs`` [S, K, V] float32 is what drafts were drawn from, where a mode reads it.

    Of a host's request without facts of its own, what cannot be kept is told in the request, which
    the sampler then ends: it has a slot, and is decoded greedily until then.

    A host may set ``always_edits`` and ``always_greedy``.

    Args:
        modes: of verification, whose columns the table has.
        max_num_requests: requests that one batch holds.
        device: default CUDA where present, else CPU.
        num_seq_slots: sequences that hold a slot at a time; default 2 * max_num_requests, since
            under overlap a finishing request and its replacement both hold one.
        vocab_size: of the logits; None: no request may ask for what needs a pool as wide, as
            ``logit_bias`` or a penalty.
        thinking_end: what budgets of thinking go by; None: no request may have one.
        engine_seed: that requests without a seed draw with, the same on every rank.

    Raises:
        ConfigError: a size below 1.
    """

    def __init__(
        self,
        modes: Sequence[VerificationMode],
        max_num_requests: int,
        *,
        device: torch.device | str | None = None,
        num_seq_slots: int | None = None,
        vocab_size: int | None = None,
        thinking_end: ThinkingEnd | None = None,
        engine_seed: int = ENGINE_SEED,
    ) -> None:
        self._expect_size("max_num_requests", max_num_requests)
        self.thinking_end = thinking_end
        self.max_num_requests = max_num_requests
        self.device = _device(device)
        self.modes = tuple(modes)
        self.engine_seed = engine_seed
        sequences = num_seq_slots if num_seq_slots is not None else 2 * max_num_requests
        self.slot_manager = SlotManager(
            max(sequences, max_num_requests) + ATTENTION_DP_DUMMIES + max_num_requests
        )
        self.sentinel_slot = self.slot_manager.max_num_requests
        self.edit_rows: EditRows | None = None
        if vocab_size is not None:
            self._expect_size("vocab_size", vocab_size)
            self.edit_rows = EditRows(max_num_requests + 1, vocab_size, self.device)
        columns = [column for mode in self.modes for column in mode.columns]
        self.table = SlotTable(self.num_rows, columns, self.device)
        self._pools = tuple(column.name for column in columns if column.is_pool)
        for name in self._pools:
            setattr(self, name, self.table.column(name))
        self.draft_probs = self._make_draft_probs(vocab_size)
        self.always_edits = False
        """Every step is one in which requests ask for anything, unless its host says otherwise:
        for hosts that choose captured steps without knowing what was captured. Steps of greedy
        requests then cost what those of a penalty and log-probabilities do: the draws' reduction,
        a pass over the rows' log-probabilities, the notes of what was emitted. Their greedy drafts
        come of the kernel that sees edits of logits, in as many launches."""
        self.always_greedy = False
        """How requests want their tokens drawn is left out."""
        self._sampling_kinds: dict[int, SamplingKind] = {}
        self._row_owners: dict[int, SpecRequest] = {}
        self._contexts: Sequence[Any] = ()
        self._dummies: set[int] = set()
        self._owners: dict[int, SpecRequest] = {}

    @staticmethod
    def bytes_per_request(vocab_size: int, pair_bytes: int = 0, num_draft_probs: int = 0) -> int:
        """Device bytes that a request of a batch takes, columns of modes left out: a row of the
        pools, and slots for itself, for who comes behind it, and for warm-up.

        Args:
            pair_bytes: of a slot's past pairs.
            num_draft_probs: drafts of a slot whose probabilities are kept.
        """
        slot = (
            4 * TableColumns(REQUEST_COLUMNS).width + pair_bytes + 4 * num_draft_probs * vocab_size
        )
        return EditRows.bytes_per_row(vocab_size) + 3 * slot

    @property
    def num_rows(self) -> int:
        """S: slots, the sentinel's too."""
        return self.sentinel_slot + 1

    def prepare_resources(self, scheduled_batch: ScheduledBatch) -> None:
        """Give every request on its first prompt chunk a slot with a row of its own values.

        Raises:
            NoFreeSlotsError: more sequences than slots, or more requests with logits processing
                than the pools have rows.
            MetadataError: another live request has the same id, or an option cannot be served. The
                request that fails has no slot.
        """
        fresh: dict[int, dict[str, Any]] = {}
        admitted: dict[int, RequestFacts] = {}
        self._contexts = tuple(scheduled_batch.context_requests)
        try:
            for request in self._contexts:
                if request.is_first_context_chunk:
                    slot, fresh[slot], admitted[slot] = self._admit(request)
            if self.edit_rows is not None:
                # behind all who must have a row
                for slot, facts in admitted.items():
                    fresh[slot] |= self.edit_rows.take_for_drafts(facts)
        finally:
            self._reset(fresh)

    def _admit(self, request: SpecRequest) -> tuple[int, dict[str, Any], RequestFacts]:
        """A slot for a request, what stands in it, and what the request asks for."""
        facts = read_request(request)
        if self.always_greedy:
            facts = facts.without(DRAWN)
        values = self._values_of(request, facts)
        self._expect_unique_id(request, facts)
        slot = self.slot_manager.add_slot(request.request_id)
        try:
            values |= self._rows_of(request, facts)
        except (MetadataError, NoFreeSlotsError) as error:
            if own_facts(request) is not None:
                self.free_resources(request)
                raise
            refuse(request, str(error))
            facts = facts.without(OPTIONS)
            values = self._values_of(request, facts)
        except BaseException:
            self.free_resources(request)
            raise
        if facts.sampling_kind is not SamplingKind.GREEDY:
            self._sampling_kinds[facts.request_id] = facts.sampling_kind
        if not facts.is_dummy:
            self._owners[facts.request_id] = request
        return slot, values, facts

    def _expect_unique_id(self, request: SpecRequest, facts: RequestFacts) -> None:
        """Refuse a request whose id is that of another live one, because both would share a slot.

        A request that starts over after preemption keeps its slot.

        Raises:
            MetadataError: naming the id.
        """
        owner = self._owners.get(request.request_id)
        if owner is None or owner is request or facts.is_dummy:
            return
        if phase_of(owner) == RequestState.GENERATION_COMPLETE.name:
            return
        raise MetadataError(
            f"request {request.request_id}: another live request has this id and holds its slot; "
            "expected a different id, or free_resources() for the other one first"
        )

    def sampling_kind_of(self, request_ids: Iterable[int]) -> SamplingKind:
        """Return what these requests need at most."""
        if self.always_edits:
            return SamplingKind.PROCESSED
        kinds = self._sampling_kinds
        if not kinds:
            return SamplingKind.GREEDY
        return max((kinds[n] for n in request_ids if n in kinds), default=SamplingKind.GREEDY)

    @property
    def any_request_options(self) -> bool:
        """Whether a request that holds a slot sets options beyond greedy decoding."""
        return bool(self._sampling_kinds)

    def is_dummy(self, request_id: int) -> bool:
        """Return whether the id is one of graph padding or of :meth:`add_dummy_requests`."""
        return request_id in self._dummies or is_graph_dummy_id(request_id)

    def successors_of(self, request_ids: Sequence[int]) -> list[int] | None:
        """The prompt token behind the chunk of each of these contexts of the step at hand, -1 where
        it ends the prompt or nobody knows it; None: of all."""
        unfinished = {
            request.request_id: request
            for request in self._contexts
            if ends_prompt(request) is False
        }
        if not unfinished:
            return None
        return [
            token_after_chunk(unfinished[number]) if number in unfinished else -1
            for number in request_ids
        ]

    def update_resources(self, scheduled_batch: ScheduledBatch) -> None:
        """Nothing to do: what is kept moves on on the device."""

    def free_resources(self, request: SpecRequest) -> None:
        """Give the request's slot back; a request that never had one changes nothing."""
        self.slot_manager.remove_slot(request.request_id)
        self._sampling_kinds.pop(request.request_id, None)
        self._dummies.discard(request.request_id)
        self._owners.pop(request.request_id, None)
        self._row_owners.pop(request.request_id, None)
        if self.edit_rows is not None:
            self.edit_rows.give_back(request.request_id)

    def add_dummy_requests(self, request_ids: Sequence[int]) -> None:
        """Slots for warm-up and attention-DP dummies; graph-padding ids share the sentinel slot."""
        fresh: dict[int, SlotValues] = {}
        for request_id in request_ids:
            if is_graph_dummy_id(request_id):
                self.slot_manager.remove_slot(request_id)
            else:
                fresh[self.slot_manager.add_slot(request_id)] = {}
                self._dummies.add(request_id)
        self._reset(fresh)

    def shutdown(self) -> None:
        """Give every slot back."""
        self.slot_manager.shutdown()
        self._sampling_kinds.clear()
        self._dummies.clear()
        self._owners.clear()
        self._row_owners.clear()
        self._contexts = ()
        if self.edit_rows is not None:
            self.edit_rows.shutdown()

    def get_max_resource_count(self) -> int:
        """Requests that one batch may hold."""
        return self.max_num_requests

    def get_needed_resource_to_completion(self, request: SpecRequest) -> int:  # noqa: ARG002
        """Always 0: a slot is never the reason to hold a request back."""
        return 0

    def slot_of(self, request_id: int) -> int:
        """The request's row in table and pools; graph-padding ids have the sentinel's.

        Raises:
            MetadataError: the request has no slot.
        """
        slot = slot_or_sentinel(self.slot_manager, request_id, self.sentinel_slot)
        if slot is None:
            raise MetadataError(f"request {request_id} has no slot in the MTP manager")
        return slot

    def slot_rows(self, slot_ids: torch.Tensor) -> SlotRows:
        """What is kept of a step's requests, whose slots are [R] int64."""
        if self.edit_rows is None:
            return self.table.rows_of(slot_ids)
        return self.table.rows_of(slot_ids, self.edit_rows.pools, self.edit_rows.bans)

    def memory_report(self, name: str = "MTP state") -> str:
        """What is kept takes of the device, in words, under a name."""
        slots, size = self.num_rows, self.bytes_per_slot()
        told = f"{name} {slots * size / 2**20:.1f} MiB ({slots} slots of {size} bytes)"
        if self.edit_rows is not None:
            told += f", logit edits {self.edit_rows.num_bytes / 2**20:.1f} MiB"
        if self.draft_probs is not None:
            told += f", draft probabilities {self.draft_probs.nbytes / 2**20:.1f} MiB"
        return told

    def bytes_per_slot(self) -> int:
        """Device bytes that one slot takes."""
        return 4 * self.table.columns.width

    def _values_of(self, request: SpecRequest, facts: RequestFacts) -> dict[str, Any]:
        values = facts.columns(self.engine_seed)
        for mode in self.modes:
            if mode.columns:
                # a host copies the tokens of a prompt for who asks
                tokens = request.get_tokens(0) if mode.reads_tokens else ()
                values.update(mode.slot_values(facts, tokens))
        if BUDGET in facts.options:
            values.update(self._thought_of(request, facts))
        return values

    def _thought_of(self, request: SpecRequest, facts: RequestFacts) -> dict[str, Any]:
        """How much of its budget a request has spent, and how much of the end it has begun.

        Raises:
            MetadataError: there is no end.
        """
        budget = facts.options[BUDGET]
        if self.thinking_end is None:
            raise MetadataError(
                f"request {request.request_id}: {BUDGET}={budget} needs a manager that was told "
                "thinking_end"
            )
        tokens = request.get_tokens(0)
        thought, place = self.thinking_end.progress_after(tokens, facts.stop.prompt_len, budget)
        return {"thought": thought, "end_place": place}

    def _rows_of(self, request: SpecRequest, facts: RequestFacts) -> dict[str, Any]:
        """The request's rows in the pools, and its last tokens for bad words.

        Raises:
            MetadataError: it needs one, and there is none.
        """
        needed = [name for name in facts.options if name in POOLED_OPTIONS]
        if not needed:
            return {}
        if self.edit_rows is None:
            raise MetadataError(
                f"request {request.request_id}: {', '.join(needed)} need a manager that was told "
                "vocab_size"
            )
        tokens = request.get_tokens(0)
        if not self.edit_rows.has_room(request.request_id):
            self._make_room(self.edit_rows)
        rows = self.edit_rows.take(request.request_id, facts, tokens)
        if rows:
            self._row_owners[request.request_id] = request
        recent = list(tokens[-MAX_BAD_WORD_LEN:])
        padding = [NO_TOKEN] * (MAX_BAD_WORD_LEN - len(recent))
        return {**rows, "recent": padding + recent}

    def _make_room(self, edit_rows: EditRows) -> None:
        """Take rows back: of requests that have ended, which hosts may free a step later, or the
        one that another request has for its drafts alone.

        What still runs for them stands before what is written now.
        """
        ended = [
            request_id
            for request_id, owner in self._row_owners.items()
            if phase_of(owner) == RequestState.GENERATION_COMPLETE.name
        ]
        for request_id in ended:
            del self._row_owners[request_id]
            edit_rows.give_back(request_id)
        yielding = None if ended else edit_rows.take_from_drafts()
        for request_id in ended if yielding is None else [yielding]:
            slot = self.slot_of(request_id)
            for name in POOL_ROWS:
                self.table.column(name)[slot : slot + 1].fill_(NO_ROW)

    def _make_draft_probs(self, vocab_size: int | None) -> torch.Tensor | None:
        """[S, K, V] float32, nothing for ids that are never drafted; None: no mode reads it."""
        per_slot = max((mode.num_draft_probs for mode in self.modes), default=0)
        if per_slot == 0:
            return None
        expect(
            vocab_size is not None,
            ConfigError,
            f"{type(self).__name__}: vocab_size must be given with mtp.verification rejection or "
            "block, which keep what drafts are drawn from, got None",
        )
        shape = (self.num_rows, per_slot, vocab_size or 0)
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    def _expect_size(self, name: str, value: int) -> None:
        expect(
            isinstance(value, int) and value >= 1,
            ConfigError,
            f"{type(self).__name__}: {name} must be an integer >= 1, got {value!r}",
        )

    def _reset(self, slots: Mapping[int, SlotValues]) -> None:
        """Write the rows of slots that are handed out."""
        if slots:
            self._zero(self.table.write(slots))

    def _zero(self, slots: torch.Tensor) -> None:
        """Begin anew with what is kept of ``slots`` [N] int64 beside the table."""
        for name in self._pools:
            pool, written = vars(self)[name], self.table.column(name)
            if pool.data_ptr() != written.data_ptr():  # a host replaced it
                pool.index_copy_(0, slots.to(pool.device), written[slots].to(pool))


class MTPHiddenStatesManager(SlotStateManager):
    """And the past pairs of every slot, that layers of their own depth read.

    Pools (plain attributes that a host may replace, read afresh at every use):
    ``mtp_past_hidden_states_pool`` [S, K, H] dtype and ``mtp_past_tokens_pool`` [S, K] int32. A
    slot's rows are zeroed when it is handed out.

    Args:
        config: any object with ``max_draft_len`` or ``num_nextn_predict_layers`` (K; the first
            counts where both are given), and optionally the relaxed-acceptance fields.
        dtype: of the hidden states. hidden_size: H.
        max_num_requests, device, num_seq_slots, vocab_size: as `SlotStateManager`.
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
        vocab_size: int | None = None,
        thinking_tokens: tuple[int, int] | None = None,
        **others: Any,
    ) -> None:
        refuse_unserved("MTPHiddenStatesManager", others)
        options = DecodingOptions.read(config, thinking_tokens=thinking_tokens)
        self._expect_size("hidden_size", hidden_size)
        modes = make_modes(options, _device(device))
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


def _device(asked: torch.device | str | None) -> torch.device:
    return torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
