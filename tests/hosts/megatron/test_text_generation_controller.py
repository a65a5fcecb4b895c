"""The controller with Megatron's interface over the embedded executor."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.errors import ConfigError, ExecutorError, RequestError
from mtp_plugin.hosts.embedded import LLM
from mtp_plugin.hosts.megatron.async_stream import AsyncStream
from mtp_plugin.hosts.megatron.embedded_context import InferenceWrappedModel, request_seed
from mtp_plugin.hosts.megatron.inference_request import InferenceRequest, Status
from mtp_plugin.hosts.megatron.sampling_params import SamplingParams
from mtp_plugin.hosts.megatron.text_generation_controller import TextGenerationController
from mtp_plugin.requests import options
from tests.checkpoints import write_echo_checkpoint
from tests.hosts.embedded.replays import WatchedGraphs
from tests.megatron import invariants
from tests.megatron.engine import Tokenizer

OPTIONS = {
    "max_batch_size": 4,
    "max_num_tokens": 64,
    "max_seq_len": 96,
    "dtype": "float32",
    "device": "cpu",
    "kv_cache_config": {"tokens_per_block": 8},
}
SEED = 1234
Make = Callable[..., TextGenerationController]


def options_of(num_drafts: int, **changed: Any) -> dict[str, Any]:
    drafting = {"decoding_type": "MTP", "max_draft_len": num_drafts}
    return {**OPTIONS, "speculative_config": drafting if num_drafts else None, **changed}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("megatron") / "checkpoint"
    write_echo_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def shared(checkpoint: Path) -> Iterator[Make]:
    """Controllers by K, which tests leave without requests."""
    made: dict[int, TextGenerationController] = {}

    def make(num_drafts: int) -> TextGenerationController:
        if num_drafts not in made:
            made[num_drafts] = TextGenerationController.from_checkpoint(
                checkpoint,
                options_of(num_drafts),
                tokenizer=Tokenizer(),
                inference_sampling_seed=SEED,
            )
        made[num_drafts].inference_wrapped_model.inference_context.reset()
        return made[num_drafts]

    yield make
    for controller in made.values():
        controller.shutdown()


def request(request_id: Any, prompt: list[int], params: Any) -> InferenceRequest:
    text = " ".join(map(str, prompt))
    return InferenceRequest(
        request_id=request_id, prompt=text, prompt_tokens=prompt, sampling_params=params
    )


def batch(params: Any, **changed: Any) -> OrderedDict[int, InferenceRequest]:
    made = OrderedDict((n, request(n, list(p), params)) for n, p in invariants.PROMPTS.items())
    for each in made.values():
        vars(each).update(changed)
    return made


def run_dynamic(controller: TextGenerationController, peeks: tuple[int, ...] = ()) -> dict:
    """Run the requests of the context; before the steps ``peeks`` skip the bookkeeping once."""
    tokens: dict[int, list[int]] = {}
    step = 0
    while (output := None) is None and controller._context.has_unfinished_requests():
        skipped = None
        if step in peeks:
            before = state_of(controller)
            skipped = asyncio.run(controller.async_generate_output_tokens_dynamic_batch(True))
            assert_same(state_of(controller), before)
        output = controller.generate_output_tokens_dynamic_batch()
        if skipped is not None:
            assert torch.equal(skipped["sample"], output["sample"])
            both = skipped["accepted_tokens"], output["accepted_tokens"]
            assert both == (None, None) or torch.equal(*both)
        for row, number in enumerate(output["active_request_ids"].tolist()):
            if output["accepted_tokens"] is not None:
                own = output["accepted_tokens"][row].tolist()
                tokens.setdefault(number, []).extend(token for token in own if token >= 0)
            tokens.setdefault(number, []).append(int(output["sample"][row]))
        step += 1
    return tokens


def state_of(controller: TextGenerationController) -> dict[str, Any]:
    """Requests, slots, block tables, and all tensors of the plugin's manager and sampler."""
    built = controller._context.built
    manager = built.pieces.manager
    requests = [
        (each.request_id, list(each.tokens), each.state, each.context_current_position)
        for each in controller._context._ids.values()
    ]
    tensors = {
        name: value.clone() for name, value in vars(manager).items() if torch.is_tensor(value)
    }
    tensors["slot table"] = manager.table.rows.clone()
    tensors["store"] = built.pieces.sampler.store.rows.clone()
    tables = {each: list(table) for each, table in built.blocks._tables.items()}
    slots = dict(manager.slot_manager.slot_mapping)
    return {"requests": requests, "tables": tables, "slots": slots, "tensors": tensors}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    tensors = found.pop("tensors"), expected["tensors"]
    assert found == {name: each for name, each in expected.items() if name != "tensors"}
    for name, tensor in tensors[1].items():
        torch.testing.assert_close(tensors[0][name], tensor, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_ours_passes_the_checks_of_megatrons_class(shared: Make, num_drafts: int) -> None:
    controller = shared(num_drafts)
    invariants.check_texts(controller)
    invariants.check_padding(controller)
    invariants.check_generation_status(controller)
    invariants.check_sampling(controller, SamplingParams)
    static = invariants.check_static(controller, SamplingParams, request)
    invariants.check_streams(controller, SamplingParams, request, AsyncStream)
    dynamic = invariants.check_dynamic(controller, SamplingParams, request)
    invariants.check_stop_words(controller, SamplingParams, request)
    invariants.check_skipped_bookkeeping(controller, SamplingParams, request)
    invariants.check_bookkeeping(controller, SamplingParams, request)
    invariants.check_static_options(controller, SamplingParams, request)
    for number, tokens in static.items():
        assert dynamic[number][: len(tokens)] == tokens


@pytest.mark.parametrize(
    ("num_drafts", "setting"),
    [(3, {"top_k": 1}), (0, {}), (3, {"top_p": 0.8, "temperature": 0.7})],
)
def test_batches_give_the_output_of_llm_generate(
    shared: Make, checkpoint: Path, num_drafts: int, setting: dict[str, Any]
) -> None:
    params = SamplingParams(num_tokens_to_generate=20, termination_id=-1, **setting)
    controller = shared(num_drafts)
    static = controller.generate_all_output_tokens_static_batch(batch(params))
    for each in batch(params).values():
        controller._context.add_request(each)
    dynamic = run_dynamic(controller)
    own = [
        options.SamplingParams(
            max_new_tokens=20,
            temperature=0.0 if params.top_k == 1 else params.temperature,
            top_p=params.top_p or None,
            seed=request_seed(SEED, number),
            ignore_eos=True,
        )
        for number in invariants.PROMPTS
    ]
    with LLM(options_of(num_drafts) | {"model": str(checkpoint)}) as llm:
        outputs = llm.generate([list(p) for p in invariants.PROMPTS.values()], own, use_tqdm=False)
    for number, output in zip(invariants.PROMPTS, outputs, strict=True):
        expected = list(output.outputs[0].token_ids)
        assert static[number].generated_tokens.tolist() == expected
        assert dynamic[number] == expected
        assert static[number].status is Status.COMPLETED


def test_default_parameters_sample(shared: Make) -> None:
    prompts = {number: [5, 6, 7] for number in range(4)}
    outputs = []
    for params in (SamplingParams(), SamplingParams(top_k=1)):
        params.num_tokens_to_generate = 20
        made = OrderedDict((n, request(n, list(p), params)) for n, p in prompts.items())
        results = shared(3).generate_all_output_tokens_static_batch(made)
        outputs.append({tuple(each.generated_tokens.tolist()) for each in results.values()})
    assert len(outputs[0]) == 4
    assert len(outputs[1]) == 1


def test_each_request_has_its_own_parameters(shared: Make) -> None:
    controller = shared(3)
    made = batch(None)
    made[3].sampling_params = SamplingParams(num_tokens_to_generate=5, top_k=1)
    made[7].sampling_params = SamplingParams(num_tokens_total=20, temperature=0.9)
    made[1].sampling_params = SamplingParams(num_tokens_to_generate=0, return_log_probs=True)
    results = controller.generate_all_output_tokens_static_batch(made)
    assert [results[n].generated_length for n in (3, 7, 1)] == [5, 9, 0]
    assert len(results[1].prompt_log_probs) == len(invariants.PROMPTS[1]) - 1
    assert results[1].generated_log_probs == []


def test_termination_id_and_stop_words_end_a_static_request(shared: Make) -> None:
    controller = shared(3)
    plain = SamplingParams(num_tokens_to_generate=20, top_k=1)
    expected = controller.generate_all_output_tokens_static_batch(batch(plain))
    tokens = expected[3].generated_tokens.tolist()
    index = next(i for i in range(2, 20) if tokens[i] not in tokens[:i] and i > 2)
    word = f"{tokens[index - 1]} {tokens[index]}"
    for changed, count in (
        ({"termination_id": tokens[index]}, index),
        ({"stop_words": [word]}, index - 1),
        ({"stop_words": [word], "detokenize_stop_sequence": True}, index + 1),
    ):
        params = SamplingParams(num_tokens_to_generate=20, top_k=1, **changed)
        made = OrderedDict({3: request(3, list(invariants.PROMPTS[3]), params)})
        results = controller.generate_all_output_tokens_static_batch(made)
        assert results[3].generated_tokens.tolist() == tokens[:count], changed


def test_skipped_bookkeeping_changes_nothing(shared: Make) -> None:
    controller = shared(3)
    params = SamplingParams(num_tokens_to_generate=12, termination_id=-1, temperature=0.9)
    outputs = []
    for peeks in ((), (0, 1, 3)):
        for each in batch(params).values():
            controller._context.add_request(each)
        outputs.append(run_dynamic(controller, peeks))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("name", "num_targets"), [("dummy_forward", 1), ("_dummy_serial_mtp_forward", 0)]
)
def test_dummy_forward_changes_nothing(
    shared: Make, monkeypatch: pytest.MonkeyPatch, name: str, num_targets: int
) -> None:
    num_drafts = 3
    controller = shared(num_drafts)
    built = controller._context.built
    params = SamplingParams(num_tokens_to_generate=8, top_k=1, termination_id=-1)
    for each in batch(params).values():
        controller._context.add_request(each)
    controller.generate_output_tokens_dynamic_batch()
    before = state_of(controller)
    usable = built.blocks.num_blocks * built.blocks.block_size
    rows = [tensor.clone() for tensor in built.pools.tensors()]
    calls = {"target": 0, "draft": 0}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            calls[name] += 1
            return function(*args, **named)

        return call

    model = built.model
    with monkeypatch.context() as patch:
        forward = type(model).forward_target
        patch.setattr(type(model), "forward_target", counted("target", forward))
        for layer in model.mtp_layers:
            patch.setattr(layer, "forward", counted("draft", layer.forward))
        assert getattr(controller, name)() is None
    assert calls == {"target": num_targets, "draft": num_drafts}
    after = state_of(controller)
    sentinel = built.pieces.manager.sentinel_slot
    for state in (before, after):
        for name, tensor in state["tensors"].items():
            if tensor.dim() and tensor.shape[0] == sentinel + 1:
                state["tensors"][name] = tensor[:sentinel]
    assert_same(after, before)
    for tensor, saved in zip(built.pools.tensors(), rows, strict=True):
        assert torch.equal(tensor[:usable], saved[:usable])
    run_dynamic(controller)


