"""Moves a step's tokens to its requests, one step behind the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from mtp_plugin.errors import ConfigError, ExecutorError, expect
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.requests.admission import unsupported_options
from mtp_plugin.requests.states import FinishReason, RequestState
from mtp_plugin.requests.stop_ids import stop_words
from mtp_plugin.speculative.host import refuse_unserved
from mtp_plugin.speculative.ops.sampler_store import store_results
from mtp_plugin.speculative.result_store import (
    ResultStore,
    SampleStateTensorsMTP,
    recorded_event,
)
from mtp_plugin.speculative.step import STATUS_OK, to_device

BEAM = 0
NO_FINITE_LOGITS = "the target gave a row of logits without any finite value"

_logger = logging.getLogger("mtp_plugin")


class PendingRow(NamedTuple):
    """What a request was when its step was launched; later changes make the result late."""

    request: Any
    epoch: int
    seq_slot: int
    is_context: bool
    num_drafted: int
    emits: bool | None  # False: a chunk that does not end the prompt; None: ask at update time
    refused: str | None = None  # why the request gets none of the step's tokens


@dataclass
class SampleStateMTP:
    """Result of ``sample_async``; every field is optional, since hosts build it by keyword."""

    scheduled_requests: Any = None
    device: SampleStateTensorsMTP | None = None
    host: SampleStateTensorsMTP | None = None
    sampler_event: Any = None
    requests: list[Any] = field(default_factory=list)
    rows: list[PendingRow] = field(default_factory=list)
    runtime_draft_len: int | None = None
    results: ResultStore | None = None  # what ``host`` has, in one piece


class MTPSampler:
    """TensorRT-LLM's sampler contract for workers that return accepted tokens and next drafts.

    Args:
        args: any object with ``max_num_sequences`` (S) and ``max_seq_len``, as
            ``TorchSampler.Args``.
        nextn: K, 0 for decoding without drafts.
        device: of the store; default CUDA where present.
        kernels: what writes the store, see `kernels.backend.Backend`.
        always_greedy: take requests that ask for a temperature and the like, and decode them
            greedily, as TensorRT-LLM's own MTP sampler does; servers may put a temperature of 1
            into every request. False: refuse them.
        finish_reasons: the host's enum of why a request ends, with TensorRT-LLM's names; without
            ERROR among them a request that fails ends as CANCELLED. Why stands in its
            ``py_error``, and in the log.
        on_step: called with request, emitted tokens and verified drafts of every generation's step
            whose result counts, after its tokens were appended, in the batch's order.

    Raises:
        ConfigError: sizes that cannot be, kernels that cannot run, or an argument of a host that
            this version does not serve.
    """

    SampleState: ClassVar[Any] = SampleStateMTP
    BEAM = BEAM

    def __init__(
        self,
        args: Any,
        *,
        nextn: int,
        device: torch.device | str | None = None,
        kernels: str = "auto",
        always_greedy: bool = False,
        finish_reasons: Any = FinishReason,
        on_step: Callable[[Any, int, int], None] | None = None,
        **others: Any,
    ) -> None:
        refuse_unserved("MTPSampler", others)
        expect(
            isinstance(nextn, int) and nextn >= 0,
            ConfigError,
            f"MTPSampler: nextn must be an integer >= 0, got {nextn!r}",
        )
        if getattr(args, "max_beam_width", 1) not in (None, 1):
            raise ConfigError(
                f"MTPSampler: max_beam_width must be 1 with speculation, got {args.max_beam_width}"
            )
        self.draft_len = nextn
        self.always_greedy = always_greedy
        self.finish_reasons = finish_reasons
        self.on_step = on_step
        self.max_seq_len = int(args.max_seq_len)
        self.max_num_sequences = int(args.max_num_sequences)
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self.store = self.create_store()
        self.backend = Backend.of(kernels, self.device)
        self._slots: list[int] = []
        self._device_slots = torch.empty(0, dtype=torch.int64, device=self.device)

    def create_store(self) -> ResultStore:
        """Fresh store tensors."""
        return ResultStore.zeros(self.max_num_sequences, self.draft_len, self.device)

    def device_tensors(self) -> SampleStateTensorsMTP:
        """The store as the next step reads it; the tensors keep their addresses."""
        return self.store.following()

    # ---- what executors call ----------------------------------------------------------------

    def setup_sampler_step(self, scheduled_requests: Any) -> None:
        """Nothing to prepare."""

    def get_cache_indirection(self) -> None:
        """No beams, no indirection."""
        return

    def is_generation_model(self) -> bool:
        """True: the model generates tokens."""
        return True

    @staticmethod
    def beam_width(_: Sequence[Any]) -> int:
        """Speculation runs with one beam."""
        return 1

    def should_provide_draft_probs(self, _: Any) -> bool:
        """Drafts are greedy: no probabilities."""
        return False

    def validate_request(self, request: Any) -> None:
        """Refuse at admission what this sampler does not give; see `unsupported_options`.

        Raises:
            ConfigError: naming every unsupported option.
        """
        why = self._refusal(request)
        if why is not None:
            raise ConfigError(f"request {request.request_id}: {why}")

    def sample_async(
        self, scheduled_requests: Any, model_outputs: dict[str, Any], *_: Any, **__: Any
    ) -> SampleStateMTP:
        """Copy a step's outputs into the store and start their way to the host.

        A request that `validate_request` would have refused is found with its prompt's last row,
        and ends in `update_requests`: hosts may never have asked.

        Args:
            scheduled_requests: the batch; its contexts, then its generations, are the first rows.
            model_outputs: a worker's mapping; further rows are padding and are left alone.
        """
        contexts = list(scheduled_requests.context_requests)
        generations = list(scheduled_requests.generation_requests)
        requests = contexts + generations
        rows = [self._with_refusal(self._pending(request, True)) for request in contexts]
        rows += [self._pending(request, False) for request in generations]
        self._write_store(rows, model_outputs)
        copy = self.store.to_host()
        for request in contexts:
            # the next schedule must reserve rows for the drafts that the device already holds
            request.py_draft_tokens = [1] * self.draft_len
        return SampleStateMTP(
            scheduled_requests=scheduled_requests,
            device=self.device_tensors(),
            host=copy.emitted(),
            sampler_event=recorded_event(self.device),
            requests=requests,
            rows=rows,
            runtime_draft_len=min(int(model_outputs["new_tokens"].shape[1]) - 1, self.draft_len),
            results=copy,
        )

    def update_requests(self, state: SampleStateMTP, *_: Any, **__: Any) -> None:
        """Append a step's tokens to its requests; results that came too late are dropped."""
        if state.sampler_event is not None:
            state.sampler_event.synchronize()
        host = state.host
        if host is None:
            raise ExecutorError("update_requests: the sample state holds no host tensors")
        # who ended since may have no slot any more
        rows = [row for row in state.rows or self._rows_of(state) if not self._is_late(row)]
        store = state.results
        if store is None or not store.is_shown_by(host):
            store = ResultStore.gathered(host)  # of a host's own making
        draft_len = self.draft_len if state.runtime_draft_len is None else state.runtime_draft_len
        results = store.at([row.seq_slot for row in rows], draft_len)
        for row, (emitted, drafts, status) in zip(rows, results, strict=True):
            self._apply(row, emitted, drafts, status, draft_len)

    # ---- one request ------------------------------------------------------------------------

    def _refusal(self, request: Any) -> str | None:
        """Why a request cannot be served; None: it can."""
        unsupported = unsupported_options(request, always_greedy=self.always_greedy)
        return f"not supported with MTP: {', '.join(unsupported)}" if unsupported else None

    def _with_refusal(self, row: PendingRow) -> PendingRow:
        """The row of a context; once per prompt, with its last row, its request is looked at."""
        ends_prompt = row.emits is not False
        return row._replace(refused=self._refusal(row.request)) if ends_prompt else row

    def _end_with_error(self, request: Any, why: str) -> None:
        """End a request alone, with its error where hosts look for one and in the log."""
        _logger.error("request %s: %s", request.request_id, why)
        request.py_error = why
        reasons = self.finish_reasons
        request.finish_by(getattr(reasons, "ERROR", None) or reasons.CANCELLED, BEAM)

    def _apply(
        self, row: PendingRow, tokens: list[int], drafts: list[int], status: int, draft_len: int
    ) -> None:
        request = row.request
        # the rewind counts the uncut run, the statistics what was emitted
        has_bonus = status == STATUS_OK or row.is_context
        accepted_drafts = max(len(tokens) - (1 if has_bonus else 0), 0)
        request.py_num_accepted_draft_tokens = accepted_drafts
        request.py_rewind_len = 0 if row.is_context else draft_len - accepted_drafts
        request.py_decoding_iter += 1
        if row.refused is not None:
            request.py_draft_tokens = []
            self._end_with_error(request, row.refused)
            return
        request.py_draft_tokens = drafts  # a stop among the tokens drops them
        # drafts behind the request's full length were absent
        full_length = getattr(request, "max_length", self.max_seq_len)
        room = max(full_length - request.get_num_tokens(BEAM), 0)
        num_emitted, has_ended = self._append(request, tokens)
        if status != STATUS_OK and not has_ended:
            self._end_with_error(request, NO_FINITE_LOGITS)
        if row.is_context or _is_dummy(request):
            return
        num_drafted = min(row.num_drafted, room)
        stats = getattr(request, "py_acceptance", None)
        if stats is not None:
            stats.record(num_emitted, num_drafted)
        if self.on_step is not None:
            self.on_step(request, num_emitted, num_drafted)

    def _append(self, request: Any, tokens: list[int]) -> tuple[int, bool]:
        """Append tokens up to the one that ends the request, if any does: a stop before a limit.

        Returns:
            How many were appended, and whether the request has ended.
        """
        end_id, stop_ids = request.py_end_id, getattr(request, "py_stop_ids", ())
        words = stop_words(getattr(request, "py_stop_words_list", None))
        criterion = getattr(request, "py_stop_criterion", None)
        limit = min(request.py_orig_prompt_len + request.py_max_new_tokens, self.max_seq_len)
        before, running = request.get_num_tokens(BEAM), request.state
        reasons = self.finish_reasons
        for count, token in enumerate(tokens, start=1):
            request.add_new_token(token, BEAM)
            if request.state != running:
                return count, True  # by itself: its text cannot be told
            if token == end_id or token in stop_ids:
                reason = reasons.END_ID
            elif (words and _ends_with(request, words)) or (criterion and criterion()):
                reason = reasons.STOP_WORDS
            elif before + count >= limit:
                reason = reasons.LENGTH
            else:
                continue
            request.finish_by(reason, BEAM)
            return count, True
        return len(tokens), False

    # ---- rows -------------------------------------------------------------------------------

    @staticmethod
    def _pending(request: Any, is_context: bool) -> PendingRow:
        emits: bool | None = True
        if is_context:
            emits = getattr(request, "is_last_context_chunk", None)
        return PendingRow(
            request=request,
            epoch=getattr(request, "py_epoch", 0),
            seq_slot=request.py_seq_slot,
            is_context=is_context,
            num_drafted=getattr(request, "py_num_drafted", len(request.py_draft_tokens or ())),
            emits=emits,
        )

    def _rows_of(self, state: SampleStateMTP) -> list[PendingRow]:
        """The rows of a state that a host built itself."""
        batch = state.scheduled_requests
        if batch is None:
            # without a batch to ask: a request's first result is that of its prompt
            rows = [self._pending(r, r.py_decoding_iter == 0) for r in state.requests]
            return [self._with_refusal(row) if row.is_context else row for row in rows]
        contexts = [
            self._with_refusal(self._pending(request, True)) for request in batch.context_requests
        ]
        return contexts + [self._pending(request, False) for request in batch.generation_requests]

    @staticmethod
    def _is_late(row: PendingRow) -> bool:
        """The request has finished, was cancelled or preempted, or the row ended no prompt."""
        request = row.request
        if getattr(request, "py_epoch", 0) != row.epoch:
            return True
        if not row.is_context and request.state is RequestState.GENERATION_IN_PROGRESS:
            return False  # as nearly always; names take longer
        phase = _phase(request)
        if phase == RequestState.GENERATION_COMPLETE.name:
            return True
        if row.is_context:
            # paused since, the prompt is to be read again
            return row.emits is False or request.context_remaining_length != 0
        return phase == RequestState.CONTEXT_INIT.name

    # ---- tensors ----------------------------------------------------------------------------

    def _write_store(self, rows: list[PendingRow], outputs: dict[str, Any]) -> None:
        if not rows:
            return
        slots = self._slots_on_device([row.seq_slot for row in rows])
        store_results(
            self.store.rows,
            slots,
            outputs["new_tokens"],
            outputs["next_new_tokens"],
            outputs["next_draft_tokens"],
            outputs["new_tokens_lens"],
            outputs.get("status"),
            backend=self.backend,
        )

    def _slots_on_device(self, slots: list[int]) -> torch.Tensor:
        """[R] int64; most steps have the slots of the step before, which are there already."""
        if slots != self._slots:
            last = self.max_num_sequences - 1
            expect(
                all(0 <= slot <= last for slot in slots) and len({*slots}) == len(slots),
                ExecutorError,
                f"sample_async: expected a sequence slot of 0..{last} for each request, "
                f"got {slots}",
            )
            self._device_slots = to_device(slots, torch.int64, self.device)
            self._slots = slots
        return self._device_slots


def _phase(request: Any) -> str:
    """The name of a request's state, whichever host's enum it is."""
    return getattr(request.state, "name", str(request.state))


def _is_dummy(request: Any) -> bool:
    """A rank without requests runs one of these: nobody reads what it emits."""
    return any(getattr(request, name, False) for name in ("is_dummy", "is_attention_dp_dummy"))


def _ends_with(request: Any, words: list[list[int]]) -> bool:
    tokens = request.get_tokens(BEAM)
    output = len(tokens) - request.py_orig_prompt_len
    return any(0 < len(w) <= output and tokens[-len(w) :] == w for w in words)
