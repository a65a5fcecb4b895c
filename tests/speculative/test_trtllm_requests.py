"""TensorRT-LLM's own requests reach every mode by the manager, and get what facts of ours get."""

from __future__ import annotations

import copy
import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.errors import ConfigError, ExecutorError, MetadataError
from mtp_plugin.ops.step import SamplingKind
from mtp_plugin.requests.logprobs import Logprob as OwnLogprob
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker
from mtp_plugin.speculative.host import HostStep, RequestFacts
from mtp_plugin.speculative.metadata import MTPSpecMetadata
from mtp_plugin.speculative.sampler import MTPSampler, SamplerHooks
from mtp_plugin.speculative.state import MTPHiddenStatesManager, SlotStateManager
from tests.speculative.drafting.example import VOCAB
from tests.speculative.drafting.host import H, ScriptedLayer, number_states
from tests.speculative.plain_host import KVAttention, int32
from tests.trtllm_request import (
    FinishReason,
    LlmRequest,
    LlmRequestState,
    Logprob,
    LogprobMode,
    make_batch,
)

K, SLOTS, MAX_SEQ_LEN = 2, 4, 64
PROMPT = [5, 17, 3, 42, 9]
TABLE = 2.0 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))
"""The target: logits by the last token alone."""


class TableLayer(ScriptedLayer):
    """Drafts what the target would say in most rows."""

    def __call__(self, *, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return number_states(input_ids.float())

    def shared_head(
        self, hidden: torch.Tensor, lm_head: Any, attn_metadata: Any, return_all: bool = False
    ) -> torch.Tensor:
        assert lm_head is None
        if not return_all:
            hidden = hidden[attn_metadata.seq_lens_cuda.long().cumsum(0) - 1]
        ids = hidden[:, 0].long()
        return TABLE[torch.where(ids % 3 == 0, (ids + 1) % VOCAB, ids)]


class TheirMetadata:
    """A host's own: nothing of ours is set, and what is greedy goes by three options."""

    def __init__(self, manager: SlotStateManager) -> None:
        self.mtp_hidden_states_manager = manager
        self.is_cuda_graph = False
        self.is_all_greedy_sample = True

    def update_is_all_greedy_sample(self, requests: list[Any]) -> None:
        def draws(request: Any) -> bool:
            config = request.sampling_config
            temperature = config.temperature
            return temperature is not None and temperature[0] > 0 and config.top_k != [1]

        self.is_all_greedy_sample = not any(map(draws, requests))

    def prepare(self) -> None:
        slots = [self.mtp_hidden_states_manager.slot_of(n) for n in self.request_ids]
        self.slot_ids = torch.tensor(slots)


class Host:
    """TensorRT-LLM's loop in small: our pieces, its requests, batches and names of arguments."""

    def __init__(
        self, line: str = "1.3b", *, theirs: bool = False, vanilla: bool = False, **config: Any
    ) -> None:
        self.line = line
        spec_config = MTPDecodingConfig(
            max_draft_len=K, mtp={"kernels": "reference", "draft_sampling": "coupled", **config}
        )
        kind = MTPWorker if vanilla else MTPEagleWorker
        self.worker = kind(spec_config, device="cpu")
        self.layers = [TableLayer() for _ in range(K if vanilla else 1)]
        self.manager: SlotStateManager
        if vanilla:
            self.manager = MTPHiddenStatesManager(
                spec_config, torch.float32, H, SLOTS, device="cpu", vocab_size=VOCAB
            )
        else:
            modes = self.worker.verifier.modes
            self.manager = SlotStateManager(modes, SLOTS, device="cpu", vocab_size=VOCAB)
        self.sampler = MTPSampler(
            SimpleNamespace(max_num_sequences=SLOTS, max_seq_len=MAX_SEQ_LEN),
            nextn=K,
            device="cpu",
            kernels="reference",
            served_options=self.worker.served_options,
            hooks=SamplerHooks(finish_reasons=FinishReason, logprob_class=Logprob),
        )
        self.spec: Any = TheirMetadata(self.manager)
        if not theirs:
            self.spec = MTPSpecMetadata(
                max_num_requests=SLOTS,
                max_draft_len=K,
                mtp_hidden_states_manager=self.manager,
                device=torch.device("cpu"),
            )
        self.steps: list[HostStep] = []
        self.accepted = 0

    def serve(self, *requests: Any) -> list[list[int]]:
        """The texts of requests that come at once, none of them validated before."""
        live = list(requests)
        while live:
            live = self.step(live)
        return [request.output for request in requests]

    def step(self, live: list[Any]) -> list[Any]:
        contexts = [r for r in live if r.state == LlmRequestState.CONTEXT_INIT]
        generations = [r for r in live if r.state == LlmRequestState.GENERATION_IN_PROGRESS]
        batch = make_batch(self.line, contexts, generations)
        self.manager.prepare_resources(batch)
        for request in live:  # after the manager, as there
            if request.py_seq_slot is None:
                taken = {r.py_seq_slot for r in live}
                request.py_seq_slot = max({*range(SLOTS)} - taken)
        outputs = self.forward(batch)
        if self.line == "1.2":
            state = self.sampler.sample_async(batch, model_outputs=outputs, resource_manager=None)
        else:
            state = self.sampler.sample_async(batch, outputs=outputs)
        for request in contexts:
            request.move_to_next_context_chunk()
        self.sampler.update_requests(state)
        ended = [r for r in live if r.state == LlmRequestState.GENERATION_COMPLETE]
        for request in ended:
            self.manager.free_resources(request)
        for request in generations:
            assert request.py_rewind_len == K - request.py_num_accepted_draft_tokens
            self.accepted += request.py_num_accepted_draft_tokens
        return [request for request in live if request not in ended]

    def forward(self, batch: Any) -> dict[str, Any]:
        requests, num_contexts = batch.all_requests(), len(batch.context_requests)
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        lens, kv_lens, drafts = [], [], []
        for place, request in enumerate(requests):
            tokens = request.get_tokens(0)
            if place < num_contexts:
                begin = request.context_current_position
                fed = tokens[begin : begin + request.context_chunk_size]
                rows.append(len(ids) + len(fed) - 1)
            else:
                begin = len(tokens) - 1
                fed = [tokens[-1], *request.py_draft_tokens]
                assert len(fed) == K + 1
                drafts += request.py_draft_tokens
                rows += range(len(ids), len(ids) + len(fed))
            ids += fed
            positions += range(begin, begin + len(fed))
            lens.append(len(fed))
            kv_lens.append(begin + len(fed))
        attention = KVAttention(lens, num_contexts, kv_lens)
        spec = self.spec
        spec.request_ids = [request.py_request_id for request in requests]
        attention.request_ids = list(spec.request_ids)
        spec.num_generations, spec.num_tokens = len(requests) - num_contexts, len(ids)
        spec.draft_tokens, spec.runtime_draft_len = int32(drafts), K
        if self.line != "1.2":
            spec.update_is_all_greedy_sample(requests)
        spec.prepare()
        self.steps.append(HostStep.read(attention, spec, K))
        return self.worker(
            input_ids=int32(ids),
            position_ids=torch.tensor([positions]),
            hidden_states=number_states(torch.tensor(ids).float()),
            logits=TABLE[torch.tensor(ids)[rows]].clone(),
            attn_metadata=attention,
            spec_metadata=spec,
            draft_model=SimpleNamespace(mtp_layers=self.layers, lm_head=None, embed_tokens=None),
        )


def with_facts(number: int, **params: Any) -> LlmRequest:
    """The same request with its options under our names."""
    request = LlmRequest(number, PROMPT)
    request.facts = RequestFacts.of(
        number,
        SamplingParams(**{"max_new_tokens": 16, **params}),
        prompt_len=len(PROMPT),
        max_seq_len=MAX_SEQ_LEN,
    )
    return request


def text_of(host: Host, request: LlmRequest) -> list[int]:
    (text,) = host.serve(request)
    return text


GREEDY = text_of(Host(), LlmRequest(1, PROMPT))
DRAWS = {"temperature": 0.9, "random_seed": 11}
OURS = {"temperature": 0.9, "seed": 11}
BIAS = torch.zeros(VOCAB).index_fill_(0, torch.tensor(GREEDY[:3]), -50.0)
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "seed": ({"sampling": DRAWS}, OURS),
    "negative seed": (
        {"sampling": {"temperature": 0.9, "random_seed": -3}},
        {"temperature": 0.9, "seed": -3},
    ),
    "cuts": (
        {"sampling": {**DRAWS, "top_k": 20, "top_p": 0.9, "min_p": 0.01}},
        {**OURS, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    ),
    "all ids": ({"sampling": {"top_k": 0, "random_seed": 4}}, {"top_k": 0, "seed": 4}),
    "a neutral top-p": ({"sampling": {"top_p": 1.0, "random_seed": 4}}, {"top_p": 1.0, "seed": 4}),
    "no seed": ({"sampling": {"temperature": 0.9}}, {"temperature": 0.9}),
    "penalties": (
        {"sampling": {"repetition_penalty": 1.8, "frequency_penalty": 2.5}},
        {"repetition_penalty": 1.8, "frequency_penalty": 2.5},
    ),
    "sampled penalties": (
        {"sampling": {**DRAWS, "presence_penalty": 3.0, "prompt_ignore_length": 2}},
        {**OURS, "presence_penalty": 3.0, "prompt_ignore_length": 2},
    ),
    "bias": ({"embedding_bias": BIAS}, {"logit_bias": dict.fromkeys(GREEDY[:3], -50.0)}),
    "bad words": (
        {"bad_words": [[GREEDY[2]], GREEDY[4:6]]},
        {"bad_words": ((GREEDY[2],), tuple(GREEDY[4:6]))},
    ),
    "least length": (
        {"sampling": {"min_length": 5}, "stop_words": [[GREEDY[1]]]},
        {"min_tokens": 5, "stop_token_ids": (GREEDY[1],)},
    ),
}


@cache
def text_of_facts(name: str) -> list[int]:
    return text_of(Host(), with_facts(7, **OPTIONS[name][1]))


@pytest.mark.parametrize(("line", "theirs"), [("1.2", True), ("1.3b", False)])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_text_is_that_of_the_same_facts(name: str, line: str, theirs: bool) -> None:
    """Of a batch whose other request is greedy, and stays so."""
    fields, _ = OPTIONS[name]
    host = Host(line, theirs=theirs)
    asking, plain = LlmRequest(7, PROMPT, line=line, **fields), LlmRequest(8, PROMPT, line=line)
    host.sampler.validate_request(asking)
    text, other = host.serve(asking, plain)
    assert other == GREEDY
    assert text == text_of_facts(name) != GREEDY
    assert asking.finish_reason in (FinishReason.LENGTH, FinishReason.STOP_WORDS)
    assert host.accepted > 0
    if line != "1.2":
        assert asking.py_num_draft_tokens_verified == K
    assert host.manager.sampling_kind_of([7, 8]) is SamplingKind.GREEDY


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.0, "top_p": 0.9},
        {"top_k": 1, "temperature": 0.7},
        {"top_p": 0.0},
        {"random_seed": 3},
        {"min_p": 0.0, "repetition_penalty": 1.0, "min_length": 1, "num_return_sequences": 2},
    ],
    ids=str,
)
def test_greedy_as_the_host_has_it(sampling: dict[str, Any]) -> None:
    """And the step is greedy."""
    host = Host()
    assert text_of(host, LlmRequest(7, PROMPT, sampling=sampling)) == GREEDY
    assert {step.sampling_kind for step in host.steps} == {SamplingKind.GREEDY}
    assert host.spec.is_all_greedy_sample