def test_tight_kv_cache_pauses_and_resumes(checkpoint: Path) -> None:
    params = SamplingParams(num_tokens_to_generate=40, termination_id=-1, top_k=1)
    cache = {"tokens_per_block": 8, "max_tokens": 104}
    controller = TextGenerationController.from_checkpoint(
        checkpoint, options_of(3, kv_cache_config=cache), tokenizer=Tokenizer()
    )
    context = controller.inference_wrapped_model.inference_context
    tokens: dict[int, list[int]] = {number: [] for number in invariants.PROMPTS}
    paused, counts, step = [], set(), 0
    try:
        pending = list(batch(params).values())
        while pending or context.has_unfinished_requests():
            if pending and step % 2 == 0:
                context.add_request(pending.pop(0))
            step += 1
            output = controller.generate_output_tokens_dynamic_batch()
            if output["newly_paused_request_ids"] is not None:
                paused += output["newly_paused_request_ids"].tolist()
            counts.add(context.paused_request_count)
            total = context.total_request_count
            assert context.get_active_request_count() == total - context.paused_request_count
            for row, number in enumerate(output["active_request_ids"].tolist()):
                if output["accepted_tokens"] is not None:
                    own = output["accepted_tokens"][row].tolist()
                    tokens[number] += [token for token in own if token >= 0]
                tokens[number].append(int(output["sample"][row]))
        assert paused
        assert counts >= {0, 1}
        expected = controller.generate_all_output_tokens_static_batch(batch(params))
        for number, each in tokens.items():
            assert each == expected[number].generated_tokens.tolist()
    finally:
        controller.shutdown()


