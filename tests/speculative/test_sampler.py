"""The sampler's contract with executors: store, states, stops, and results that come too late."""

from __future__ import annotations

import re
import weakref
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.errors import ConfigError, ExecutorError
from mtp_plugin.ops.step import STATUS_NO_FINITE_LOGIT
from mtp_plugin.requests.admission import unsupported_options
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.states import FinishReason, RequestState
from mtp_plugin.requests.stopping import StopRule
from mtp_plugin.speculative import sampler as sampler_module
from mtp_plugin.speculative.host import RequestFacts, Sampler, read_request
from mtp_plugin.speculative.host import request as request_module
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats
from mtp_plugin.speculative.sampler import (
    MTPSampler,
    SamplerHooks,
    SampleStateMTP,
    SampleStateTensorsMTP,
)
from mtp_plugin.speculative.step_output import StepResult
from tests.speculative import plain_host

S, K = 6, 3
OWN = {"kernels", "hooks", "served_options", "always_greedy"}
POISON = -777


class Request(plain_host.Request):
    """With a sequence slot; it generates by default."""

    def __init__(self, slot: int, **fields: Any) -> None:
        super().__init__(100 + slot, py_seq_slot=slot, py_rewind_len=POISON)
        self.py_num_accepted_draft_tokens = POISON
        self.py_max_new_tokens = 50
        self.py_acceptance = AcceptanceStats(K)
        self.generate()
        for name, value in fields.items():
            setattr(self, name, value)


def batch(contexts: list[Request], generations: list[Request]) -> SimpleNamespace:
    return SimpleNamespace(context_requests=contexts, generation_requests=generations)


def outputs(*runs: list[int], status: list[int] | None = None, k: int = K) -> dict[str, Any]:
    """What a worker returns for these runs: drafts are 40 + row, 41 + row, 42 + row."""
    new_tokens = [run + [-1] * (k + 1 - len(run)) for run in runs]
    drafts = [[40 + row + i for i in range(k)] for row in range(len(runs))]
    last = [run[-1] if run else 0 for run in runs]
    int32 = {"dtype": torch.int32}
    return {
        "logits": None,
        "new_tokens": torch.tensor(new_tokens, **int32),
        "new_tokens_lens": torch.tensor([len(run) for run in runs], **int32),
        "next_draft_tokens": torch.tensor(drafts, **int32).reshape(len(runs), k),
        "next_new_tokens": torch.tensor(
            [[token, *row] for token, row in zip(last, drafts, strict=True)], **int32
        ),
        "status": torch.tensor(status or [0] * len(runs), **int32),
    }


def make(max_seq_len: int = 64, nextn: int = K, **options: Any) -> MTPSampler:
    """Options are the sampler's own or fields of its ``args``."""
    own = {name: options.pop(name) for name in OWN & set(options)}
    args = SimpleNamespace(max_seq_len=max_seq_len, max_num_sequences=S, **options)
    return MTPSampler(args, nextn=nextn, device="cpu", **own)


def apply(
    sampler: MTPSampler,
    contexts: list[Request],
    generations: list[Request],
    *runs: list[int],
    **options: Any,
) -> list[StepResult]:
    """A step whose results are read at once."""
    state = sampler.sample_async(batch(contexts, generations), outputs(*runs, **options))
    return sampler.update_requests(state)


def step(sampler: MTPSampler, request: Request, run: list[int], **options: Any) -> list[StepResult]:
    """One generation step of one request."""
    return apply(sampler, [], [request], run, **options)


# --- construction ---


def test_the_store() -> None:
    sampler = make(max_beam_width=1, max_draft_len=K, max_total_draft_tokens=K)
    store = sampler.store
    assert store.new_tokens.shape == store.next_new_tokens.shape == (K + 1, S, 1)
    assert store.next_draft_tokens.shape == (S, K)
    assert store.new_tokens_lens.shape == store.status.shape == (S,)
    assert {tensor.dtype for tensor in vars(store).values()} == {torch.int32}


def test_attributes_that_executors_read() -> None:
    sampler = make()
    assert sampler.mapping is None
    assert sampler.NEW_TOKENS_SHAPE == tuple(sampler.store.new_tokens.shape) == (K + 1, S, 1)
    assert type(sampler.store) is sampler.Store is MTPSampler.Store


def test_methods_that_executors_call() -> None:
    sampler = make()
    typed: Sampler = sampler
    assert typed.SampleState is SampleStateMTP
    assert sampler.beam_width([]) == 1
    assert sampler.is_generation_model()
    assert not sampler.should_provide_draft_probs(Request(0))
    assert sampler.get_cache_indirection() is None
    assert sampler.setup_sampler_step(batch([], [])) is None


def test_the_device_is_found() -> None:
    sampler = MTPSampler(SimpleNamespace(max_seq_len=8, max_num_sequences=2), nextn=1)
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert sampler.store.new_tokens.device.type == expected


class NoError(Enum):
    """TensorRT-LLM's reasons, which have no ERROR."""

    END_ID, LENGTH, STOP_WORDS, CANCELLED = range(4)