def test_samples_of_one_prompt_are_requests_of_the_host() -> None:
    sampling = {"temperature": 0.9, "num_return_sequences": 2, "random_seed": 11}
    parent = LlmRequest(7, PROMPT, sampling=sampling)
    host = Host()
    host.sampler.validate_request(parent)
    child = parent.create_child_request(8)
    assert child.py_mtp_facts.request_id == 7  # as the host copies attributes
    first, second = host.serve(parent, child)
    assert first != second
    expected = text_of(Host(), with_facts(8, temperature=0.9, seed=12))
    assert second == expected


# --- steps ---


def test_steps_have_the_sampling_kind_of_their_requests() -> None:
    """Sampled, processed, and greedy again when these requests have finished."""
    host = Host()
    sampled = LlmRequest(1, PROMPT, sampling=DRAWS, max_new_tokens=2)
    edited = LlmRequest(2, PROMPT, sampling={"frequency_penalty": 1.0}, max_new_tokens=5)
    plain = LlmRequest(3, PROMPT, max_new_tokens=12)
    live = host.step([sampled, plain])
    assert host.steps[-1].sampling_kind is SamplingKind.SAMPLED
    assert not host.spec.is_all_greedy_sample
    live = host.step([*live, edited])
    assert host.steps[-1].sampling_kind is SamplingKind.PROCESSED
    while live:
        live = host.step(live)
    assert host.steps[-1].sampling_kind is SamplingKind.GREEDY
    assert host.spec.is_all_greedy_sample