def test_first_chunk_of_a_prompt(shared: Make) -> None:
    controller = shared(3)
    params = SamplingParams(num_tokens_to_generate=6, top_k=1, termination_id=-1)
    controller._context.add_request(request(3, list(range(1, 30)), params))
    expected = run_dynamic(controller)
    controller._context.add_request(request(3, list(range(1, 30)), params), prefill_chunk_length=9)
    first = controller.generate_output_tokens_dynamic_batch()
    assert first["active_request_ids"].tolist() == []
    assert first["sample"].shape == (0,)
    assert run_dynamic(controller) == expected


def test_prompt_log_probs_come_with_the_first_token(shared: Make) -> None:
    controller = shared(3)
    params = SamplingParams(num_tokens_to_generate=4, top_k=1, return_log_probs=True)
    controller._context.add_request(request(3, [5, 6, 7, 8], params))
    output = controller.generate_output_tokens_dynamic_batch()
    assert [len(each) for each in output["log_probs"]] == [4]
    expected = controller._context.llm_request_of(3).prompt_logprobs
    own = [expected[i][token].logprob for i, token in ((1, 6), (2, 7), (3, 8))]
    assert output["log_probs"][0][:3] == own
    controller._context.reset()


def test_worked_examples_of_functions_of_tensors(shared: Make) -> None:
    controller = shared(3)
    assert controller._get_mtp_num_heads() == 3
    status = torch.tensor([0, 0, 1])
    indices = controller._get_required_logit_indices(
        status, torch.tensor([3, 3, 2]), 2, 1, torch.device("cpu")
    )
    assert indices.tolist() == [0, 1, 2, 3, 4, 5, 7]
    a, b, c, d, e = ([10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33], [40], [50])
    outputs = [11, 9, 9, 9, 21, 22, 23, 24, 9, 9, 9, 9, 41, 51]
    counts = {"num_decode_requests": 3, "num_prefill_requests": 2, "active_request_count": 5}
    older = {
        "request_in_prefill_status_tensor": torch.tensor([0, 0, 0, 1, 1]),
        "repeats": torch.tensor([4, 4, 4, 1, 1]),
        **counts,
    }
    for given, named in (
        (counts.values(), {}),
        (older.values(), {}),
        ((), counts),
        ((), older),
        ([*older.values()][:2], counts),
    ):
        controller._init_dynamic_sampling_tensors()  # as scripts do before
        controller._init_mtp_sampling_tensor()
        last, mask, read = controller._verify_speculative_tokens(
            torch.tensor(outputs), torch.tensor([a + b + c + d + e]), *given, **named
        )
        assert mask.int().tolist() == [1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1]
        assert last.tolist() == [1, 7, 8, 12, 13]
        assert read.tolist() == a + b + c + d + e
    controller._torch_sampling_buckets = [
        ([0, 2], 1.0, 1, 0.0),
        ([1], 0.5, 1, 0.0),
        ([3, 4], 2.0, 1, 0.0),
    ]
    tokens, repeats = controller._sample_speculative_logits(
        torch.eye(14), torch.tensor([0, 0, 0, 1, 1])
    )
    assert tokens.tolist() == list(range(14))
    assert repeats.tolist() == [4, 4, 4, 1, 1]
    assert controller._sample_from_logits_2d(torch.eye(5)).tolist() == list(range(5))
    assert controller._torch_sampling_func(torch.eye(4), 1.0, 1, 0.0).tolist() == [0, 1, 2, 3]
    controller._torch_sampling_buckets = None
    recorded: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    controller._update_top_n_logprobs_dict(
        torch.tensor([[-0.5, -2.5], [-1.0, -1.5]]),
        torch.tensor([[7, 9], [1, 2]]),
        torch.tensor([True, False]),
        recorded,
    )
    assert recorded == {0: [{"7": -0.5, "9": -2.5}], 1: []}


