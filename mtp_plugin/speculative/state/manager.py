"""The resource manager that owns the state slots of requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from mtp_plugin.errors import ConfigError, MetadataError, NoFreeSlotsError, expect, expect_int
from mtp_plugin.ops.checks import INTEGERS, expect_tensor
from mtp_plugin.ops.step import SamplingKind, SlotRows
from mtp_plugin.requests.columns import NO_ROW, NO_TOKEN, POOL_ROWS, REQUEST_COLUMNS, TableColumns
from mtp_plugin.requests.options import MAX_BAD_WORD_LEN, OPTIONS
from mtp_plugin.requests.seeds import ENGINE_SEED
from mtp_plugin.requests.slots import SlotManager, slot_or_sentinel
from mtp_plugin.requests.states import RequestState, is_graph_dummy_id
from mtp_plugin.requests.thinking import ThinkingEnd
from mtp_plugin.speculative.host import (
    RequestFacts,
    ends_prompt,
    own_facts,
    phase_of,
    read_request,
    refuse,
    token_after_chunk,
)
from mtp_plugin.speculative.state.logits_processor_allocator import (
    POOLED_OPTIONS,
    LogitsProcessorAllocator,
)
from mtp_plugin.speculative.state.slot_table import SlotTable, SlotValues
from mtp_plugin.speculative.verification import VerificationMode

if TYPE_CHECKING:
    from mtp_plugin.speculative.host import ScheduledBatch, SpecRequest

ATTENTION_DP_DUMMIES = 2
BUDGET = "thinking_token_budget"
_SAMPLING_OPTIONS = frozenset(name for name, option in OPTIONS.items() if option.draws)
"""Options that control how tokens are sampled."""


class SlotStateManager:
    """Owns the state slot of each request, and the slot table with a row per slot.

    The S slots serve live and in-flight requests, warm-up and attention-DP dummies, and the
    sentinel, the last slot, to which graph-padding rows write. A row is written when its slot is
    allocated; verification modes compute their columns from the whole prompt. Columns that hosts
    may write are also attributes, such as ``mtp_relaxed_delta_pool`` [S] float32 of
    :class:`~mtp_plugin.speculative.verification.relaxed.RelaxedVerification`: views of the table
    that a host may replace, read again at every use.

    ``draft_probs`` [S, K, V] float32 holds the distributions that drafts were sampled from, if a
    mode reads them.

    If an option of a host's own request cannot be served, the request is marked as refused: it
    keeps a slot and is decoded greedily until the sampler finishes it with the error.

    A host may set the attributes ``always_edits`` and ``always_greedy``.

    Args:
        modes: verification modes, whose columns are in the table.
        max_num_requests: maximum number of requests of a batch.
        device: default CUDA where present, else CPU.
        num_seq_slots: maximum number of sequences with a slot; default 2 * max_num_requests, since
            under overlap scheduling a finishing request and its replacement both have one.
        vocab_size: columns of the logits; None: options with per-token state, such as
            ``logit_bias`` and penalties, are refused.
        thinking_end: end of the thinking phase for thinking budgets; None: budgets are refused.
        engine_seed: seed of requests without a seed, the same on every rank.

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
        max_num_requests = self._expect_size("max_num_requests", max_num_requests)
        self.thinking_end = thinking_end
        self.max_num_requests = max_num_requests
        self.device = resolve_device(device)
        self.modes = tuple(modes)
        self.engine_seed = engine_seed
        sequences = 2 * max_num_requests
        if num_seq_slots is not None:
            sequences = self._expect_size("num_seq_slots", num_seq_slots)
        self.slot_manager = SlotManager(
            max(sequences, max_num_requests) + ATTENTION_DP_DUMMIES + max_num_requests
        )
        self.sentinel_slot = self.slot_manager.max_num_requests
        self.logits_allocator: LogitsProcessorAllocator | None = None
        if vocab_size is not None:
            vocab_size = self._expect_size("vocab_size", vocab_size)
            self.logits_allocator = LogitsProcessorAllocator(
                max_num_requests + 1, vocab_size, self.device
            )
        columns = [column for mode in self.modes for column in mode.columns]
        self.table = SlotTable(self.num_rows, columns, self.device)
        self._pools = tuple(column.name for column in columns if column.is_pool)
        for name in self._pools:
            setattr(self, name, self.table.column(name))
        self.draft_probs = self._make_draft_probs(vocab_size)
        self.always_edits = False
        """Run every step with `SamplingKind.PROCESSED`, unless the host sets a step's kind itself;
        for hosts that replay a CUDA graph without knowing the kind it was captured with. Greedy
        steps then cost as much as steps with penalties and log-probabilities: the sampling
        reduction, a log-probability pass and the token history update. Drafts take as many launches
        as before, with the logits-processing kernel."""
        self.always_greedy = False
        """Ignore the sampling options of requests and decode greedily."""
        self._sampling_kinds: dict[int, SamplingKind] = {}
        self._row_owners: dict[int, SpecRequest] = {}
        self._contexts: Sequence[Any] = ()
        self._dummies: set[int] = set()
        self._owners: dict[int, SpecRequest] = {}
        self._not_owners: WeakValueDictionary[int, SpecRequest] = WeakValueDictionary()
        self._held: dict[int, SpecRequest] = {}
        """Those without weak references, until the slot of their id is free."""

    @staticmethod
    def bytes_per_request(vocab_size: int, pair_bytes: int = 0, num_draft_probs: int = 0) -> int:
        """Return the device bytes per request of a batch, without the columns of modes.

        This is one row of the pools and three slots: of the request, of its replacement under
        overlap scheduling, and of warm-up.

        Args:
            pair_bytes: bytes of a slot's past hidden states and tokens.
            num_draft_probs: number of drafts per slot whose probabilities are kept.
        """
        slot = (
            4 * TableColumns(REQUEST_COLUMNS).width + pair_bytes + 4 * num_draft_probs * vocab_size
        )
        return LogitsProcessorAllocator.bytes_per_row(vocab_size) + 3 * slot

    @property
    def num_rows(self) -> int:
        """S: number of slots including the sentinel."""
        return self.sentinel_slot + 1

    def prepare_resources(self, scheduled_batch: ScheduledBatch) -> None:
        """Allocate and fill a slot for every request on its first prompt chunk.

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
                    try:
                        slot, fresh[slot], admitted[slot] = self._admit(request)
                    except BaseException:
                        if not any(owner is request for owner in self._owners.values()):
                            self._disown(request)
                        raise
            if self.logits_allocator is not None:
                # requests that need a row for the target come first
                for slot, facts in admitted.items():
                    fresh[slot] |= self.logits_allocator.allocate_for_draft_mask(facts)
        finally:
            self._reset(fresh)

    def _admit(self, request: SpecRequest) -> tuple[int, dict[str, Any], RequestFacts]:
        """Allocate a slot; return it with its values and the options of the request."""
        expect_int("request_id", request.request_id, error=MetadataError)
        facts = read_request(request)
        if self.always_greedy:
            facts = facts.without(_SAMPLING_OPTIONS)
        values = self._slot_values(request, facts)
        self._expect_unique_id(request, facts)
        slot = self.slot_manager.add_slot(request.request_id)
        try:
            values |= self._allocate_pool_row(request, facts)
        except (MetadataError, NoFreeSlotsError) as error:
            if own_facts(request) is not None:
                self.free_resources(request)
                raise
            refuse(request, str(error))
            facts = facts.without(OPTIONS)
            values = self._slot_values(request, facts)
        except BaseException:
            self.free_resources(request)
            raise
        if facts.sampling_kind is not SamplingKind.GREEDY:
            self._sampling_kinds[facts.request_id] = facts.sampling_kind
        if not facts.is_dummy:
            replaced = self._owners.get(facts.request_id)
            if replaced is not None:
                self._disown(replaced)
            self._owners[facts.request_id] = request
        self._not_owners.pop(id(request), None)
        self._held.pop(id(request), None)
        return slot, values, facts

    def _disown(self, request: SpecRequest) -> None:
        """Remember that :meth:`free_resources` of this object must not free the slot of its id."""
        try:
            self._not_owners[id(request)] = request
        except TypeError:  # no weak references
            owned = (owner.request_id for owner in self._owners.values())
            if request.request_id in owned:
                self._held[id(request)] = request

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
        """Return the highest sampling kind of these requests."""
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
        """Return the prompt token after the chunk of each of these contexts of the current step.

        It is -1 where the chunk ends the prompt or the token is unknown; None: -1 for all.
        """
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
        """Do nothing: the step updates the state on the device."""

    def free_resources(self, request: SpecRequest) -> None:
        """Free the request's slot.

        Does nothing if it has none, nor for a request that was refused or that a later one with the
        same id replaced. Any other object with the id frees the slot.
        """
        if id(request) in self._held or self._not_owners.get(id(request)) is request:
            return
        self.slot_manager.remove_slot(request.request_id)
        self._sampling_kinds.pop(request.request_id, None)
        self._dummies.discard(request.request_id)
        self._owners.pop(request.request_id, None)
        self._row_owners.pop(request.request_id, None)
        for key, each in list(self._held.items()):
            if each.request_id == request.request_id:
                del self._held[key]
        if self.logits_allocator is not None:
            self.logits_allocator.free(request.request_id)

    def add_dummy_requests(self, request_ids: Sequence[int]) -> None:
        """Allocate slots for warm-up and attention-DP dummies.

        Graph-padding ids share the sentinel slot.

        Raises:
            MetadataError: an id is no integer.
        """
        fresh: dict[int, SlotValues] = {}
        for given in request_ids:
            request_id = expect_int("add_dummy_requests: request id", given, error=MetadataError)
            if is_graph_dummy_id(request_id):
                self.slot_manager.remove_slot(request_id)
            else:
                fresh[self.slot_manager.add_slot(request_id)] = {}
                self._dummies.add(request_id)
        self._reset(fresh)

    def shutdown(self) -> None:
        """Free every slot."""
        self.slot_manager.shutdown()
        self._sampling_kinds.clear()
        self._dummies.clear()
        self._owners.clear()
        self._not_owners.clear()
        self._held.clear()
        self._row_owners.clear()
        self._contexts = ()
        if self.logits_allocator is not None:
            self.logits_allocator.shutdown()

    def get_max_resource_count(self) -> int:
        """Return the maximum number of requests of a batch."""
        return self.max_num_requests

    def get_needed_resource_to_completion(self, request: SpecRequest) -> int:  # noqa: ARG002
        """Return 0: slots never limit the capacity of the scheduler."""
        return 0

    def slot_of(self, request_id: int) -> int:
        """Return the request's row in table and pools; graph-padding ids have the sentinel's.

        Raises:
            MetadataError: the request has no slot.
        """
        slot = slot_or_sentinel(self.slot_manager, request_id, self.sentinel_slot)
        if slot is None:
            raise MetadataError(f"request {request_id} has no slot in the MTP manager")
        return slot

    def slot_rows(self, slot_ids: torch.Tensor) -> SlotRows:
        """Return the state of a step's requests; ``slot_ids`` is [R] int64.

        Raises:
            TensorContractError: ``slot_ids`` is no integer vector.
        """
        expect_tensor("slot_ids", slot_ids, dtype=INTEGERS, shape=("R",))
        allocator = self.logits_allocator
        if allocator is None:
            return self.table.rows_of(slot_ids)
        return self.table.rows_of(slot_ids, allocator.pools, allocator.draft_mask)

    def memory_report(self, name: str = "MTP state") -> str:
        """Return one line with the device memory of each part, starting with ``name``."""
        slots, size = self.num_rows, self.bytes_per_slot()
        report = f"{name} {slots * size / 2**20:.1f} MiB ({slots} slots of {size} bytes)"
        if self.logits_allocator is not None:
            report += f", logits processing {self.logits_allocator.num_bytes / 2**20:.1f} MiB"
        if self.draft_probs is not None:
            report += f", draft probabilities {self.draft_probs.nbytes / 2**20:.1f} MiB"
        return report

    def bytes_per_slot(self) -> int:
        """Return the device bytes of one slot."""
        return 4 * self.table.columns.width

    def _slot_values(self, request: SpecRequest, facts: RequestFacts) -> dict[str, Any]:
        values = facts.columns(self.engine_seed)
        for mode in self.modes:
            if mode.columns:
                # get_tokens copies the tokens in some hosts
                tokens = request.get_tokens(0) if mode.reads_tokens else ()
                values.update(mode.slot_values(facts, tokens))
        if BUDGET in facts.options:
            values.update(self._thinking_values(request, facts))
        return values

    def _thinking_values(self, request: SpecRequest, facts: RequestFacts) -> dict[str, Any]:
        """Return the thinking-token count and end-sequence progress of a request.

        Raises:
            MetadataError: the manager has no ``thinking_end``.
        """
        budget = facts.options[BUDGET]
        if self.thinking_end is None:
            raise MetadataError(
                f"request {request.request_id}: {BUDGET}={budget} needs a manager with thinking_end"
            )
        tokens = request.get_tokens(0)
        num_thinking, progress = self.thinking_end.progress_after(
            tokens, facts.stop.prompt_len, budget
        )
        return {"num_thinking": num_thinking, "end_progress": progress}

    def _allocate_pool_row(self, request: SpecRequest, facts: RequestFacts) -> dict[str, Any]:
        """Allocate a row in the pools if the request needs one; return the slot-table columns that
        hold it, and the last tokens.

        Raises:
            MetadataError: it needs a row, and the manager has no pools.
        """
        needed = [name for name in facts.options if name in POOLED_OPTIONS]
        if not needed:
            return {}
        if self.logits_allocator is None:
            raise MetadataError(
                f"request {request.request_id}: {', '.join(needed)} need a manager with vocab_size"
            )
        tokens = request.get_tokens(0)
        if not self.logits_allocator.has_room(request.request_id):
            self._free_rows(self.logits_allocator)
        rows = self.logits_allocator.allocate(request.request_id, facts, tokens)
        if rows:
            self._row_owners[request.request_id] = request
        recent = list(tokens[-MAX_BAD_WORD_LEN:])
        padding = [NO_TOKEN] * (MAX_BAD_WORD_LEN - len(recent))
        return {**rows, "recent": padding + recent}

    def _free_rows(self, allocator: LogitsProcessorAllocator) -> None:
        """Free the rows of finished requests; if there are none, one that only masks drafts.

        Hosts may free a finished request a step late. Kernels in flight read these rows before the
        writes of this call.
        """
        ended = [
            request_id
            for request_id, owner in self._row_owners.items()
            if phase_of(owner) == RequestState.GENERATION_COMPLETE.name
        ]
        for request_id in ended:
            del self._row_owners[request_id]
            allocator.free(request_id)
        reclaimed = None if ended else allocator.reclaim_draft_mask_row()
        for request_id in ended if reclaimed is None else [reclaimed]:
            slot = self.slot_of(request_id)
            for name in POOL_ROWS:
                self.table.column(name)[slot : slot + 1].fill_(NO_ROW)

    def _make_draft_probs(self, vocab_size: int | None) -> torch.Tensor | None:
        """Allocate [S, K, V] float32, 0 for ids that are never drafted; None: no mode reads it."""
        per_slot = max((mode.num_draft_probs for mode in self.modes), default=0)
        if per_slot == 0:
            return None
        expect(
            vocab_size is not None,
            ConfigError,
            f"{type(self).__name__}: vocab_size must be given with mtp.verification rejection or "
            "block, which keep the distributions of the drafts, got None",
        )
        shape = (self.num_rows, per_slot, vocab_size or 0)
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    def _expect_size(self, name: str, value: int) -> int:
        return expect_int(f"{type(self).__name__}: {name}", value, 1, error=ConfigError)

    def _reset(self, slots: Mapping[int, SlotValues]) -> None:
        """Write the rows of newly allocated slots."""
        if slots:
            self._zero(self.table.write(slots))

    def _zero(self, slots: torch.Tensor) -> None:
        """Reset the state of ``slots`` [N] int64 outside the table."""
        for name in self._pools:
            pool, written = vars(self)[name], self.table.column(name)
            if pool.data_ptr() != written.data_ptr():  # the host replaced it
                pool.index_copy_(0, slots.to(pool.device), written[slots].to(pool))


def resolve_device(requested: torch.device | str | None) -> torch.device:
    """Return the requested device; by default CUDA where present, else CPU."""
    return torch.device(requested or ("cuda" if torch.cuda.is_available() else "cpu"))
