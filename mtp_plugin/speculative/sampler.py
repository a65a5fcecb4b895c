"""Appends the tokens of a step to its requests while the device runs the next step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, SupportsIndex

import torch

from mtp_plugin.errors import ConfigError, ExecutorError, expect, expect_int, format_value
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import AtLeast, expect_tensor
from mtp_plugin.ops.sampler_store import ResultTensors, store_results
from mtp_plugin.ops.step import to_device
from mtp_plugin.requests.admission import unsupported_options
from mtp_plugin.requests.logprobs import ENTRY_WIDTH, Logprob
from mtp_plugin.requests.options import OPTIONS, unserved
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.requests.stop_callback import StopCallback
from mtp_plugin.requests.stopping import SERVED_OPTIONS, Ending
from mtp_plugin.speculative.append_tokens import append_tokens
from mtp_plugin.speculative.host import (
    SamplerSizes,
    ScheduledBatch,
    SpecRequest,
    append_logprobs,
    facts_of,
    num_listed_chunks,
    own_facts,
    read_reasons,
    refusal_of,
    refuse_unserved,
)
from mtp_plugin.speculative.metrics.acceptance import num_decided_drafts
from mtp_plugin.speculative.pending_row import BEAM, PendingRow, slots_of
from mtp_plugin.speculative.result_store import (
    ResultStore,
    SampleStateTensorsMTP,
    host_copy,
    recorded_event,
)
from mtp_plugin.speculative.step_output import StepResult
from mtp_plugin.speculative.stop_decisions import apply_stop_callback
from mtp_plugin.speculative.verified_tokens import HostTokens, VerifiedTokens

OWN_OPTIONS = SERVED_OPTIONS | {
    "speculate",
    "max_draft_len",
    "relaxed_acceptance",
    "prompt_logprobs",
}
_READ = (
    "new_tokens",
    "new_tokens_lens",
    "next_draft_tokens",
    "next_new_tokens",
    "status",
    "logprob_entries",
)
_logger = logging.getLogger("mtp_plugin")


@dataclass
class SampleStateMTP:
    """Result of ``sample_async``; every field is optional because hosts build it by keyword."""

    scheduled_requests: Any = None
    device: SampleStateTensorsMTP | None = None
    host: SampleStateTensorsMTP | HostTokens | None = None
    sampler_event: Any = None
    requests: list[Any] = field(default_factory=list)
    rows: list[PendingRow] = field(default_factory=list)
    runtime_draft_len: int | None = None
    results: ResultStore | None = None  # the tensors of ``host`` as one
    is_applied: bool = False  # update_requests has read it


@dataclass(frozen=True, kw_only=True)
class SamplerHooks:
    """Classes and callbacks that a host engine gives to an `MTPSampler`."""

    always_greedy: bool = False
    """Accept requests with a temperature and other sampling options, and decode them greedily, as
    TensorRT-LLM's own MTP sampler of API version 1.2 does; servers may put a temperature of 1 into
    every request. Set the manager's ``always_greedy`` too. False: sample as requested, or refuse
    the request if the worker cannot."""
    finish_reasons: Any = FinishReason
    """The host's enum of finish reasons, with TensorRT-LLM's names; without ERROR among them a
    request that fails ends as CANCELLED. The error is in its ``py_error`` and in the log."""
    logprob_class: Callable[..., Any] = Logprob
    """The host's class of a log-probability, called with ``logprob`` and ``rank`` for the entries
    of a request's ``py_result``."""
    on_step: Callable[[Any, int, int], None] | None = None
    """Called with request, number of output tokens and number of verified drafts for every
    generation step whose result counts, after the step's tokens were appended, in batch order."""
    stop_callback: StopCallback | None = None
    """The host's own stop rule, called once per step after its tokens were appended, with the ids
    of the requests that continue or that one of their tokens finishes. It returns ids to finish
    with STOP_WORDS after their last token; where that is depends on the number of accepted drafts.
    Or it returns a mapping of ids to the number of output tokens to keep: later tokens of the step
    are removed, for which the host's requests need ``take_back_tokens``, and the output depends on
    the rule alone. It overrides ``min_tokens``. An invalid return value for a request that
    continues finishes it with an error; other invalid values are logged."""