def test_phases_of_a_step_name_the_public_method(shared: Make) -> None:
    name = "_dynamic_step_forward_logits"
    with pytest.raises(AttributeError, match=f"{name}.*use generate_output_tokens"):
        getattr(shared(3), name)


@pytest.mark.parametrize(
    "name",
    [
        "sample_from_logits",
        "_torch_sampling_func",
        "update_generation_status",
        "prep_inference_input",
        "_dynamic_step_log_probs_bookkeeping",
        "_rewind_kv_cache",
    ],
)
def test_overrides_that_no_step_calls_are_refused(name: str) -> None:
    mixin = type("Mixin", (), {name: lambda *_: None})
    for bases, own in (((), {name: None}), ((mixin,), {})):
        with pytest.raises(ConfigError, match=f"Mine: overrides {name}, which no step calls"):
            type("Mine", (*bases, TextGenerationController), own)
    type("Mine", (TextGenerationController,), {"tokenize_prompt": None, "extra": None})


@pytest.mark.parametrize("name", ["num_speculative_tokens", "num_mtp_depths"])
def test_the_draft_length_cannot_be_changed(shared: Make, name: str) -> None:
    controller = shared(3)
    setattr(controller, name, 3)
    with pytest.raises(ConfigError, match=f"{name}: expected 3, .* got 2; .*'max_draft_len': 2}}"):
        setattr(controller, name, 2)
    for value in ("a", torch.tensor([1, 2])):
        with pytest.raises(ConfigError, match=f"{name}: expected an integer >= 0, got [^;]*$"):
            setattr(controller, name, value)
    assert getattr(controller, name) == 3


class SpecialTokenizer(Tokenizer):
    """Id 0 is a special token."""

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True, **named: Any) -> str:
        kept = [token for token in ids if token or not skip_special_tokens]
        return super().detokenize(kept, **named)


@pytest.mark.parametrize("prompt", ["0 5 0 6", None])
def test_generated_text_begins_after_a_prompt_with_special_tokens(
    shared: Make, monkeypatch: pytest.MonkeyPatch, prompt: str | None
) -> None:
    controller = shared(3)
    monkeypatch.setattr(controller, "tokenizer", SpecialTokenizer())
    made = request(3, [0, 5, 0, 6], greedy())
    made.prompt = prompt
    controller.generate_all_output_tokens_static_batch(OrderedDict({3: made}))
    assert made.text.startswith("5 6 ")
    assert made.generated_text == made.text[len("5 6") :]
    assert made.generated_text.split() == [str(t) for t in made.generated_tokens.tolist() if t]


def test_a_stream_made_outside_of_a_loop_delivers(shared: Make) -> None:
    stream = AsyncStream(3, lambda: None)
    made = OrderedDict({3: request(3, [1, 2, 3], greedy())})
    shared(3).generate_all_output_tokens_static_batch(made, {3: stream})

    async def read() -> list[Any]:
        return [item async for item in stream.generator()]

    found = asyncio.run(asyncio.wait_for(read(), 10))
    assert found[-1].generated_tokens.tolist() == made[3].generated_tokens.tolist()


def test_requests_of_a_batch_are_known_by_their_key(shared: Make) -> None:
    controller = shared(3)
    params = SamplingParams(num_tokens_to_generate=9, temperature=0.9)
    made = OrderedDict((key, request(3, [1, 2, 3], params)) for key in ("a", "\ud800", 3, 4))
    results = controller.generate_all_output_tokens_static_batch(made)
    assert len({tuple(each.generated_tokens.tolist()) for each in results.values()}) == 4
    alone = controller.generate_all_output_tokens_static_batch(
        OrderedDict({"a": request("a", [1, 2, 3], params)})
    )
    assert torch.equal(alone["a"].generated_tokens, results["a"].generated_tokens)


def test_dynamic_requests_are_limited_by_the_maximum_length(shared: Make) -> None:
    controller = shared(3)
    with pytest.warns(UserWarning, match="request 3: num_tokens_to_generate 1000 is limited to 93"):
        add(greedy(num_tokens_to_generate=1000, termination_id=-1))(controller)
    assert len(run_dynamic(controller)[3]) == 93


def test_bookkeeping_needs_a_step_that_skipped_it(shared: Make) -> None:
    controller = shared(3)
    controller._context.add_request(request(3, [1, 2, 3], greedy()))
    asyncio.run(controller.async_generate_output_tokens_dynamic_batch(skip_bookkeeping=True))
    controller._dynamic_step_context_bookkeeping()
    with pytest.raises(ExecutorError, match="expected a step without bookkeeping before it"):
        controller._dynamic_step_context_bookkeeping()
    asyncio.run(controller.async_generate_output_tokens_dynamic_batch(skip_bookkeeping=True))
    controller._context.reset()
    with pytest.raises(ExecutorError, match="expected a step without bookkeeping before it"):
        controller._dynamic_step_context_bookkeeping()