def test_a_manager_that_always_gives_everything() -> None:
    host = Host("1.2", theirs=True)
    host.manager.always_edits = True
    assert text_of(host, LlmRequest(1, PROMPT, line="1.2")) == GREEDY
    assert {step.sampling_kind for step in host.steps} == {SamplingKind.PROCESSED}


@pytest.mark.parametrize("line", ["1.2", "1.3b"])
def test_drafts_that_rejection_sampling_verifies(line: str) -> None:
    """Greedy requests of the same steps keep their output."""
    config = {"verification": "rejection", "draft_sampling": "plain"}
    host = Host(line, theirs=line == "1.2", **config)
    sampled = LlmRequest(7, PROMPT, line=line, sampling=DRAWS)
    text, other = host.serve(sampled, LlmRequest(8, PROMPT, line=line))
    assert other == GREEDY
    assert text == text_of(Host(**config), with_facts(7, **OURS))
    assert text not in (GREEDY, text_of_facts("seed"))


def test_everything_without_pools_of_edits() -> None:
    host = Host()
    host.manager.logits_allocator, host.manager.always_edits = None, True
    assert text_of(host, LlmRequest(1, PROMPT)) == GREEDY
    asking = LlmRequest(7, PROMPT, sampling={"presence_penalty": 1.0})
    assert text_of(host, asking) == []
    assert asking.py_error == ("request 7: presence_penalty need a manager with vocab_size")