_IN_HOOKS = {f.name: f"set it in hooks=SamplerHooks({f.name}=...)" for f in fields(SamplerHooks)}


class MTPSampler:
    """TensorRT-LLM's sampler contract for workers that return accepted tokens and next drafts.

    Args:
        args: any object with ``max_num_sequences`` (S) and ``max_seq_len``, as
            ``TorchSampler.Args``.
        nextn: K, 0 for decoding without drafts; that of ``args.max_draft_len``, if it has one.
        device: device of the store; default CUDA where present.
        kernels: backend that writes the store, see `kernels.backend.Backend`.
        served_options: names of request options that the worker applies, in addition to those of
            the sampler itself and of prompts and drafts. The manager carries their values to the
            step, so host metadata must name the manager.
        refusals: maps the options of a request to the reasons for which they are not served.
        hooks: classes and callbacks of the host engine.

    Raises:
        ConfigError: a size out of range, kernels that cannot run, or a host argument that this
            version does not serve.
    """

    SampleState: ClassVar[Any] = SampleStateMTP
    Store: ClassVar[Any] = ResultStore
    BEAM = BEAM
    reads_verified_tokens: ClassVar[bool] = True
    """Whether `sample_async` takes ``verified`` from the model outputs; a subclass that reads
    ``state.host`` itself sets False."""

    def __init__(
        self,
        args: Any,
        *,
        nextn: int,
        device: torch.device | str | None = None,
        kernels: str = "auto",
        served_options: Collection[str] = (),
        refusals: Callable[[Mapping[str, Any]], Iterable[str]] | None = None,
        hooks: SamplerHooks | None = None,
        **others: Any,
    ) -> None:
        refuse_unserved("MTPSampler", others, _IN_HOOKS)
        hooks = hooks or SamplerHooks()
        sizes = SamplerSizes.read(args)
        self.draft_len = expect_int("MTPSampler: nextn", nextn, 0, error=ConfigError)
        expect(
            sizes.max_draft_len in (None, nextn),
            ConfigError,
            f"MTPSampler: expected nextn like args.max_draft_len, got nextn={nextn} and "
            f"max_draft_len={sizes.max_draft_len}; read both from the same config",
        )
        self.mapping = None  # TensorRT-LLM's; every rank samples the same tokens
        self.always_greedy = hooks.always_greedy
        self.served_options = OWN_OPTIONS | frozenset(served_options)
        self.refusals = refusals or (lambda _: ())
        self.logprob_class = hooks.logprob_class
        self.on_step = hooks.on_step
        self.stop_callback = hooks.stop_callback
        self.max_seq_len = sizes.max_seq_len
        self.max_num_sequences = sizes.max_num_sequences
        self.NEW_TOKENS_SHAPE = (self.draft_len + 1, self.max_num_sequences, 1)
        """Shape of the store's ``new_tokens``."""
        self._reasons = read_reasons(hooks.finish_reasons)
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self.store = self.create_store()
        self.backend = Backend.of(kernels, self.device)
        self._copy_stream: torch.cuda.Stream | None = None
        self._slots: list[int] = []
        self._device_slots = torch.empty(0, dtype=torch.int64, device=self.device)

    def create_store(self) -> ResultStore:
        return ResultStore.zeros(self.max_num_sequences, self.draft_len, self.device)

    def device_tensors(self) -> SampleStateTensorsMTP:
        """Return the store as the next step reads it; the tensors keep their addresses."""
        return self.store.following()

    def set_stop_callback(self, stop_callback: StopCallback) -> None:
        """Use ``stop_callback`` from the next `update_requests` on."""
        self.stop_callback = stop_callback

    # ---- called by executors ----------------------------------------------------------------

    def setup_sampler_step(self, scheduled_requests: Any) -> None:
        """Do nothing: there is nothing to prepare."""

    def get_cache_indirection(self) -> None:
        """Return None: there is no beam search."""
        return

    def is_generation_model(self) -> bool:
        """Return True."""
        return True

    @staticmethod
    def beam_width(_: Sequence[Any]) -> int:
        """Return 1: there is no beam search."""
        return 1

    def should_provide_draft_probs(self, _: Any) -> bool:
        """Return False: the manager keeps the draft probabilities."""
        return False

    def validate_request(self, request: SpecRequest) -> None:
        """Refuse a request at admission if an option is not served; see `unsupported_options`.

        Raises:
            ConfigError: naming every unsupported option.
        """
        why = self._refusal(request)
        if why is not None:
            raise ConfigError(f"request {request.request_id}: {why}")

    def sample_async(
        self,
        scheduled_requests: ScheduledBatch,
        model_outputs: dict[str, Any] | None = None,
        *_: Any,
        outputs: dict[str, Any] | None = None,
        **__: Any,
    ) -> SampleStateMTP:
        """Copy a step's outputs into the store and start their copy to the host.

        A host may not call `validate_request`, so a request is validated with the last row of its
        prompt too; if it is refused, `update_requests` finishes it with an error.

        With `VerifiedTokens` under the key ``verified``, only those are copied to the host, without
        waiting for the drafts; `update_requests` then leaves the requests without drafts.

        Args:
            scheduled_requests: the batch; its contexts, then its generations, are the first rows.
                Contexts that the host lists as unfinished chunks come first and get no token.
            model_outputs: a worker's mapping; further rows are padding and are not read.
            outputs: the same, under the name of newer hosts.

        Raises:
            ExecutorError: no mapping, more tokens per request than the store holds, or a request
                without a sequence slot of its own.
            TensorContractError: a value of the mapping is not the tensor that it must be.
        """
        given = model_outputs if model_outputs is not None else outputs
        if not isinstance(given, Mapping):
            got = "neither" if given is None else format_value(given)
            raise ExecutorError(f"sample_async: expected model_outputs or outputs, got {got}")
        num_skipped = num_listed_chunks(scheduled_requests)
        contexts = list(scheduled_requests.context_requests)[num_skipped:]
        generations = list(scheduled_requests.generation_requests)
        requests = contexts + generations
        rows = [self._with_refusal(self._pending(request, is_context=True)) for request in contexts]
        rows += [self._pending(request, is_context=False) for request in generations]
        model_outputs = _without_first_rows(given, num_skipped)
        self._expect_width(model_outputs)
        tokens = self._early_tokens(rows, model_outputs)
        self._write_store(rows, model_outputs)
        for request in contexts:
            # the next schedule must reserve rows for the drafts that the device already holds
            request.py_draft_tokens = [1] * self.draft_len
        state = SampleStateMTP(
            scheduled_requests=scheduled_requests,
            device=self.device_tensors(),
            requests=requests,
            rows=rows,
            runtime_draft_len=min(int(model_outputs["new_tokens"].shape[1]) - 1, self.draft_len),
        )
        if tokens is not None:
            state.host, state.sampler_event = tokens, tokens.event
        else:
            state.results = copy = self.store.to_host()
            log_probs = self._logprobs_of(rows, model_outputs)
            state.host = replace(copy.emitted(), log_probs=log_probs)
            state.sampler_event = recorded_event(self.device)
        return state

    def update_requests(self, state: SampleStateMTP, *_: Any, **__: Any) -> list[StepResult]:
        """Append a step's tokens to its requests; late results are dropped.

        Returns:
            The results of the other requests, in batch order.

        Raises:
            ExecutorError: no state of `sample_async`, one that was passed before, so that its
                tokens would be appended twice, or one without host tensors.
        """
        given: object = state  # whatever a host passes
        if not isinstance(given, SampleStateMTP):
            given = format_value(given)
            raise ExecutorError(f"update_requests: expected a state of sample_async, got {given}")
        if state.is_applied:
            raise ExecutorError(
                "update_requests: this step's results were applied before; call it once for each "
                "state of sample_async"
            )
        if state.sampler_event is not None:
            state.sampler_event.synchronize()
        host = state.host
        if host is None:
            raise ExecutorError("update_requests: the sample state holds no host tensors")
        state.is_applied = True
        # requests that finished or restarted since may have no slot any more
        all_rows = enumerate(state.rows or self._rows_of(state))
        kept = [(index, row) for index, row in all_rows if not row.is_late]
        rows = [row for _, row in kept]
        draft_len = self.draft_len if state.runtime_draft_len is None else state.runtime_draft_len
        if isinstance(host, HostTokens):
            given = host.at([index for index, _ in kept])
        else:
            store = state.results
            if store is None or not store.is_shown_by(host):
                store = ResultStore.gathered(host)  # built by the host
            given = store.at(slots_of(rows), draft_len)
        log_probs = host.log_probs
        results: list[StepResult] = []
        endings: list[Ending] = []
        try:
            for (index, row), one in zip(kept, given, strict=True):
                entries = None if log_probs is None else log_probs[index]
                result, ending = append_tokens(row, *one, draft_len, entries)
                results.append(result)
                endings.append(ending)
            if self.stop_callback is not None:
                apply_stop_callback(self.stop_callback, rows, results, endings)
        finally:  # finish these requests even if an error was raised
            for row, ending in zip(rows, endings, strict=False):
                self._end(row.request, ending)
        for row, result in zip(rows, results, strict=True):
            if result.logprobs is not None:
                append_logprobs(row.request, result.logprobs, self.logprob_class)
            self._count(row, result)
        return results

    # ---- one request ------------------------------------------------------------------------

    def _refusal(self, request: SpecRequest) -> str | None:
        """Return the reason for which a request cannot be served, or None."""
        own, served = own_facts(request), self.served_options
        why = None
        if own is None:
            unsupported = unsupported_options(
                request, always_greedy=self.always_greedy, served=served
            )
            facts = facts_of(request, self.max_seq_len, reads_prompt=False)
            why = facts.refused or refusal_of(request)
        else:
            requested = own.options
            if self.always_greedy:
                requested = {n: value for n, value in requested.items() if not OPTIONS[n].draws}
            unsupported = [*unserved(requested, served), *self.refusals(requested)]
        return f"not supported with MTP: {', '.join(unsupported)}" if unsupported else why

    def _with_refusal(self, row: PendingRow) -> PendingRow:
        """Return a context's row; the last one of a prompt with the refusal of its request."""
        ends_prompt = row.emits is not False
        return row._replace(refused=self._refusal(row.request)) if ends_prompt else row

    def _count(self, row: PendingRow, result: StepResult) -> None:
        facts = row.facts
        if row.is_context or facts.is_dummy or row.refused is not None:
            return
        num_emitted, num_drafted = len(result.token_ids), result.num_drafted
        if facts.stats is not None:
            ends = result.finish_reason is not None
            facts.stats.record(num_emitted, num_decided_drafts(num_emitted, num_drafted, ends=ends))
        if self.on_step is not None:
            self.on_step(row.request, num_emitted, num_drafted)

    def _end(self, request: SpecRequest, ending: Ending) -> None:
        """Finish a request; its error, if any, goes to ``py_error`` and the log."""
        if ending.error is not None:
            _logger.error("request %s: %s", request.request_id, ending.error, exc_info=ending.cause)
            request.py_error = ending.error
        if ending.reason is not None:
            request.finish_by(self._reasons[ending.reason], BEAM)

    # ---- rows -------------------------------------------------------------------------------

    def _pending(self, request: SpecRequest, *, is_context: bool) -> PendingRow:
        return PendingRow.of(request, is_context=is_context, max_seq_len=self.max_seq_len)

    def _rows_of(self, state: SampleStateMTP) -> list[PendingRow]:
        """Return the rows of a state that the host built."""
        batch = state.scheduled_requests
        if batch is None:
            # no batch: a request's first result is that of its prompt
            listed = [(request, request.py_decoding_iter == 0) for request in state.requests]
        else:
            contexts = list(batch.context_requests)[num_listed_chunks(batch) :]
            listed = [(request, True) for request in contexts]
            listed += [(request, False) for request in batch.generation_requests]
        rows = [self._pending(request, is_context=is_context) for request, is_context in listed]
        return [self._with_refusal(row) if row.is_context else row for row in rows]

    # ---- tensors ----------------------------------------------------------------------------

    def _expect_width(self, outputs: dict[str, Any]) -> None:
        """Refuse a step with more drafts than ``nextn``, which the store cannot hold.

        Raises:
            ExecutorError: with both numbers.
        """
        drafts = expect_tensor(
            "next_draft_tokens", outputs.get("next_draft_tokens"), shape=("R", "k")
        )
        tokens = expect_tensor("new_tokens", outputs.get("new_tokens"), shape=("R", "k+1"))
        drafted = max(drafts.shape[1], tokens.shape[1] - 1)
        if drafted > self.draft_len:
            raise ExecutorError(
                f"sample_async: the worker's step has {drafted} drafts per request, MTPSampler was "
                f"built with nextn={self.draft_len}; expected at least the worker's max_draft_len"
            )

    def _write_store(self, rows: list[PendingRow], outputs: dict[str, Any]) -> None:
        if not rows:
            return
        slots = self._slots_on_device(slots_of(rows))
        value: Callable[[str], Any] = outputs.get  # store_results checks the tensors
        store_results(
            self.store.rows,
            slots,
            ResultTensors(
                value("new_tokens"),
                value("next_new_tokens"),
                value("next_draft_tokens"),
                value("new_tokens_lens"),
                value("status"),
            ),
            backend=self.backend,
        )

    def _early_tokens(self, rows: list[PendingRow], outputs: dict[str, Any]) -> HostTokens | None:
        """Start the copy of tokens that were recorded before drafting, if there are any."""
        verified: VerifiedTokens | None = outputs.get("verified")
        if verified is None:
            return None
        if self._copy_stream is None and self.device.type == "cuda":
            self._copy_stream = torch.cuda.Stream(self.device)
        wants_logprobs = any(row.facts.num_logprobs is not None for row in rows)
        return verified.to_host(self._copy_stream, len(rows), with_logprobs=wants_logprobs)

    @staticmethod
    def _logprobs_of(rows: list[PendingRow], outputs: dict[str, Any]) -> torch.Tensor | None:
        """Start the copy of a step's log-probabilities to the host, if a request wants them."""
        entries = outputs.get("logprob_entries")
        if entries is None or all(row.facts.num_logprobs is None for row in rows):
            return None
        shape = (AtLeast(len(rows)), "k+1", ENTRY_WIDTH)
        expect_tensor("logprob_entries", entries, dtype=torch.int32, shape=shape)
        return host_copy(entries[: len(rows)])

    def _slots_on_device(self, slots: list[int]) -> torch.Tensor:
        """Return the slots [R] int64; steps with the slots of the previous step copy nothing."""
        if slots != self._slots:
            last = self.max_num_sequences - 1
            expect(
                all(isinstance(slot, SupportsIndex) and 0 <= slot <= last for slot in slots)
                and len({*slots}) == len(slots),
                ExecutorError,
                f"sample_async: expected a sequence slot of 0..{last} for each request, "
                f"got {slots}",
            )
            self._device_slots = to_device(slots, torch.int64, self.device)
            self._slots = slots
        return self._device_slots


def _without_first_rows(outputs: dict[str, Any], num_skipped: int) -> dict[str, Any]:
    """Return the tensors of a worker's mapping that are read, without their first rows."""
    if num_skipped == 0:
        return outputs
    tensors = {name: outputs.get(name) for name in _READ}
    return {name: None if value is None else value[num_skipped:] for name, value in tensors.items()}