def test_bookkeeping_without_requests_names_add_request(shared: Make) -> None:
    controller = shared(3)
    asyncio.run(controller.async_generate_output_tokens_dynamic_batch(skip_bookkeeping=True))
    with pytest.raises(ExecutorError, match=r"there are no requests: call add_request\(\), then"):
        controller._dynamic_step_context_bookkeeping()


def test_a_stream_whose_loop_was_closed_is_finished() -> None:
    stream = AsyncStream(3, lambda: None)

    async def read() -> Any:
        async for item in stream.generator():
            return item

    stream.put(1)
    assert asyncio.run(read()) == 1
    stream.put(2)
    assert stream.finished
    stream.finish()


def test_a_stream_is_finished_after_its_loop_was_closed() -> None:
    loop = asyncio.new_event_loop()
    stream = AsyncStream(3, lambda: None, loop)
    loop.close()
    stream.finish()
    assert stream.finished


TWO = torch.tensor([1, 0])
WRONG_TYPES = {
    "top_k": TWO,
    "top_p": TWO,
    "return_log_probs": TWO,
    "skip_prompt_log_probs": TWO,
    "return_segments": TWO,
    "num_tokens_to_generate": "4",
    "num_tokens_total": "9",
    "termination_id": [2],
    "top_n_logprobs": "2",
    "stop_words": [5],
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_parameters_of_a_wrong_type_are_refused(shared: Make, name: str) -> None:
    controller, value = shared(3), WRONG_TYPES[name]
    params = SamplingParams(num_tokens_to_generate=4)
    setattr(params, name, value)
    expected = f"request 3: {name}: expected .*, got {re.escape(repr(value))}"
    with pytest.raises(RequestError, match=expected):
        add(params)(controller)
    with pytest.raises(RequestError, match=expected):
        controller.generate_all_output_tokens_static_batch(
            OrderedDict({3: request(3, [1, 2, 3], params)})
        )


def test_segments_need_a_tokenizer_with_offsets(
    shared: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = shared(3)
    plain = SimpleNamespace(detokenize=Tokenizer().detokenize, eod=Tokenizer.eod)
    monkeypatch.setattr(controller, "tokenizer", plain)
    made = OrderedDict({3: request(3, [1, 2, 3], greedy(return_segments=True))})
    with pytest.raises(RequestError, match="request 3: return_segments: expected False, since"):
        controller.generate_all_output_tokens_static_batch(made)
    assert not controller._context.has_unfinished_requests()


def test_stop_words_that_are_one_text_are_refused(shared: Make) -> None:
    made = OrderedDict({3: request(3, [1, 2, 3], greedy(stop_words="5 6"))})
    with pytest.raises(RequestError, match="request 3: stop_words: expected a list of texts, got"):
        shared(3).generate_all_output_tokens_static_batch(made)


def foreign(*dropped: str) -> SimpleNamespace:
    fields = vars(greedy(termination_id=-1))
    return SimpleNamespace(**{name: fields[name] for name in fields if name not in dropped})


def run_static(controller: TextGenerationController, params: Any) -> InferenceRequest:
    made = OrderedDict({3: request(3, [1, 2, 3], params)})
    return controller.generate_all_output_tokens_static_batch(made)[3]


def test_parameters_without_optional_fields_are_accepted(shared: Make) -> None:
    controller = shared(3)
    params = foreign("stop_words", "termination_id", "temperature")
    assert run_static(controller, params).generated_length == 4
    add(params)(controller)
    assert len(run_dynamic(controller)[3]) == 4


def test_missing_parameters_are_listed(shared: Make) -> None:
    controller = shared(3)
    names = ("num_tokens_total", "top_k", "top_p", "top_n_logprobs", "return_log_probs")
    params = foreign(*names, "skip_prompt_log_probs", "return_segments")
    listed = f"without {', '.join(names)}, skip_prompt_log_probs"
    with pytest.raises(RequestError, match=f"request 3: .*{listed}; set them"):
        add(params)(controller)
    with pytest.raises(RequestError, match=f"request 3: .*{listed}, return_segments; set them"):
        run_static(controller, params)
    with pytest.raises(RequestError, match=r"sampling_params: .* without temperature; set them"):
        controller.sample_from_logits(ONE, foreign("temperature"))


def test_a_foreign_request_keeps_its_class(shared: Make) -> None:
    params = SimpleNamespace(**vars(SamplingParams(num_tokens_to_generate=5, top_k=1)))
    fields = {**vars(request(3, [1, 2, 3], params)), "prompt_tokens": torch.tensor([1, 2, 3])}
    foreign = SimpleNamespace(**fields)
    results = shared(3).generate_all_output_tokens_static_batch(OrderedDict({3: foreign}))
    assert results[3] is foreign
    assert foreign.generated_length == 5


def test_a_request_is_serialized(shared: Make) -> None:
    made = OrderedDict({3: request(3, [1, 2, 3], greedy())})
    shared(3).generate_all_output_tokens_static_batch(made)
    values = made[3].serialize()
    assert values["status"] == "COMPLETED"
    assert values["generated_tokens"] == ("tensor", made[3].generated_tokens.tolist())
    again = InferenceRequest.deserialize(values)
    assert again.serialize() == values
    assert again.sampling_params == made[3].sampling_params


@pytest.fixture
def graphed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[TextGenerationController, WatchedGraphs]]]:
    """Controllers whose steps run in graphs, on a CPU in substitutes."""
    made: list[TextGenerationController] = []

    def make(**graphs: Any) -> tuple[TextGenerationController, WatchedGraphs]:
        controller = TextGenerationController.from_checkpoint(
            checkpoint,
            options_of(3, device="auto", attn_backend="triton", cuda_graph_config=graphs),
            tokenizer=Tokenizer(),
            inference_sampling_seed=SEED,
        )
        made.append(controller)
        return controller, WatchedGraphs(controller._context.built, monkeypatch)

    yield make
    for controller in made:
        controller.shutdown()