def test_a_manager_that_leaves_draws_out() -> None:
    host = Host()
    host.manager.always_greedy = True
    assert text_of(host, LlmRequest(1, PROMPT, sampling=DRAWS)) == GREEDY
    penalty = {"repetition_penalty": 1.8}
    host.manager.always_greedy = False
    expected = text_of(host, LlmRequest(1, PROMPT, sampling=penalty))
    host.manager.always_greedy = True
    assert text_of(host, LlmRequest(1, PROMPT, sampling={**DRAWS, **penalty})) == expected


def graph_of(host: Host, **fields: Any) -> MTPSpecMetadata:
    view = host.spec.create_cuda_graph_metadata(2)
    for name, value in {"request_ids": [7], "num_generations": 1, **fields}.items():
        setattr(view, name, value)
    return view


def test_graphs_are_chosen_by_what_requests_ask_for() -> None:
    """Two kinds of captured steps: first choices, and everything."""
    host = Host()
    attention = KVAttention([K + 1], 0, [9])
    asking = LlmRequest(7, PROMPT, sampling={"frequency_penalty": 1.0})
    host.manager.prepare_resources(make_batch("1.3b", [asking], []))
    spec = host.spec
    spec.update_is_all_greedy_sample([LlmRequest(8, PROMPT)])
    assert spec.is_all_greedy_sample
    spec.update_is_all_greedy_sample([LlmRequest(8, PROMPT), asking])
    assert not spec.is_all_greedy_sample
    # at capture a dummy of the host's replaces such a request: the manager knows nothing of it
    host.manager.add_dummy_requests([3])
    dummy = LlmRequest(3, [1], sampling={"temperature": 0.7, "top_k": 50})
    spec.update_is_all_greedy_sample([dummy])
    view = graph_of(host, request_ids=[3])
    view.prepare()
    read = HostStep.read(attention, view, K)
    assert read.sampling_kind is SamplingKind.PROCESSED
    # who only draws is given everything in a captured step: others may replay it
    draws = LlmRequest(9, PROMPT, sampling=DRAWS)
    host.manager.prepare_resources(make_batch("1.3b", [draws], []))
    view.request_ids = [9]
    view.prepare()
    read = HostStep.read(attention, view, K)
    assert read.sampling_kind is SamplingKind.PROCESSED
    view.is_cuda_graph = False
    assert HostStep.read(attention, view, K).sampling_kind is SamplingKind.SAMPLED