@pytest.mark.parametrize("by_host", [False, True], ids=["state of ours", "state of the host"])
@pytest.mark.parametrize("reasons", [FinishReason, NoError])
def test_what_no_host_validated_ends_with_its_prompt(
    reasons: Any, by_host: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Validated once, on the prompt's last row; a request without options continues."""
    validated: list[int] = []

    def unsupported(request: Any, **options: Any) -> list[str]:
        validated.append(request.request_id)
        return unsupported_options(request, **options)

    monkeypatch.setattr(sampler_module, "unsupported_options", unsupported)
    sampler = make(hooks=SamplerHooks(finish_reasons=reasons))
    warm = Request(0, sampling_config=SimpleNamespace(temperature=[0.7]))
    greedy = Request(1, sampling_config=SimpleNamespace(temperature=[0.0]))

    def launch(contexts: list[Request], generations: list[Request], *runs: list[int]) -> Any:
        state = sampler.sample_async(batch(contexts, generations), outputs(*runs))
        if by_host:  # TensorRT-LLM may build the state anew
            fields = {name: getattr(state, name) for name in ("device", "host", "sampler_event")}
            state = SampleStateMTP(scheduled_requests=batch(contexts, generations), **fields)
        return state

    for request in (warm, greedy):
        request.state, request.context_current_position = RequestState.CONTEXT_INIT, 2
    sampler.update_requests(launch([warm, greedy], [], [9], [9]))
    assert validated == []
    for request in (warm, greedy):
        request.context_current_position = 3
    prompts = launch([warm, greedy], [], [10], [11])
    # overlap: the next step is on its way before the result of this one is read
    following = launch([], [warm, greedy], [20, 21], [22, 23])
    sampler.update_requests(prompts)
    for request in (warm, greedy):
        if request.finish_reason is None:
            request.state = RequestState.GENERATION_IN_PROGRESS
    sampler.update_requests(following)
    assert set(validated) == {100, 101}
    if not by_host:
        assert validated == [100, 101]
    assert (warm.output, greedy.output) == ([], [11, 22, 23])
    assert warm.finish_reason is getattr(reasons, "ERROR", reasons.CANCELLED)
    assert warm.py_error == "not supported with MTP: temperature=0.7"
    assert "request 100: not supported with MTP: temperature=0.7" in caplog.text
    assert greedy.finish_reason is None
    assert warm.py_draft_tokens == []


def test_a_temperature_is_taken_on_request() -> None:
    warm = Request(0, sampling_config=SimpleNamespace(temperature=[1.0]))
    make(hooks=SamplerHooks(always_greedy=True)).validate_request(warm)


def test_states_are_built_by_keyword() -> None:
    event = object()
    older = SampleStateMTP(scheduled_requests=batch([], []), sampler_event=event)
    assert older.sampler_event is event
    assert older.device is None
    newer = MTPSampler.SampleState(
        requests=[Request(0)], device=None, host=None, sampler_event=event, runtime_draft_len=K
    )
    assert newer.runtime_draft_len == K
    tensors = [torch.zeros(1), torch.ones(1), torch.ones(2)]
    state = SampleStateTensorsMTP(
        new_tokens=tensors[0], new_tokens_lens=tensors[1], next_draft_tokens=tensors[2]
    )
    assert [value for value in state.values() if value is not None] == tensors
    assert (state.logits, state.log_probs) == (None, None)


# --- device and host ---


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_tokens_go_through_sequence_slots(kernels: str) -> None:
    """Rows and slots differ in order; device has the next inputs, host what was emitted."""
    sampler = make(kernels=kernels)
    for tensor in vars(sampler.store).values():
        tensor.fill_(POISON)
    context, generations = Request(4), [Request(1), Request(3)]
    state = sampler.sample_async(batch([context], generations), outputs([7], [8, 9], [5, 6, 7, 8]))
    emitted = {4: [7, -1, -1, -1], 1: [8, 9, -1, -1], 3: [5, 6, 7, 8]}
    following = {4: [7, 40, 41, 42], 1: [9, 41, 42, 43], 3: [8, 42, 43, 44]}
    assert state.device.new_tokens.shape == state.host.new_tokens.shape == (K + 1, S, 1)
    for slot in range(S):
        assert state.host.new_tokens[:, slot, 0].tolist() == emitted.get(slot, [POISON] * 4)
        assert state.device.new_tokens[:, slot, 0].tolist() == following.get(slot, [POISON] * 4)
        drafts = following.get(slot, [POISON] * 4)[1:]
        for tensors in (state.device, state.host):
            assert tensors.next_draft_tokens[slot].tolist() == drafts
            expected = sum(t >= 0 for t in emitted[slot]) if slot in emitted else POISON
            assert tensors.new_tokens_lens[slot] == expected
    # the next step's inputs are read at addresses that never change
    assert state.device.new_tokens is sampler.store.next_new_tokens
    assert state.device.new_tokens_lens is sampler.store.new_tokens_lens
    assert state.scheduled_requests.context_requests == [context]
    assert state.requests == [context, *generations]


def test_slots_change_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that stay are copied once; a copy that failed leaves no trace."""
    sampler = make()
    copied: list[list[int]] = []
    honest = sampler_module.to_device

    def to_device(values: list[int], *options: Any) -> torch.Tensor:
        copied.append(list(values))
        if copied[-1] == [4, 0] and copied.count([4, 0]) == 1:
            raise RuntimeError("out of memory")
        return honest(values, *options)

    monkeypatch.setattr(sampler_module, "to_device", to_device)
    for number, slots in enumerate([[3, 5], [3, 5], [5, 3], [4, 0], [4, 0]]):
        requests = [Request(slot) for slot in slots]
        try:
            sampler.sample_async(batch([], requests), outputs([number], [10 + number]))
        except RuntimeError:
            continue
        assert sampler.store.new_tokens[0, slots, 0].tolist() == [number, 10 + number]
    assert copied == [[3, 5], [5, 3], [4, 0], [4, 0]]


def test_extra_arguments_of_other_versions() -> None:
    sampler, request = make(), Request(0)
    state = sampler.sample_async(batch([], [request]), outputs([5]), [0, 1], resource_manager=None)
    sampler.update_requests(state, resource_manager=None)
    assert request.output == [5]
    state = sampler.sample_async(batch([], [request]), outputs([6]), None, None)
    sampler.update_requests(state, None)
    assert request.output == [5, 6]


def test_a_step_in_flight_does_not_change_the_one_before() -> None:
    sampler, request = make(), Request(2)
    first = sampler.sample_async(batch([], [request]), outputs([5, 6]))
    second = sampler.sample_async(batch([], [request]), outputs([7]))
    sampler.update_requests(first)
    assert request.output == [5, 6]
    sampler.update_requests(second)
    assert request.output == [5, 6, 7]


def test_the_event_comes_before_the_tokens() -> None:
    """Host tensors are only valid once the device is there."""
    sampler, request = make(), Request(0)
    state = sampler.sample_async(batch([], [request]), outputs([POISON]))

    def arrive() -> None:
        state.host.new_tokens[0, 0, 0] = 5

    state.sampler_event = SimpleNamespace(synchronize=arrive)
    sampler.update_requests(state)
    assert request.output == [5]


def test_padding_rows_are_skipped() -> None:
    """Five live rows padded to eight: five updates, five counts, no other slot written."""
    sampler = make()
    requests = [Request(slot) for slot in (0, 1, 3, 4, 5)]
    for tensor in vars(sampler.store).values():
        tensor[...] = POISON
    padded = outputs(*([10 + i, 20 + i] for i in range(5)), [99], [99], [99])
    sampler.update_requests(sampler.sample_async(batch([], requests), padded))
    assert [request.output for request in requests] == [[10 + i, 20 + i] for i in range(5)]
    assert [request.py_acceptance.emitted for request in requests] == [2] * 5
    assert (sampler.store.new_tokens[:, 2] == POISON).all()
    assert not (sampler.store.new_tokens == 99).any()
    assert not (sampler.store.next_new_tokens == 99).any()


@pytest.mark.parametrize("slots", [[1, S], [-1], [2, 2]], ids=["too high", "negative", "twice"])
def test_slots_that_cannot_be_are_refused(slots: list[int]) -> None:
    sampler = make()
    before = sampler.store.rows.clone()
    message = re.escape(f"expected a sequence slot of 0..{S - 1} for each request, got {slots}")
    with pytest.raises(ExecutorError, match=message):
        sampler.sample_async(batch([], [Request(s) for s in slots]), outputs(*[[5]] * len(slots)))
    assert torch.equal(sampler.store.rows, before)


def test_an_empty_batch() -> None:
    sampler = make()
    before = sampler.store.new_tokens.clone()
    state = sampler.sample_async(batch([], []), outputs([5], [6]))
    sampler.update_requests(state)
    assert torch.equal(sampler.store.new_tokens, before)
    assert state.requests == []


def test_outputs_without_a_status() -> None:
    """A worker of the host's own may give none."""
    sampler, request = make(), Request(0)
    plain = outputs([5])
    del plain["status"]
    sampler.update_requests(sampler.sample_async(batch([], [request]), plain))
    assert request.output == [5]
    assert request.finish_reason is None


# --- what a request gets ---


def test_a_generation() -> None:
    sampler, request = make(), Request(1, py_draft_tokens=[8, 9, 9])
    step(sampler, request, [8, 5])
    assert request.output == [8, 5]
    assert request.py_draft_tokens == [40, 41, 42]
    assert request.py_num_accepted_draft_tokens == 1
    assert request.py_rewind_len == 2
    assert request.py_decoding_iter == 1
    assert request.py_acceptance.histogram == [0, 0, 1, 0, 0]
    assert request.py_acceptance.num_drafted == 3
    assert request.state == RequestState.GENERATION_IN_PROGRESS


def test_a_prompt() -> None:
    """One token; no drafts were verified, rows for the first ones are reserved at once."""
    sampler = make()
    request = Request(1, state=RequestState.CONTEXT_INIT)
    state = sampler.sample_async(batch([request], []), outputs([5]))
    assert request.py_draft_tokens == [1, 1, 1]
    request.state = RequestState.GENERATION_IN_PROGRESS
    sampler.update_requests(state)
    assert request.output == [5]
    assert request.py_draft_tokens == [40, 41, 42]
    assert request.py_rewind_len == 0
    assert request.py_num_accepted_draft_tokens == 0
    assert request.py_acceptance.steps == 0


def test_drafts_that_were_really_verified_are_counted() -> None:
    sampler, request = make(), Request(1, py_draft_tokens=[8, 9, 9], py_num_drafted=1)
    step(sampler, request, [8, 5])
    assert request.py_acceptance.num_drafted == 1
    assert request.py_acceptance.acceptance_rate == 1.0


def test_without_drafts() -> None:
    sampler, request = make(nextn=0), Request(0)
    step(sampler, request, [5], k=0)
    step(sampler, request, [6], k=0)
    assert request.output == [5, 6]
    assert request.py_draft_tokens == []
    assert request.py_rewind_len == 0


@pytest.mark.parametrize("kind", ["is_dummy", "is_attention_dp_dummy"])
def test_dummies_are_not_counted(kind: str) -> None:
    counted: list[int] = []
    sampler = make(
        hooks=SamplerHooks(on_step=lambda request, *_: counted.append(request.request_id))
    )
    dummy, request = Request(0, **{kind: True}), Request(1)
    apply(sampler, [], [dummy, request], [5], [6, 7])
    assert counted == [request.request_id]
    assert (dummy.py_acceptance.steps, request.py_acceptance.steps) == (0, 1)
    assert (dummy.output, dummy.py_rewind_len) == ([5], K)


# --- results ---


def test_results_come_in_the_batchs_order() -> None:
    """Contexts first, whatever their slots; who came too late, or ended no prompt, has none."""
    sampler = make()
    part = Request(5, state=RequestState.CONTEXT_INIT, context_current_position=2)
    prompt = Request(4, py_draft_tokens=[8, 9])
    gone, paused = Request(3), Request(1)
    last, first = Request(0, py_draft_tokens=[8, 9, 9]), Request(2, py_num_drafted=1)
    contexts, generations = [part, prompt], [first, gone, paused, last]
    state = sampler.sample_async(
        batch(contexts, generations), outputs([], [7], [8, 5], [1], [2], [8, 9, 6])
    )
    gone.finish_by(FinishReason.CANCELLED, 0)
    paused.state = RequestState.CONTEXT_INIT
    assert sampler.update_requests(state) == [
        StepResult(104, [7], 0, 1, None),
        StepResult(102, [8, 5], 1, 2, None),
        StepResult(100, [8, 9, 6], 3, 3, None),
    ]
    assert apply(sampler, [], [], [5]) == []


def test_what_a_stop_cuts_was_accepted() -> None:
    request = Request(0, py_end_id=9, py_draft_tokens=[8, 9, 9])
    assert step(make(), request, [8, 9, 9, 6]) == [
        StepResult(100, [8, 9], 3, 4, FinishReason.END_ID)
    ]


def test_drafts_after_the_full_length_are_not_counted() -> None:
    """Its own, or the longest sequence."""
    for options, seq_len in (({"max_length": 5}, 64), ({}, 5)):
        request = Request(0, py_draft_tokens=[8, 9, 9], **options)
        (result,) = step(make(max_seq_len=seq_len), request, [8, 9])
        assert result.num_drafted == 1  # what is accepted of two fills the sequence with the first
        assert request.py_acceptance.num_drafted == 1


def test_a_refused_request_has_a_result_without_tokens() -> None:
    sampler = make()
    warm = Request(0, sampling_config=SimpleNamespace(temperature=[0.7]))
    assert apply(sampler, [warm, Request(1)], [], [5], [6]) == [
        StepResult(100, [], 0, 1, FinishReason.ERROR),
        StepResult(101, [6], 0, 1, None),
    ]


def test_worker_with_more_drafts_than_nextn_is_refused() -> None:
    """Its tokens would be cut silently; fewer are a step of a shorter draft length."""
    sampler, request = make(nextn=2), Request(0)
    message = "the worker's step has 3 drafts per request, MTPSampler was built with nextn=2"
    with pytest.raises(ExecutorError, match=message):
        sampler.sample_async(batch([], [request]), outputs([7, 8], k=3))
    sampler.sample_async(batch([], [request]), outputs([7, 8], k=1))


def test_results_of_a_step_are_applied_once() -> None:
    """A second call would append the tokens twice."""
    sampler, request = make(), Request(0)
    state = sampler.sample_async(batch([], [request]), outputs([7, 8]))
    sampler.update_requests(state)
    with pytest.raises(ExecutorError, match="this step's results were applied before"):
        sampler.update_requests(state)
    assert request.output == [7, 8]


@pytest.mark.parametrize("lens", [0, -1])
@pytest.mark.parametrize("is_context", [False, True])
def test_request_without_a_token_ends_with_an_error(is_context: bool, lens: int) -> None:
    """It would be scheduled forever; the other requests of the step go on."""
    sampler, other = make(), Request(1)
    request = Request(0)
    given = outputs([3, 4], [7, 8])
    given["new_tokens_lens"][0] = lens
    lists = ([request], [other]) if is_context else ([], [request, other])
    first, second = sampler.update_requests(sampler.sample_async(batch(*lists), given))
    assert (first.token_ids, first.finish_reason) == ([], FinishReason.ERROR)
    assert request.py_error == "the worker returned no token for the request: new_tokens_lens is 0"
    assert (second.token_ids, second.finish_reason) == ([7, 8], None)


@pytest.mark.parametrize("run", [[], [10, 11]])
def test_a_row_without_finite_logits_has_a_result(run: list[int]) -> None:
    request = Request(0, py_draft_tokens=[10, 11, 12])
    (result,) = step(make(), request, run, status=[STATUS_NO_FINITE_LOGIT])
    assert result == StepResult(100, run, 3, len(run), FinishReason.ERROR)
    assert request.py_num_accepted_draft_tokens == len(run)  # no bonus among them


def test_the_dead_row_of_a_prompt_has_no_matches() -> None:
    sampler, request = make(), Request(0)
    assert apply(sampler, [request], [], [7], status=[1]) == [
        StepResult(100, [7], 0, 1, FinishReason.ERROR)
    ]
    assert (request.py_num_accepted_draft_tokens, request.py_rewind_len) == (0, 0)


def test_results_have_our_finish_reasons() -> None:
    sampler = make(hooks=SamplerHooks(finish_reasons=HostReason))
    request = Request(0, py_end_id=9)
    (result,) = step(sampler, request, [9])
    assert result.finish_reason is FinishReason.END_ID
    assert request.finish_reason is HostReason.END_ID


def test_a_dummy_has_a_result_without_drafts() -> None:
    request = Request(0, is_dummy=True, py_draft_tokens=[8, 9, 9])
    assert step(make(), request, [8, 9]) == [StepResult(100, [8, 9], 0, 2, None)]


# --- what is read of a request ---


def test_facts_are_read_once_and_again_with_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counted(request: Request, *sizes: int) -> RequestFacts:
        read.append(request.request_id)
        return read_request(request, *sizes)

    monkeypatch.setattr(request_module, "read_request", counted)
    sampler, request, other = make(), Request(0, py_end_id=9), Request(1)
    for _ in range(3):
        apply(sampler, [], [request, other], [5], [6])
    assert read == [100, 101]
    request.py_end_id = 5  # not read any more
    step(sampler, request, [5])
    assert request.finish_reason is None
    # it starts over
    state = sampler.sample_async(batch([request], []), outputs([5]))
    assert read == [100, 101, 100]
    sampler.update_requests(state)
    assert request.finish_reason is FinishReason.END_ID
    # another one in its slot
    new = Request(0)
    step(sampler, new, [5])
    assert (read, new.finish_reason) == ([100, 101, 100, 100], None)
    assert new.output == [5]


def test_own_facts_are_read_at_every_step() -> None:
    """As the embedded executor's requests have them: nothing else of the request is read."""
    sampler, request = make(), Request(0, py_end_id=5)
    request.facts = RequestFacts(100, StopRule(max_length=64, end_ids=(6,)))
    step(sampler, request, [5])
    assert request.finish_reason is None
    step(sampler, request, [6])
    assert request.finish_reason is FinishReason.END_ID
    assert request.py_acceptance.steps == 0  # the facts name no statistics


@pytest.mark.parametrize("end", ["stop", "cancel before", "cancel after", "pause", "goes on"])
def test_no_request_is_kept_alive(end: str) -> None:
    sampler, request = make(), Request(0, py_end_id=9)
    gone = weakref.ref(request)
    apply(sampler, [request], [], [4])
    state = sampler.sample_async(batch([], [request]), outputs([5, 9 if end == "stop" else 6]))
    if end == "cancel before":
        request.finish_by(FinishReason.CANCELLED, 0)
    if end == "pause":
        request.state = RequestState.CONTEXT_INIT
    sampler.update_requests(state)
    if end == "cancel after":
        request.finish_by(FinishReason.CANCELLED, 0)
    del request, state
    assert gone() is None


def test_a_host_without_statistics() -> None:
    sampler, request = make(), Request(0)
    del request.py_acceptance
    step(sampler, request, [5, 6])
    assert request.output == [5, 6]


# --- stops ---


def test_a_stop_inside_a_run() -> None:
    """Of five accepted drafts the third is the end: three tokens count, six are rewound."""
    end = 9
    sampler = make(nextn=5)
    request = Request(0, py_end_id=end, py_draft_tokens=[1, 2, end, 4, 5])
    request.py_acceptance = AcceptanceStats(5)
    step(sampler, request, [1, 2, end, 4, 5, 6], k=5)
    assert request.output == [1, 2, end]
    assert request.finish_reason == FinishReason.END_ID
    assert request.py_acceptance.emitted == 3
    assert request.py_acceptance.acceptance_length == 3.0
    assert request.py_num_accepted_draft_tokens == 5
    assert request.py_rewind_len == 0


@pytest.mark.parametrize(
    ("run", "limit", "reason", "output"),
    [
        ([10, 11, 9, 20], 5, FinishReason.END_ID, [10, 11, 9]),
        ([10, 11, 9, 20], 2, FinishReason.LENGTH, [10, 11]),
        ([10, 11, 9, 20], 3, FinishReason.END_ID, [10, 11, 9]),
        ([10, 11, 12, 13], 3, FinishReason.LENGTH, [10, 11, 12]),
        ([10, 11, 12, 13], 4, FinishReason.LENGTH, [10, 11, 12, 13]),
        ([10, 11, 12, 13], 5, None, [10, 11, 12, 13]),
    ],
    ids=["stop_first", "cap_first", "together", "cap_inside", "cap_at_the_end", "neither"],
)
def test_the_earlier_of_stop_and_cap(
    run: list[int], limit: int, reason: FinishReason | None, output: list[int]
) -> None:
    request = Request(0, py_end_id=9, py_max_new_tokens=limit)
    step(make(), request, run)
    assert request.output == output
    assert request.finish_reason == reason
    assert request.py_acceptance.emitted == len(output)
    assert request.py_rewind_len == 0


def test_the_longest_sequence() -> None:
    """max_seq_len counts the prompt."""
    request = Request(0)
    step(make(max_seq_len=5), request, [10, 11, 12])
    assert request.output == [10, 11]
    assert request.finish_reason == FinishReason.LENGTH


def test_stop_words_over_two_runs() -> None:
    sampler, request = make(), Request(0, py_stop_words_list=[[11, 12]])
    step(sampler, request, [10, 11])
    step(sampler, request, [12, 13])
    assert request.output == [10, 11, 12]


def test_the_text_of_a_hosts_own_facts() -> None:
    """It receives every token that counts, and which of them were drafts."""
    received: list[tuple[int, bool]] = []

    def watch(token: int, *, from_draft: bool) -> bool:
        received.append((token, from_draft))
        return token == 11

    request = Request(0, py_end_id=10)
    request.facts = RequestFacts(100, StopRule(max_length=64, prompt_len=3, watch=watch))
    sampler = make()
    step(sampler, request, [9, 10])
    step(sampler, request, [8, 11, 12])
    assert request.output == [9, 10, 8, 11]
    assert request.finish_reason == FinishReason.STOP_WORDS
    assert received == [(9, True), (10, False), (8, True), (11, True)]


@pytest.mark.parametrize("run", [[], [10, 11]], ids=["at_once", "inside_a_run"])
def test_a_dead_row_fails_its_request_alone(run: list[int]) -> None:
    sampler, dead, other = make(), Request(0), Request(1)
    apply(sampler, [], [dead, other], run, [5, 6], status=[STATUS_NO_FINITE_LOGIT, 0])
    assert dead.output == run
    assert dead.finish_reason == FinishReason.ERROR
    assert other.output == [5, 6]
    assert other.finish_reason is None


def test_a_stop_before_a_dead_row_is_no_error() -> None:
    request = Request(0, py_end_id=11)
    step(make(), request, [10, 11], status=[STATUS_NO_FINITE_LOGIT])
    assert request.finish_reason == FinishReason.END_ID


def test_a_text_that_fails_ends_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    def fail(token: int, *, from_draft: bool) -> bool:
        del from_draft
        if token == 11:
            raise ValueError("bad byte")
        return False

    request, other = Request(0), Request(1)
    rule = StopRule(max_length=5, prompt_len=3, watch=fail)
    request.facts = RequestFacts(100, rule, stats=request.py_acceptance)
    sampler = make()
    results = apply(sampler, [], [request, other], [10, 11, 12], [5, 6])
    assert (request.output, request.finish_reason) == ([10, 11], FinishReason.ERROR)
    assert request.py_error == "the tokenizer cannot decode token 11: ValueError: bad byte"
    assert f"request 100: {request.py_error}" in caplog.text
    assert "Traceback" in caplog.text
    assert request.py_acceptance.emitted == 2
    assert other.output == [5, 6]
    assert results == [
        StepResult(100, [10, 11], 0, 3, FinishReason.ERROR),
        StepResult(101, [5, 6], 0, 2, None),
    ]


# --- results that come too late ---


def untouched(request: Request) -> None:
    assert request.output == []
    assert request.py_decoding_iter == 0
    assert request.py_rewind_len == POISON
    assert request.py_acceptance.steps == 0


@pytest.mark.parametrize(
    "state",
    [RequestState.CONTEXT_INIT, RequestState.GENERATION_COMPLETE, "GENERATION_COMPLETE"],
)
def test_a_request_that_finished_or_paused_takes_nothing(state: Any) -> None:
    """States of other enums are read by name; a finished request may have no slot any more."""
    sampler, request = make(), Request(0)
    launched = sampler.sample_async(batch([], [request]), outputs([5]))
    request.state, request.py_seq_slot = state, None
    sampler.update_requests(launched)
    untouched(request)


@pytest.mark.parametrize("is_context", [False, True])
def test_a_request_that_started_over_takes_nothing(is_context: bool) -> None:
    """It generates again by the time the old result arrives; the epoch differs."""
    sampler = make()
    request = Request(0, py_epoch=0)
    rows = ([request], []) if is_context else ([], [request])
    state = sampler.sample_async(batch(*rows), outputs([5]))
    request.py_epoch = 1
    sampler.update_requests(state)
    untouched(request)


def test_a_piece_of_a_prompt_takes_nothing() -> None:
    """Also where the host has scheduled the last piece by then."""
    sampler = make()
    request = Request(0, state=RequestState.CONTEXT_INIT, context_current_position=2)
    state = sampler.sample_async(batch([request], []), outputs([]))
    request.context_current_position = 3
    request.state = RequestState.GENERATION_IN_PROGRESS
    sampler.update_requests(state)
    untouched(request)


@pytest.mark.parametrize(("remaining", "output"), [(4, []), (0, [5])])
def test_a_host_that_only_knows_what_is_left(remaining: int, output: list[int]) -> None:
    class WithoutChunks(Request):
        is_last_context_chunk = None

    sampler, request = make(), WithoutChunks(0)
    state = sampler.sample_async(batch([request], []), outputs([5]))
    request.context_current_position = 3 - remaining
    sampler.update_requests(state)
    assert request.output == output


def test_a_slot_given_on_brings_no_foreign_tokens() -> None:
    """The old owner's result arrives after the new owner's was launched."""
    sampler, old, new = make(), Request(0), Request(0)
    first = sampler.sample_async(batch([], [old]), outputs([5, 6]))
    second = sampler.sample_async(batch([], [new]), outputs([7]))
    sampler.update_requests(first)
    sampler.update_requests(second)
    assert (old.output, new.output) == ([5, 6], [7])


# --- states that a host builds ---


def host_tensors() -> SampleStateTensorsMTP:
    """Slots 0 and 1: a prompt's token, then a run of two."""
    new_tokens = torch.zeros(K + 1, S, 1, dtype=torch.int32)
    new_tokens[0, 0, 0] = 5
    new_tokens[:2, 1, 0] = torch.tensor([6, 7])
    lens = torch.tensor([1, 2, 0, 0, 0, 0], dtype=torch.int32)
    return SampleStateTensorsMTP(new_tokens, lens, torch.full((S, K), 9, dtype=torch.int32))


@pytest.mark.parametrize("by_batch", [True, False], ids=["scheduled_requests", "requests"])
def test_a_state_from_another_rank(by_batch: bool) -> None:
    """It holds requests and tensors, but not what this sampler noted at launch."""
    context = Request(0)
    generation = Request(1, py_decoding_iter=4, py_draft_tokens=[1, 1, 1])
    named: dict[str, Any] = (
        {"scheduled_requests": batch([context], [generation])}
        if by_batch
        else {"requests": [context, generation], "runtime_draft_len": K}
    )
    make().update_requests(SampleStateMTP(host=host_tensors(), **named))
    assert (context.output, generation.output) == ([5], [6, 7])
    assert (context.py_rewind_len, generation.py_rewind_len) == (0, 2)
    assert context.py_draft_tokens == generation.py_draft_tokens == [9, 9, 9]
    assert context.py_acceptance.steps == 0
    assert generation.py_acceptance.emitted == 2


def test_a_prompt_that_is_paused_after_its_last_chunk_takes_nothing() -> None:
    """A host without epochs: the prompt is read again, and its token comes again with that."""
    sampler, request = make(), Request(0)
    state = sampler.sample_async(batch([request], []), outputs([5]))
    request.state, request.context_current_position = RequestState.CONTEXT_INIT, 0
    sampler.update_requests(state)
    assert request.output == []


class HostReason(Enum):
    END_ID, LENGTH, STOP_WORDS, CANCELLED = range(4)


@pytest.mark.parametrize("slot", [None, S], ids=["none", "of another pool"])
@pytest.mark.parametrize(
    "phase", [RequestState.GENERATION_COMPLETE, RequestState.CONTEXT_INIT], ids=["ended", "paused"]
)
def test_who_is_gone_since_may_have_no_slot_any_more(slot: int | None, phase: RequestState) -> None:
    sampler = make()
    gone, live = Request(0), Request(1)
    state = sampler.sample_async(batch([], [gone, live]), outputs([5], [6, 7]))
    state.rows = []  # a host's own state: rows are looked up when results come
    gone.state, gone.py_seq_slot = phase, slot
    sampler.update_requests(state)
    assert (gone.output, live.output) == ([], [6, 7])


def test_who_is_there_must_have_a_slot() -> None:
    sampler, request = make(), Request(0)
    state = sampler.sample_async(batch([], [request]), outputs([5]))
    lost = [Request(1), Request(2), request]
    for other in lost[:2]:
        other.py_seq_slot = None
    message = "no sequence slot: requests 101, 102"
    with pytest.raises(ExecutorError, match=message):
        sampler.sample_async(batch(lost[:1], lost[1:]), outputs([5], [6], [7]))
    with pytest.raises(ExecutorError, match=message):
        sampler.update_requests(SampleStateMTP(requests=lost, host=state.host))
    assert request.output == []


# --- states that are not ours ---


@pytest.mark.parametrize(
    ("name", "put", "output", "drafts"),
    [
        ("new_tokens", [[20], [21], [22], [-1]], [20, 21], [40, 41, 42]),
        ("new_tokens_lens", 1, [10], [40, 41, 42]),
        ("next_draft_tokens", [7, 8, 9], [10, 11], [7, 8, 9]),
        ("status", STATUS_NO_FINITE_LOGIT, [10, 11], []),
    ],
)
def test_tensors_that_a_host_put_in_place_of_ours_are_read(
    name: str, put: Any, output: list[int], drafts: list[int]
) -> None:
    """As where the results of another pipeline stage arrive."""
    sampler, request = make(), Request(2)
    state = sampler.sample_async(batch([], [request]), outputs([10, 11]))
    tensor = getattr(state.host, name).clone()
    place = (slice(None), 2) if name == "new_tokens" else 2
    tensor[place] = torch.tensor(put, dtype=torch.int32)
    setattr(state.host, name, tensor)
    sampler.update_requests(state)
    assert (request.output, request.py_draft_tokens) == (output, drafts)
    assert (request.finish_reason is FinishReason.ERROR) == (name == "status")


@pytest.mark.parametrize("width", [1, 2, K + 1, K + 3])
def test_a_state_of_another_width_is_read(width: int) -> None:
    """Fewer columns of tokens than the drafts would have, or more."""
    sampler, request = make(), Request(2)
    state = sampler.sample_async(batch([], [request]), outputs([10]))
    tokens = torch.full((width, S, 1), 10, dtype=torch.int32)
    host = SampleStateTensorsMTP(tokens, state.host.new_tokens_lens, state.host.next_draft_tokens)
    sampler.update_requests(SampleStateMTP(requests=[request], host=host))
    assert request.output == [10]


def test_what_no_host_validated_ends_in_a_state_without_a_batch() -> None:
    sampler = make()
    warm = Request(0, sampling_config=SimpleNamespace(temperature=[0.7]))
    warm.state = RequestState.CONTEXT_INIT
    state = sampler.sample_async(batch([warm], []), outputs([10]))
    fields = {name: getattr(state, name) for name in ("device", "host", "sampler_event")}
    sampler.update_requests(SampleStateMTP(requests=[warm], **fields))
    assert (warm.output, warm.finish_reason) == ([], FinishReason.ERROR)


def test_facts_of_a_host_are_validated_as_they_are() -> None:
    """They are complete, and options that verification applies are served."""
    params = SamplingParams(min_tokens=2, repetition_penalty=1.5)
    facts = RequestFacts.of(7, params, prompt_len=1, max_seq_len=64)
    request = Request(0, facts=facts)
    with pytest.raises(ConfigError, match=r"MTP: min_tokens=2, repetition_penalty=1\.5$"):
        make().validate_request(request)
    sampler = make(served_options={"min_tokens"})
    with pytest.raises(ConfigError, match=r"MTP: repetition_penalty=1\.5$"):
        sampler.validate_request(request)


def test_served_options_are_those_of_every_request() -> None:
    served = {"min_tokens", "temperature"}
    sampler = make(served_options=served)
    config = SimpleNamespace(min_length=[8], temperature=[0.7], repetition_penalty=[1.5])
    plain = Request(0, sampling_config=config)
    with pytest.raises(ConfigError, match=r"MTP: repetition_penalty=1\.5$"):
        sampler.validate_request(plain)
    config.repetition_penalty = None
    sampler.validate_request(plain)
    params = SamplingParams(min_tokens=8, temperature=0.7)
    plain.facts = RequestFacts.of(7, params, prompt_len=1, max_seq_len=64)
    sampler.validate_request(plain)


# --- a rule of stopping of the host's own ---


class Cutting(Request):
    """A host's request that can take tokens back."""

    def take_back_tokens(self, count: int) -> None:
        assert self.finish_reason is None, "tokens taken back after the end"
        assert 0 < count <= len(self.output)
        del self.tokens[len(self.tokens) - count :]


class Rule:
    """A stop callback that returns ``answers`` and records its calls with the outputs then."""

    def __init__(self, *requests: Request) -> None:
        self.requests = {request.request_id: request for request in requests}
        self.answers: list[Any] = []
        self.calls: list[dict[int, list[int]]] = []

    def __call__(self, ids: Any) -> Any:
        self.calls.append({n: list(self.requests[n].output) for n in ids})
        return self.answers.pop(0)


def asking(*requests: Request, **options: Any) -> tuple[MTPSampler, Rule]:
    rule = Rule(*requests)
    return make(hooks=SamplerHooks(stop_callback=rule), **options), rule


def test_a_rule_is_called_after_the_tokens_of_those_that_go_on() -> None:
    ended, goes_on, prompt = Request(0, py_end_id=6), Request(1), Request(2)
    sampler, rule = asking(ended, goes_on, prompt)
    rule.answers = [None, {}, [101], [103]]
    runs = [[9], [5, 6, 7], [4, 5]]
    first = apply(sampler, [prompt], [ended, goes_on], *runs)
    assert rule.calls == [{102: [9], 100: [5, 6], 101: [4, 5]}]
    assert [result.finish_reason for result in first] == [None, FinishReason.END_ID, None]
    assert step(sampler, goes_on, [7])[0].finish_reason is None
    (last,) = step(sampler, goes_on, [8, 9])
    assert rule.calls[1:] == [{101: [4, 5, 7]}, {101: [4, 5, 7, 8, 9]}]
    assert (last.token_ids, last.finish_reason) == ([8, 9], FinishReason.STOP_WORDS)
    assert goes_on.finish_reason is FinishReason.STOP_WORDS
    assert prompt.finish_reason is None
    # who ends by itself with its only token might be cut in front of it
    alone = rule.requests[103] = Request(3, py_end_id=6)
    assert step(sampler, alone, [6])[0].finish_reason is FinishReason.END_ID
    assert rule.calls[3:] == [{103: [6]}]


@pytest.mark.parametrize("kept", [2, 3, 4, 5])
def test_a_rule_cuts_inside_the_run(kept: int) -> None:
    """Statistics count the cut, the rewind the whole run."""
    request = Cutting(0, tokens=[1, 2, 3, 7, 8])
    sampler, rule = asking(request)
    rule.answers = [{100: kept}]
    counted: list[tuple[int, int]] = []
    sampler.on_step = lambda _, emitted, drafted: counted.append((emitted, drafted))
    request.py_draft_tokens = [4, 5, 6]
    (result,) = step(sampler, request, [4, 5, 6])
    assert rule.calls == [{100: [7, 8, 4, 5, 6]}]
    assert request.output == [7, 8, 4, 5, 6][:kept]
    assert result == StepResult(100, [4, 5, 6][: kept - 2], 3, 3, FinishReason.STOP_WORDS)
    assert request.finish_reason is FinishReason.STOP_WORDS
    assert request.py_acceptance.histogram[kept - 2] == request.py_acceptance.steps == 1
    assert request.py_acceptance.num_drafted == max(kept - 3, 0)  # in front of the last token
    assert counted == [(kept - 2, 3)]
    assert (request.py_rewind_len, request.py_num_accepted_draft_tokens) == (1, 2)
    # what was in flight comes too late
    assert step(sampler, request, [9]) == []
    assert request.output == [7, 8, 4, 5, 6][:kept]


@pytest.mark.parametrize("kept", [1, 6, "3", None])
def test_a_wrong_answer_ends_its_request_alone(kept: Any, caplog: pytest.LogCaptureFixture) -> None:
    wrong, right = Cutting(0, tokens=[1, 2, 3, 7, 8]), Cutting(1)
    sampler, rule = asking(wrong, right)
    rule.answers = [{100: kept, 77: 1}, [], None]
    results = apply(sampler, [], [wrong, right], [4, 5, 6], [4, 5])
    why = f"stop_callback: expected 2 to 5 tokens of the output to keep, got {kept!r}"
    assert wrong.py_error == why
    assert [result.finish_reason for result in results] == [FinishReason.ERROR, None]
    assert (wrong.output, right.output) == ([7, 8, 4, 5, 6], [4, 5])
    unknown = "stop_callback: expected ids among 100, 101, got 77"
    assert [record.getMessage() for record in caplog.records] == [unknown, f"request 100: {why}"]
    assert step(sampler, right, [6])[0].finish_reason is None


def test_a_rule_that_fails_ends_those_that_it_was_called_for() -> None:
    first, ended, dummy = Request(0), Request(1, py_end_id=5), Request(2, is_dummy=True)
    sampler, _ = asking()
    results = apply(sampler, [], [first, ended, dummy], [4], [4, 5], [6])
    reasons = [result.finish_reason for result in results]
    assert reasons == [FinishReason.ERROR, FinishReason.END_ID, None]
    assert first.py_error == "stop_callback: KeyError: 100"
    assert first.output == [4]


def test_hosts_whose_requests_take_nothing_back() -> None:
    whole, cut = Request(0), Request(1)
    sampler, rule = asking(whole, cut)
    rule.answers = [{100: 2, 101: 1}]
    apply(sampler, [], [whole, cut], [4, 5], [4, 5, 6])
    assert whole.finish_reason is FinishReason.STOP_WORDS
    assert cut.finish_reason is FinishReason.ERROR
    assert cut.py_error == (
        "stop_callback: 2 tokens are to be taken back, and the host's requests have no "
        "take_back_tokens"
    )
    assert cut.output == [4, 5, 6]