@pytest.mark.gpu
def test_steps_on_a_gpu_replay_graphs(graphed: Callable[..., Any]) -> None:
    check_replayed_steps(graphed)


def test_steps_replay_graphs(graphed: Callable[..., Any]) -> None:
    check_replayed_steps(graphed)


def check_replayed_steps(graphed: Callable[..., Any]) -> None:
    """Graphs are replayed; skipped bookkeeping and dummies change nothing there either."""
    controller, _ = graphed(enable_padding=True, prompt_tokens=[])
    params = SamplingParams(num_tokens_to_generate=16, termination_id=-1, temperature=0.9)
    outputs = []
    for peeks in ((), (0, 1, 3)):
        for each in batch(params).values():
            controller._context.add_request(each)
        first = controller.generate_output_tokens_dynamic_batch()
        assert first["cuda_graph_request_count"] is None
        controller.dummy_forward()
        second = controller.generate_output_tokens_dynamic_batch()
        assert second["cuda_graph_request_count"] == 4  # of 3 requests, padded
        outputs.append(run_dynamic(controller, peeks))
    assert outputs[0] == outputs[1]
    invariants.check_dynamic(controller, SamplingParams, request)


def test_replayed_prompts_report_the_size_of_their_graph(graphed: Callable[..., Any]) -> None:
    """Also of more prompts than a graph has generations."""
    controller, watched = graphed(
        enable_padding=True, batch_sizes=[1, 2], capture="all", prompt_tokens=[24]
    )
    for each in batch(greedy()).values():
        controller._context.add_request(each)
    output = controller.generate_output_tokens_dynamic_batch()
    (shape,) = watched.replayed
    assert output["cuda_graph_request_count"] == shape.num_contexts + shape.num_generations
    run_dynamic(controller)


def greedy(**changed: Any) -> SamplingParams:
    return SamplingParams(**{"num_tokens_to_generate": 4, "top_k": 1, **changed})


def add(params: Any = None, request_id: Any = 3, prompt: Any = (1, 2, 3), **named: Any) -> Any:
    tokens = list(prompt) if isinstance(prompt, tuple) else prompt
    made = InferenceRequest(
        request_id=request_id,
        prompt="",
        prompt_tokens=tokens,
        sampling_params=greedy() if params is None else params,
    )
    return lambda controller: controller._context.add_request(made, **named)


def twice(controller: TextGenerationController) -> None:
    add()(controller)
    add()(controller)


def static_while_dynamic(controller: TextGenerationController) -> None:
    add()(controller)
    controller.generate_all_output_tokens_static_batch(batch(greedy()))


def wrong_callback(controller: TextGenerationController) -> None:
    controller.set_stop_word_finished_ids_callback(lambda _: "3")  # type: ignore[arg-type]
    try:
        add()(controller)
        controller.generate_output_tokens_dynamic_batch()
    finally:
        controller.set_stop_word_finished_ids_callback(None)


async def step_in_a_loop(controller: TextGenerationController) -> None:
    controller.generate_output_tokens_dynamic_batch()