def test_requests_are_scanned_when_the_batch_changes() -> None:
    spec = Host().spec
    sampled, plain = LlmRequest(1, PROMPT, sampling=DRAWS), LlmRequest(2, PROMPT)
    for requests, greedy in (
        ([plain], True),
        ([plain, sampled], False),
        ([plain, sampled], False),
        ([plain], True),
        ([], True),
        ([sampled], False),
    ):
        spec.update_is_all_greedy_sample(requests)
        assert spec.is_all_greedy_sample is greedy
    view = spec.create_cuda_graph_metadata(2)
    view.populate_sampling_params_for_one_model([plain])
    assert (view.is_all_greedy_sample, spec.is_all_greedy_sample) == (True, False)


def test_what_ranks_agreed_on_counts_until_the_next_batch() -> None:
    spec = Host().spec
    plain, sampled = LlmRequest(1, PROMPT), LlmRequest(2, PROMPT, sampling=DRAWS)
    spec.update_is_all_greedy_sample([plain])
    spec.group_all_greedy_sample = False
    spec.populate_sampling_params_for_one_model([plain])
    assert not spec.is_all_greedy_sample
    spec.update_is_all_greedy_sample([plain])
    assert spec.is_all_greedy_sample
    assert spec.group_all_greedy_sample is None
    spec._force_non_greedy_for_capture = True
    spec.update_is_all_greedy_sample([plain])
    assert not spec.is_all_greedy_sample
    spec._force_non_greedy_for_capture = False
    spec.populate_sampling_params_for_one_model([sampled])
    assert not spec.is_all_greedy_sample


def test_a_captured_step_of_first_choices_is_not_replayed_for_more() -> None:
    host = Host()
    asking = LlmRequest(7, PROMPT, sampling=DRAWS)
    host.manager.prepare_resources(make_batch("1.3b", [LlmRequest(8, PROMPT), asking], []))
    why = (
        "prepare(): request 7 needs more than the argmax of its logits, and this graph was "
        "chosen with is_all_greedy_sample=True: call update_is_all_greedy_sample() first, or "
        "set the manager's always_edits before capture"
    )
    with pytest.raises(MetadataError, match=f"^{re.escape(why)}$"):
        graph_of(host, request_ids=[8, 7]).prepare()
    graph_of(host, request_ids=[8]).prepare()
    graph_of(host, is_all_greedy_sample=False).prepare()
    graph_of(host, sampling_kind=SamplingKind.PROCESSED).prepare()
    host.manager.always_edits = True
    graph_of(host).prepare()


# --- the public acceptance step ---


