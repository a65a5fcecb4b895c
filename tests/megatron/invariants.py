"""Checks of a text generation controller through its public methods.

They run with Megatron's own class and with ours, so they use only what both have.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

OUTPUT_KEYS = {
    "active_request_ids",
    "finished_request_ids",
    "sample",
    "accepted_tokens",
    "log_probs",
    "top_n_logprobs",
    "cuda_graph_request_count",
}
PROMPTS = {3: [5, 9, 12, 44], 7: [7] * 11, 1: [3, 1, 4, 1, 5, 9]}
MakeRequest = Callable[..., Any]
"""(request_id, prompt tokens, sampling parameters) -> request"""


def check_texts(controller: Any) -> None:
    tokenizer = controller.tokenizer
    plain = controller.tokenize_prompt(tokenizer, "5 6 7")
    assert plain == [5, 6, 7]
    assert controller.tokenize_prompt(tokenizer, "5 6", add_BOS=True) == [tokenizer.bos, 5, 6]
    twice = f"{tokenizer.bos} {tokenizer.bos} 5"
    assert controller.tokenize_prompt(tokenizer, twice) == [5]
    ended = [5, 6, tokenizer.eod, tokenizer.eod]
    assert controller.detokenize(tokenizer, ended) == "5 6"
    kept = controller.detokenize(tokenizer, ended, remove_EOD=False)
    assert kept == f"5 6 {tokenizer.eod} {tokenizer.eod}"
    tokens = torch.tensor([5, 16, 7])
    assert controller.detokenize_generations(tokens, torch.tensor([3]), False) == ("5 16 7", None)
    text, segments = controller.detokenize_generations(tokens, torch.tensor([3]), True)
    assert (text, segments) == ("5 16 7", [["5 ", "16 ", "7"]])


def check_padding(controller: Any) -> None:
    eod = controller.tokenizer.eod
    padded = controller.pad_input_prompt_tokens([[5], [6, 7, 8]], 3, 4)
    assert padded.tolist() == [[5, eod, eod, eod], [6, 7, 8, eod], [eod] * 4]
    assert controller.unpad_input_prompt_tokens(padded, 2).tolist() == padded[:2].tolist()


def check_generation_status(controller: Any) -> None:
    eod = controller.tokenizer.eod
    tokens = torch.tensor([[5, eod, 9], [5, 6, 9], [5, eod, 9], [5, 6, eod]])
    started = torch.tensor([True, True, False, True])
    done = torch.tensor([False, False, False, True])
    lengths = torch.tensor([4, 4, 0, 2])
    done, lengths = controller.update_generation_status(tokens, started, 1, done, lengths)
    assert done.tolist() == [True, False, False, True]
    assert lengths.tolist() == [4, 5, 0, 2]
    assert lengths.dtype == torch.int32
    done, _ = controller.update_generation_status(
        tokens, started, 2, torch.zeros(4, dtype=torch.bool), lengths, termination_id=9
    )
    assert done.tolist() == [True, True, False, False]


def check_sampling(controller: Any, make_params: Callable[..., Any]) -> None:
    logits = torch.randn(400, 16, generator=torch.Generator().manual_seed(1))[:1].repeat(400, 1)
    ranked = logits[0].argsort(descending=True).tolist()

    def sampled(**options: Any) -> set[int]:
        tokens = controller.sample_from_logits(logits.clone(), make_params(**options), 16)
        assert tokens.shape == (400,)
        assert tokens.dtype == torch.int64
        return set(tokens.tolist())

    assert sampled(top_k=1) == {ranked[0]}
    assert sampled(top_k=3) == set(ranked[:3])
    assert len(sampled()) > 8  # default parameters sample from the whole distribution
    cumulative = logits[0].softmax(-1).sort(descending=True).values.cumsum(-1)
    kept = int((cumulative < 0.5).sum()) + 1
    assert sampled(top_p=0.5) == set(ranked[:kept])
    with pytest.raises((AssertionError, ValueError)):
        sampled(top_p=0.5, top_k=2)
    recorded: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    params = make_params(top_k=1, top_n_logprobs=2, skip_prompt_log_probs=True)
    controller.sample_from_logits(logits[:2], params, 16, torch.tensor([True, False]), recorded)
    assert list(recorded[0][0]) == [str(token) for token in ranked[:2]]
    assert recorded[1] == []
    assert recorded[0][0][str(ranked[0])] == pytest.approx(float(logits[0].log_softmax(-1).max()))


def check_static(
    controller: Any, make_params: Callable[..., Any], make_request: MakeRequest
) -> dict[int, list[int]]:
    """Return the greedy tokens."""
    count = 9
    params = make_params(
        num_tokens_to_generate=count,
        top_k=1,
        return_log_probs=True,
        top_n_logprobs=2,
        return_segments=True,
    )
    requests = OrderedDict(
        (request_id, make_request(request_id, list(prompt), params))
        for request_id, prompt in PROMPTS.items()
    )
    results = controller.generate_all_output_tokens_static_batch(requests)
    assert list(results) == list(PROMPTS)
    for request_id, prompt in PROMPTS.items():
        request = results[request_id]
        assert request is requests[request_id]
        assert request.status.name == "COMPLETED"
        assert request.prompt_tokens == prompt
        length = request.generated_length
        assert request.generated_tokens.shape == (length,)
        assert 0 <= length <= count
        assert controller.tokenizer.eod not in request.generated_tokens.tolist()
        assert request.generated_sequence_lengths.dtype == torch.int32
        assert len(request.generated_sequence_lengths) == len(PROMPTS)
        assert len(request.tpot) == length
        assert len(request.prompt_log_probs) == len(prompt) - 1
        assert len(request.generated_log_probs) == length
        assert all(value <= 0 for value in request.generated_log_probs)
        assert len(request.prompt_top_n_logprobs) == len(prompt) - 1
        for token, value, top in zip(
            request.generated_tokens.tolist(),
            request.generated_log_probs,
            request.generated_top_n_logprobs,
            strict=True,
        ):
            assert len(top) == 2
            assert top[str(token)] == pytest.approx(value, abs=1e-4)
        words = " ".join(map(str, [*prompt, *request.generated_tokens.tolist()]))
        assert request.text == words
        assert "".join(request.segments) == words
        assert request.generated_text == words[len(request.prompt) :]
    return {number: request.generated_tokens.tolist() for number, request in results.items()}


def check_static_options(
    controller: Any, make_params: Callable[..., Any], make_request: MakeRequest
) -> None:
    """Ids that are texts, log-probabilities without top-n of the prompt, and too many tokens."""
    params = make_params(
        num_tokens_to_generate=4,
        top_k=1,
        return_log_probs=True,
        top_n_logprobs=2,
        skip_prompt_log_probs=True,
    )
    requests = OrderedDict(
        (str(n), make_request(str(n), list(p), params)) for n, p in PROMPTS.items()
    )
    results = controller.generate_all_output_tokens_static_batch(requests)
    assert list(results) == list(requests)
    for number, prompt in PROMPTS.items():
        request = results[str(number)]
        assert len(request.prompt_log_probs) == len(prompt) - 1
        assert request.prompt_top_n_logprobs is None
        assert len(request.generated_top_n_logprobs) == request.generated_length
    params = make_params(num_tokens_to_generate=1000, top_k=1)
    with pytest.raises(Exception, match=r"(?i)maximum (allowed )?sequence length"):
        controller.generate_all_output_tokens_static_batch(
            OrderedDict({3: make_request(3, [5, 6], params)})
        )


def check_streams(
    controller: Any,
    make_params: Callable[..., Any],
    make_request: MakeRequest,
    make_stream: Callable[..., Any],
) -> None:
    async def read(streamed: Any) -> list[Any]:
        params = make_params(num_tokens_to_generate=6, top_k=1, return_log_probs=True)
        requests = OrderedDict((n, make_request(n, [8, 5], params)) for n in ("a", 8))
        stream = make_stream(streamed, lambda *_: None)
        controller.generate_all_output_tokens_static_batch(requests, {streamed: stream})
        assert stream.finished
        found = [item async for item in stream.generator()]
        assert found[-1].generated_tokens.tolist() == requests[8].generated_tokens.tolist()
        return found

    for streamed in ("a", 8):
        found = asyncio.run(read(streamed))
        lengths = [item.generated_length for item in found]
        assert lengths == sorted(set(lengths))
        for item in found:
            length = item.generated_length
            assert item.request_id == streamed
            assert len(item.generated_tokens) == len(item.generated_log_probs) == length


def check_dynamic(
    controller: Any,
    make_params: Callable[..., Any],
    make_request: MakeRequest,
    arrivals: dict[int, int] | None = None,
) -> dict[int, list[int]]:
    """Return the greedy tokens of a dynamic batch; request ids -> step of arrival."""
    context = controller.inference_wrapped_model.inference_context
    drafts, count = controller.num_speculative_tokens, 12
    assert controller.generate_output_tokens_dynamic_batch() is None
    assert not context.has_unfinished_requests()
    arrivals = arrivals or {3: 0, 7: 0, 1: 2}
    params = {
        number: make_params(
            num_tokens_to_generate=count,
            top_k=1,
            termination_id=-1,
            return_log_probs=True,
            skip_prompt_log_probs=True,
            top_n_logprobs=2,
        )
        for number in PROMPTS
    }
    tokens: dict[int, list[int]] = {number: [] for number in PROMPTS}
    finished: list[int] = []
    step = 0
    while context.has_unfinished_requests() or step <= max(arrivals.values()):
        for number, prompt in PROMPTS.items():
            if arrivals[number] == step:
                context.add_request(make_request(number, list(prompt), params[number]))
        step += 1
        output = controller.generate_output_tokens_dynamic_batch()
        assert output.keys() >= OUTPUT_KEYS
        active = output["active_request_ids"].tolist()
        assert output["active_request_ids"].dtype == output["sample"].dtype == torch.int64
        assert output["sample"].shape == (len(active),)
        assert output["sample"].device.type == "cpu"
        assert len(set(active)) == len(active) <= len(PROMPTS)
        assert set(output["finished_request_ids"].tolist()) <= set(active)
        # Megatron leaves it out of a step that finishes all requests
        paused = output.get("newly_paused_request_ids")
        assert paused is None or not paused.numel()
        replayed = output["cuda_graph_request_count"]
        assert replayed is None or replayed >= len(active)
        accepted = output["accepted_tokens"]
        if drafts == 0:
            assert accepted is None
        assert len(output["log_probs"]) == len(active)
        for row, number in enumerate(active):
            own = []
            if accepted is not None:
                assert accepted.shape == (context.max_requests, drafts)
                own = [token for token in accepted[row].tolist() if token >= 0]
                assert accepted[row].tolist() == own + [-1] * (drafts - len(own))
            own.append(int(output["sample"][row]))
            assert len(output["log_probs"][row]) == len(own)
            top = output["top_n_logprobs"][row]
            assert len(top) == len(own)
            for token, value, (values, ids) in zip(own, output["log_probs"][row], top, strict=True):
                assert values.shape == ids.shape == (2,)
                assert int(ids[0]) == token
                assert float(values[0]) == pytest.approx(value, abs=1e-4)
            tokens[number] += own
        if accepted is not None:
            assert bool((accepted[len(active) :] == -1).all())
        finished += output["finished_request_ids"].tolist()
    assert sorted(finished) == sorted(PROMPTS)
    assert controller.generate_output_tokens_dynamic_batch() is None
    # a step may accept more drafts than a request needs
    assert all(count <= len(each) <= count + drafts for each in tokens.values())
    return {number: each[:count] for number, each in tokens.items()}


def check_stop_words(
    controller: Any, make_params: Callable[..., Any], make_request: MakeRequest
) -> None:
    context = controller.inference_wrapped_model.inference_context
    calls = []

    def callback(active: list[int]) -> set[int]:
        calls.append(active)
        return {7} if len(calls) == 2 else set()

    controller.set_stop_word_finished_ids_callback(callback)
    params = make_params(num_tokens_to_generate=20, top_k=1, termination_id=-1)
    for number in (3, 7):
        context.add_request(make_request(number, list(PROMPTS[number]), params))
    first = controller.generate_output_tokens_dynamic_batch()
    assert first["finished_request_ids"].tolist() == []
    second = controller.generate_output_tokens_dynamic_batch()
    assert second["finished_request_ids"].tolist() == [7]
    assert sorted(second["active_request_ids"].tolist()) == [3, 7]
    third = controller.generate_output_tokens_dynamic_batch()
    assert third["active_request_ids"].tolist() == [3]
    assert [sorted(call) for call in calls] == [[3, 7], [3, 7], [3]]
    controller.set_stop_word_finished_ids_callback(None)
    context.reset()
    assert not context.has_unfinished_requests()


def check_skipped_bookkeeping(
    controller: Any, make_params: Callable[..., Any], make_request: MakeRequest
) -> None:
    context = controller.inference_wrapped_model.inference_context
    params = make_params(num_tokens_to_generate=20, top_k=1, termination_id=-1)
    context.add_request(make_request(3, list(PROMPTS[3]), params))
    result = asyncio.run(
        controller.async_generate_output_tokens_dynamic_batch(skip_bookkeeping=True)
    )
    assert not result.primer_only
    assert bool(result.decode_only) is False
    assert result.output.keys() >= {"sample", "accepted_tokens", "log_probs"}
    assert not {"active_request_ids", "finished_request_ids"} & result.output.keys()
    assert context.has_unfinished_requests()
    context.reset()


def check_bookkeeping(
    controller: Any, make_params: Callable[..., Any], make_request: MakeRequest
) -> None:
    """A step that skips its bookkeeping, followed by the bookkeeping, is a normal step."""
    context = controller.inference_wrapped_model.inference_context
    options = {"num_tokens_to_generate": 12, "top_k": 1, "termination_id": -1}
    first = make_params(return_log_probs=True, skip_prompt_log_probs=True, **options)
    outputs: list[list[Any]] = []
    for skips in (False, True):
        for number, params in ((3, first), (7, make_params(**options))):
            context.add_request(make_request(number, list(PROMPTS[number]), params))
        steps, unfinished = [], {3, 7}
        while context.has_unfinished_requests():
            if skips:
                step = controller.async_generate_output_tokens_dynamic_batch(skip_bookkeeping=True)
                skipped = asyncio.run(step).output["sample"].tolist()
                scored, _ = controller._dynamic_step_log_probs_bookkeeping()
                assert scored == (3 in unfinished)
                assert controller._router_record_bookkeeping() is None
                output = controller._dynamic_step_context_bookkeeping()
                assert output["sample"].tolist() == skipped
            else:
                output = controller.generate_output_tokens_dynamic_batch()
            unfinished -= set(output["finished_request_ids"].tolist())
            steps.append((output["active_request_ids"].tolist(), output["sample"].tolist()))
        outputs.append(steps)
    assert outputs[0] == outputs[1]
    assert controller._run_dummy_serial_mtp_forward() is None