ONE = torch.zeros(1, 8)
NAN = float("nan")
WRONG_CALLS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "request id in use": (twice, RequestError, "request 3: the id is in use"),
    "request id of another type": (
        add(request_id="3"),
        RequestError,
        "expected a request with an integer request_id",
    ),
    "request id that no tensor holds": (
        add(request_id=2**63),
        RequestError,
        "request_id: expected an integer in .*, got 9223372036854775808",
    ),
    "no prompt tokens": (
        add(prompt=None),
        RequestError,
        "request 3: prompt_tokens: expected a list of token ids, got None; tokenize the prompt",
    ),
    "empty prompt": (add(prompt=()), RequestError, "request 3: the prompt is empty"),
    "token outside the vocabulary": (
        add(prompt=(1, 10**6)),
        RequestError,
        "request 3: prompt ids must be integers in",
    ),
    "parameters of another type": (
        add(params={"top_k": 1}),
        RequestError,
        "request 3: sampling_params: expected SamplingParams, got",
    ),
    "top-k and top-p": (
        add(greedy(top_k=5, top_p=0.5)),
        RequestError,
        "request 3: expected top_k or top_p, got top_k=5 and top_p=0.5",
    ),
    "two lengths": (
        add(greedy(num_tokens_total=9)),
        RequestError,
        "expected num_tokens_to_generate or num_tokens_total, got both",
    ),
    "length of no output token": (
        add(greedy(num_tokens_to_generate=0)),
        RequestError,
        "request 3: num_tokens_to_generate: expected an integer >= 1, got 0",
    ),
    "total length of the prompt": (
        add(greedy(num_tokens_to_generate=None, num_tokens_total=3)),
        RequestError,
        "request 3: num_tokens_total: expected more than the 3 tokens of the prompt, got 3",
    ),
    "several values out of range": (
        add(greedy(num_tokens_to_generate=0, top_k=-2, top_p=1.5, temperature=-1.0)),
        RequestError,
        "request 3: num_tokens_to_generate: .*; top_k: expected an integer >= -1, got -2; "
        "top_p: expected a number from 0 to 1, got 1.5; temperature: expected a number >= 0, got",
    ),
    "top-n without log-probabilities": (
        add(greedy(top_n_logprobs=2)),
        RequestError,
        "top_n_logprobs: expected return_log_probs=True",
    ),
    "too many top-n": (
        add(greedy(top_n_logprobs=500, return_log_probs=True)),
        RequestError,
        "request 3: top_n_logprobs: expected an integer from 0 to 20, got 500",
    ),
    "sampling with top-n of another type": (
        lambda controller: controller.sample_from_logits(ONE, greedy(top_n_logprobs=1.5)),
        RequestError,
        "top_n_logprobs: expected an integer >= 0, got 1.5",
    ),
    "sampling with a flag of two elements": (
        lambda controller: controller.sample_from_logits(
            ONE, SimpleNamespace(**{**vars(greedy(top_n_logprobs=1)), "skip_prompt_log_probs": TWO})
        ),
        RequestError,
        "skip_prompt_log_probs: expected True or False, got tensor",
    ),
    "stop words in a dynamic batch": (
        add(greedy(stop_words=["5"])),
        RequestError,
        "stop_words: expected None in a dynamic batch; .*set_stop_word_finished_ids_callback",
    ),
    "chunk longer than the prompt": (
        add(prefill_chunk_length=4),
        RequestError,
        "prefill_chunk_length: expected 1 to 3, the length of the prompt, got 4",
    ),
    "prompt longer than a sequence, without a length": (
        add(greedy(num_tokens_to_generate=None), prompt=tuple([1] * 200)),
        RequestError,
        "request 3: the prompt has 200 tokens, max_seq_len is 96",
    ),
    "static batch that is a list": (
        lambda controller: controller.generate_all_output_tokens_static_batch([]),
        RequestError,
        "active_requests: expected an OrderedDict of requests by id",
    ),
    "static batch while a dynamic one runs": (
        static_while_dynamic,
        RequestError,
        "static batch: expected no unfinished requests in the inference context, got 1",
    ),
    "static batch with an id of another type": (
        lambda controller: controller.generate_all_output_tokens_static_batch(
            {1.5: request(3, [1, 2], greedy())}
        ),
        RequestError,
        "active_requests: expected ids that are integers or texts, got 1.5",
    ),
    "static request longer than a sequence": (
        lambda controller: controller.generate_all_output_tokens_static_batch(
            {3: request(3, [1, 2], greedy(num_tokens_to_generate=95))}
        ),
        RequestError,
        "request 3: expected at most 94 tokens .* the prompt has 2 and .* is 96, got 95; lower",
    ),
    "stream of no request": (
        lambda controller: controller.generate_all_output_tokens_static_batch(
            batch(greedy()), {99: None}
        ),
        RequestError,
        r"active_streams: no request has the ids \[99\]",
    ),
    "callback that is no function": (
        lambda controller: controller.set_stop_word_finished_ids_callback({3}),
        ConfigError,
        "callback: expected a function of request ids",
    ),
    "callback that returns a text": (
        wrong_callback,
        RequestError,
        "stop-word callback: expected a set of request ids, got '3'",
    ),
    "step in a running loop": (
        lambda controller: asyncio.run(step_in_a_loop(controller)),
        ExecutorError,
        "expected no running event loop; await async_generate_output_tokens_dynamic_batch",
    ),
    "prompt that is no text": (
        lambda controller: controller.tokenize_prompt(controller.tokenizer, [1, 2]),
        RequestError,
        r"prompt: expected text, got \[1, 2\]",
    ),
    "BOS of a tokenizer without one": (
        lambda controller: controller.tokenize_prompt(
            SimpleNamespace(tokenize=lambda _: []), "1", add_BOS=True
        ),
        RequestError,
        "add_BOS: expected a tokenizer with bos",
    ),
    "padding to fewer tokens": (
        lambda controller: controller.pad_input_prompt_tokens([[1, 2, 3]], 1, 2),
        RequestError,
        "expected at most 1 prompts of at most 2 tokens, got 1 of up to 3",
    ),
    "sampling without parameters": (
        lambda controller: controller.sample_from_logits(ONE),
        RequestError,
        "sampling_params: expected SamplingParams, got None",
    ),
    "sampling without logits": (
        lambda controller: controller.sample_from_logits(None, greedy()),
        RequestError,
        r"last_token_logits: expected a tensor \[B, V\], got None",
    ),
    "sampling at temperature NaN": (
        lambda controller: controller.sample_from_logits(ONE, greedy(top_k=0, temperature=NAN)),
        RequestError,
        "temperature: expected a number >= 0, got nan",
    ),
    "a flag of two elements": (
        lambda _: greedy(top_n_logprobs=1, skip_prompt_log_probs=TWO),
        RequestError,
        "skip_prompt_log_probs: expected True or False, got tensor",
    ),
    "sampling with an unknown argument": (
        lambda controller: controller.sample_from_logits(ONE, greedy(), topk=1),
        RequestError,
        "sample_from_logits: unknown arguments topk",
    ),
    "sampling with a large top-k": (
        lambda controller: controller.sample_from_logits(ONE, greedy(top_k=9)),
        RequestError,
        r"top_k: expected 0 \(off\) to 8, the vocabulary, got 9",
    ),
    "sampling at temperature 0": (
        lambda controller: controller.sample_from_logits(ONE, greedy(top_k=0, temperature=0.0)),
        RequestError,
        r"temperature: expected > 0 unless top_k=1 \(greedy\), got 0",
    ),
    "top-n without a dict": (
        lambda controller: controller.sample_from_logits(ONE, greedy(top_n_logprobs=1)),
        RequestError,
        "top_n_logprobs: expected generation_started and top_n_logprobs_dict",
    ),
    "rows without a bucket": (
        lambda controller: controller._sample_from_logits_2d(torch.eye(2)),
        RequestError,
        r"sampling buckets: expected every request in one, \[0, 1\] are in none",
    ),
    "counts that do not add up": (
        lambda controller: controller._verify_speculative_tokens(
            torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64), 1, 0, 2
        ),
        RequestError,
        r"active_request_count: expected 1 \+ 0 requests, got 2",
    ),
    "a count that is missing": (
        lambda controller: controller._verify_speculative_tokens(
            torch.zeros(4), torch.zeros(4), 1, num_decode_requests=1, active_request_count=1
        ),
        RequestError,
        "expected num_decode_requests, .*, got 1 values and the names num_decode_requests, active",
    ),
    "model of Megatron": (
        lambda _: TextGenerationController(
            SimpleNamespace(inference_context=object()),  # type: ignore[arg-type]
            Tokenizer(),
        ),
        ExecutorError,
        r"expected InferenceWrappedModel.from_checkpoint\(path\), got .*install\(\) serves",
    ),
    "tokenizer without methods": (
        lambda controller: TextGenerationController(controller.inference_wrapped_model, "gpt2"),
        ConfigError,
        "tokenizer: expected one with tokenize and detokenize, got 'gpt2'",
    ),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_calls_are_refused(shared: Make, name: str) -> None:
    call, kind, message = WRONG_CALLS[name]
    controller = shared(3)
    with pytest.raises(kind) as caught:
        call(controller)
    assert re.search(message, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": 5}, "config: expected a mapping with the keys of LLMConfig, got 5"),
        ({"inference_sampling_seed": 1.5}, "inference_sampling_seed: expected an integer, got 1.5"),
        ({"config": {"max_batchsize": 4}}, "max_batchsize"),
        ({"config": {"model": "other"}}, "config: expected no model next to the path .*, got 'oth"),
        (
            {"config": {"disable_overlap_scheduler": False}},
            "disable_overlap_scheduler: expected True, .*, got False",
        ),
        ({"config": OPTIONS}, "tokenizer: .* has none; expected one as an argument"),
    ],
)
def test_wrong_models_are_refused(
    checkpoint: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TextGenerationController.from_checkpoint(checkpoint, **arguments)


def test_the_wrapped_model_is_an_argument_too(checkpoint: Path) -> None:
    wrapped = InferenceWrappedModel.from_checkpoint(checkpoint, options_of(0))
    controller = TextGenerationController(wrapped, Tokenizer())
    inputs = controller.prep_inference_input(torch.zeros(2, 3), OrderedDict(), True)
    assert inputs["position_ids"].tolist() == [[0, 1, 2]] * 2
    assert inputs["attention_mask"][0, 0].int().tolist() == [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    assert wrapped.inference_context.is_dynamic_batching()
    controller.shutdown()


def test_a_failed_request_is_finished_as_failed(shared: Make) -> None:
    controller = shared(3)
    params = SamplingParams(num_tokens_to_generate=8, top_k=1, termination_id=-1)
    made = batch(params)
    for each in made.values():
        controller._context.add_request(each)
    controller.generate_output_tokens_dynamic_batch()
    controller._context.llm_request_of(7).fail("no finite logit")
    output = controller.generate_output_tokens_dynamic_batch()
    assert output["finished_request_ids"].tolist() == [7]
    assert sorted(output["active_request_ids"].tolist()) == [1, 3]
    assert made[7].status is Status.FAILED
    run_dynamic(controller)
    assert [made[n].status for n in (1, 3)] == [Status.COMPLETED] * 2


def test_a_failed_step_drops_all_requests(shared: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = shared(3)

    def fail(*_: Any) -> None:
        raise RuntimeError("the device failed")

    controller._context.add_request(request(3, [1, 2, 3], greedy()))
    with monkeypatch.context() as patch:
        patch.setattr(controller._context.built.executor.engine, "forward", fail)
        with pytest.raises(RuntimeError, match="the device failed"):
            controller.generate_output_tokens_dynamic_batch()
    assert not controller._context.has_unfinished_requests()
    controller._context.add_request(request(3, [1, 2, 3], greedy()))
    assert len(run_dynamic(controller)[3]) == 4


def test_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[3]
    page = (root / "mtp_plugin" / "hosts" / "megatron" / "README.md").read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[1]
    exec(example.replace("integration/tiny_model", str(root / "integration" / "tiny_model")), {})
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("[0] [") for line in lines[-3:])