@pytest.mark.parametrize("vanilla", [False, True], ids=["eagle", "vanilla"])
@pytest.mark.parametrize("has_kv_lens", [True, False])
def test_public_acceptance_samples_like_forward(vanilla: bool, has_kv_lens: bool) -> None:
    """Positions, by which noise is keyed, follow from KV lengths or are passed."""
    host = Host(vanilla=vanilla)
    worker: Any = host.worker

    def compare(**inputs: Any) -> dict[str, torch.Tensor]:
        given = [inputs[n] for n in ("input_ids", "logits", "spec_metadata", "attn_metadata")]
        named = {}
        if not has_kv_lens:
            given[3] = copy.copy(given[3])
            del given[3].kv_lens_cuda
            with pytest.raises(MetadataError, match=r"expected position_ids, or kv_lens_cuda"):
                worker.sample_and_accept_draft_tokens(*given)
            named = {"position_ids": inputs["position_ids"]}
        tokens, counts = worker.sample_and_accept_draft_tokens(*given, **named)
        outputs: dict[str, torch.Tensor] = worker(**inputs)
        assert torch.equal(tokens, outputs["new_tokens"])
        assert torch.equal(counts, outputs["new_tokens_lens"])
        return outputs

    host.worker = compare  # type: ignore[assignment]
    requests = [LlmRequest(7, PROMPT, sampling=DRAWS), LlmRequest(8, PROMPT[:3], sampling=DRAWS)]
    first = host.step(requests[:1])
    live = [requests[1], *first]
    while live:
        live = host.step(live)
    assert requests[0].output == text_of(Host(), LlmRequest(7, PROMPT, sampling=DRAWS))


# --- prompts in chunks ---


@pytest.mark.thinned("vanilla", cases=1)
@pytest.mark.parametrize("line", ["1.2", "1.3b"])
@pytest.mark.parametrize("vanilla", [False, True], ids=["eagle", "vanilla"])
@pytest.mark.parametrize("sampling", [{}, {"frequency_penalty": 9.0}], ids=["", "penalty"])
def test_chunks_give_nothing_and_note_nothing(
    line: str, sampling: dict[str, Any], vanilla: bool
) -> None:
    """With generations in the batch: rows of unfinished chunks are ignored, although the target's
    argmax after every chunk is the first token of the output."""
    prompt = PROMPT[-1:] * 3
    whole = LlmRequest(7, prompt, line=line, sampling=sampling)
    expected = text_of(Host(line), whole)
    host = Host(line, vanilla=vanilla)
    chunked = LlmRequest(7, prompt, line=line, sampling=sampling, chunk=1)
    other = LlmRequest(8, PROMPT, line=line)
    live = [other]
    live = host.step(live)
    live = host.step([chunked, *live])
    assert (chunked.output, chunked.py_decoding_iter) == ([], 0)
    assert host.steps[-1].final_context.tolist() == [False]
    assert host.steps[-1].known_successors.tolist() == prompt[:1]
    if line != "1.2":
        assert chunked.py_draft_tokens == []
    while live:
        live = host.step(live)
    assert (chunked.output, other.output) == (expected, GREEDY)
    assert all(step.final_context is None for step in host.steps[3:])
    assert host.accepted > 0


def test_chunks_that_the_host_lists_are_skipped_in_every_tensor() -> None:
    host = Host()
    asking = LlmRequest(7, PROMPT, chunk=2)
    logging = LlmRequest(8, PROMPT, return_log_probs=True, num_logprobs=0)
    host.step([asking, logging])
    assert len(logging.output) == 1
    assert logging.py_result.log_probs[0][0].keys() == {GREEDY[0]}
    assert list(logging.py_result.log_probs[0][0]) == logging.output


# --- results ---


@pytest.mark.parametrize("number", [0, 3])
def test_log_probabilities_come_back_in_the_hosts_class(number: int) -> None:
    request = LlmRequest(
        7, PROMPT, sampling=DRAWS, return_log_probs=True, num_logprobs=number, max_new_tokens=9
    )
    host = Host()
    text = text_of(host, request)
    (reported,) = request.py_result.log_probs
    assert len(reported) == len(text) == 9
    for before, token, one in zip([PROMPT[-1], *text], text, reported, strict=False):
        values = TABLE[before].log_softmax(-1)
        assert next(iter(one)) == token
        best = values.topk(number).indices.tolist() if number else []
        assert one.keys() == {token, *best}
        for number_of, logprob in one.items():
            assert type(logprob) is Logprob
            assert logprob.logprob == pytest.approx(values[number_of].item(), abs=1e-5)
            assert logprob.rank == 1 + int((values > values[number_of]).sum())
    spent = sum(next(iter(one.values())).logprob for one in reported)
    assert request.py_result.cum_log_probs == pytest.approx(spent)


def test_the_simple_format_of_log_probabilities() -> None:
    """Numbers alone, unless others are returned with the token."""
    whole, simple, wide = (
        LlmRequest(n, PROMPT, return_log_probs=True, num_logprobs=count, max_new_tokens=4)
        for n, count in ((1, 0), (2, 0), (3, 2))
    )
    simple.py_logprobs_simple_format = wide.py_logprobs_simple_format = True
    Host().serve(whole, simple, wide)
    (reported,), (numbers,) = whole.py_result.log_probs, simple.py_result.log_probs
    assert numbers == [one[token].logprob for token, one in zip(GREEDY, reported, strict=False)]
    assert type(wide.py_result.log_probs[0][0][GREEDY[0]]) is Logprob


def test_log_probabilities_of_a_host_without_a_class() -> None:
    host = Host()
    host.sampler.logprob_class = OwnLogprob
    request = LlmRequest(1, PROMPT, return_log_probs=True, max_new_tokens=1)
    host.serve(request)
    assert type(request.py_result.log_probs[0][0][GREEDY[0]]) is OwnLogprob


@pytest.mark.parametrize(
    ("fields", "reason", "kept"),
    [
        ({"max_new_tokens": 3}, FinishReason.LENGTH, 3),
        ({"end_id": GREEDY[2]}, FinishReason.END_ID, 3),
        ({"stop_words": [[GREEDY[0]]]}, FinishReason.STOP_WORDS, 1),
        ({"stop_words": [GREEDY[1:3], [60, 60]]}, FinishReason.STOP_WORDS, 3),
    ],
)
def test_reasons_are_the_hosts(fields: dict[str, Any], reason: FinishReason, kept: int) -> None:
    request = LlmRequest(1, PROMPT, **fields)
    assert text_of(Host(), request) == GREEDY[:kept]
    assert request.finish_reason is reason


def test_outputs_under_either_name() -> None:
    host = Host()
    batch = make_batch("1.3b", [LlmRequest(1, PROMPT)], [])
    with pytest.raises(
        ExecutorError, match=r"sample_async: expected model_outputs or outputs, got n"
    ):
        host.sampler.sample_async(batch)


def test_a_slot_under_its_older_name() -> None:
    host = Host("1.2")
    request = LlmRequest(1, PROMPT, line="1.2")
    host.manager.prepare_resources(make_batch("1.2", [request], []))
    del request.py_seq_slot
    request.seq_slot = 2
    outputs = host.forward(make_batch("1.2", [request], []))
    host.sampler.sample_async(make_batch("1.2", [request], []), outputs, [0, 1])
    assert host.sampler.store.new_tokens[0, :, 0].tolist() == [0, 0, GREEDY[0], 0]


# --- refusals ---

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "context logits": (
        {"return_context_logits": True},
        "not supported with MTP: py_return_context_logits (of prompt_logprobs too)",
    ),
    "generation logits": (
        {"return_generation_logits": True},
        "not supported with MTP: py_return_generation_logits",
    ),
    "beams": ({"sampling": {"beam_width": 2}}, "not supported with MTP: beam_width=2"),
    "many log-probabilities": (
        {"return_log_probs": True, "num_logprobs": 21},
        "not supported with MTP: py_return_log_probs: expected py_num_logprobs to be an integer "
        "from 0 to 20, got 21",
    ),
    "a temperature": (
        {"sampling": {"temperature": -1.0}},
        "not supported with MTP: temperature: expected a number >= 0, got -1.0",
    ),
    "several": (
        {"sampling": {"no_repeat_ngram_size": 3, **DRAWS}, "return_generation_logits": True},
        "not supported with MTP: py_return_generation_logits, no_repeat_ngram_size=3",
    ),
    "stop ids": (
        {"sampling": {"min_length": 4}, "stop_words": [[n] for n in range(20, 53)]},
        "min_tokens=4 and 33 ids that end the text: at most 32 can be held back",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    """At admission, or without validation with the prompt: alone, with the error in the request."""
    fields, why = REFUSED[name]
    host = Host()
    request, plain = LlmRequest(7, PROMPT, **fields), LlmRequest(8, PROMPT)
    with pytest.raises(ConfigError, match=f"^request 7: {re.escape(why)}$"):
        host.sampler.validate_request(request)
    texts = host.serve(request, plain)
    assert texts == [[], GREEDY]
    assert (request.finish_reason, request.py_error) == (FinishReason.CANCELLED, why)


@pytest.mark.parametrize(
    ("attribute", "value", "refused"),
    [
        ("py_logits_post_processors", [print], "py_logits_post_processors"),
        ("guided_decoding_params", object(), "guided_decoding_params"),
        ("py_additional_outputs", ["x"], "py_additional_outputs"),
    ],
)
def test_refusals_of_other_fields(attribute: str, value: Any, refused: str) -> None:
    request = LlmRequest(7, PROMPT)
    setattr(request, attribute, value)
    with pytest.raises(ConfigError, match=f"^request 7: not supported with MTP: {refused}$"):
        Host().sampler.validate_request(request)


def test_log_probabilities_of_another_distribution() -> None:
    request = LlmRequest(7, PROMPT, return_log_probs=True)
    request.py_logprobs_mode = LogprobMode.PROCESSED
    with pytest.raises(ConfigError, match=r"MTP: py_logprobs_mode=processed$"):
        Host().sampler.validate_request(request)
    request.py_logprobs_mode = LogprobMode.RAW
    Host().sampler.validate_request(request)


def test_log_probabilities_of_the_processed_distribution() -> None:
    """The only token that truncation keeps has probability 1; in the model's distribution less."""
    values = {}
    for mode in ("raw", "processed"):
        host = Host(logprobs_mode=mode)
        draws = {"temperature": 0.9, "random_seed": 11, "top_p": 1e-6}
        request = LlmRequest(7, PROMPT, sampling=draws, return_log_probs=True, num_logprobs=0)
        request.py_logprobs_mode = LogprobMode(mode)
        host.sampler.validate_request(request)
        assert text_of(host, request) == GREEDY
        (reported,) = request.py_result.log_probs
        values[mode] = [one[t].logprob for one, t in zip(reported, request.output, strict=True)]
    assert set(values["processed"]) == {0.0}
    assert max(values["raw"]) < -0.01
    request.py_logprobs_mode = "processed_logits"
    with pytest.raises(ConfigError, match="expected raw or processed, got 'processed_logits'"):
        host.sampler.validate_request(request)


def test_an_id_without_a_short_spelling_ends_its_request_alone() -> None:
    wrong, right = LlmRequest(7, PROMPT), LlmRequest(8, PROMPT)
    wrong.py_bad_words_list = [[10**5000]]
    assert Host().serve(wrong, right) == [[], GREEDY]
    assert wrong.py_error == (
        f"bad_words: expected ids below {VOCAB}, the size of the vocabulary, got "
        f"[an integer of 16610 bits]"
    )


def test_what_only_the_manager_can_check_ends_its_request_alone() -> None:
    """A bias of another vocabulary, which is not checked before the step."""
    host = Host()
    wrong = LlmRequest(7, PROMPT, embedding_bias=torch.zeros(VOCAB - 1))
    right = LlmRequest(8, PROMPT, embedding_bias=BIAS)
    host.sampler.validate_request(wrong)
    texts = host.serve(wrong, right)
    assert texts == [[], text_of(Host(), LlmRequest(8, PROMPT, embedding_bias=BIAS))]
    assert wrong.py_error == f"logit_bias: expected {VOCAB} values, one per id, got {VOCAB - 1}"
    with pytest.raises(ConfigError, match="request 7: logit_bias: expected"):
        host.sampler.validate_request(wrong)
