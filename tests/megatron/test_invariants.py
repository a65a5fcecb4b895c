"""Megatron's own controller passes the checks that ours passes."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mtp_plugin.hosts.megatron import inference_request, sampling_params
from tests.megatron import engine, invariants


@pytest.fixture
def dynamic(model_and_config: tuple[Any, Any]) -> Callable[[int], Any]:
    return lambda num_drafts: engine.make_engine(*model_and_config, num_drafts).controller


@pytest.fixture
def static(model_and_config: tuple[Any, Any]) -> Any:
    from megatron.core.inference.contexts.static_context import StaticInferenceContext
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
        GPTInferenceWrapper,
    )
    from megatron.core.inference.text_generation_controllers import text_generation_controller

    model, _ = model_and_config
    context = StaticInferenceContext(max_batch_size=4, max_sequence_length=128)
    wrapped = GPTInferenceWrapper(model, context)
    return text_generation_controller.TextGenerationController(wrapped, engine.Tokenizer())


def make_params(**options: Any) -> Any:
    from megatron.core.inference.sampling_params import SamplingParams

    return SamplingParams(**options)


def make_request(request_id: int, prompt: list[int], params: Any) -> Any:
    from megatron.core.inference.inference_request import InferenceRequest

    text = " ".join(map(str, prompt))
    return InferenceRequest(
        request_id=request_id, prompt=text, prompt_tokens=prompt, sampling_params=params
    )


def make_dynamic_request(request_id: int, prompt: list[int], params: Any) -> Any:
    from megatron.core.inference.inference_request import DynamicInferenceRequest

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DynamicInferenceRequest(
            request_id=request_id, prompt_tokens=torch.tensor(prompt), sampling_params=params
        )


def test_texts_padding_and_status(dynamic: Callable[[int], Any]) -> None:
    controller = dynamic(2)
    invariants.check_texts(controller)
    invariants.check_padding(controller)
    invariants.check_generation_status(controller)


def test_sampling(dynamic: Callable[[int], Any]) -> None:
    invariants.check_sampling(dynamic(0), make_params)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_dynamic_batch(dynamic: Callable[[int], Any], num_drafts: int) -> None:
    invariants.check_dynamic(dynamic(num_drafts), make_params, make_dynamic_request)
    invariants.check_stop_words(dynamic(num_drafts), make_params, make_dynamic_request)
    invariants.check_skipped_bookkeeping(dynamic(num_drafts), make_params, make_dynamic_request)
    invariants.check_bookkeeping(dynamic(num_drafts), make_params, make_dynamic_request)


def test_static_batch(static: Any) -> None:
    invariants.check_static(static, make_params, make_request)


def test_static_options(static: Any) -> None:
    invariants.check_static_options(static, make_params, make_request)


def test_fields_equal_those_of_megatron(model_and_config: tuple[Any, Any]) -> None:  # noqa: ARG001
    from megatron.core.inference import inference_request as theirs_request
    from megatron.core.inference import sampling_params as theirs_params

    for ours, theirs in (
        (sampling_params.SamplingParams, theirs_params.SamplingParams),
        (inference_request.InferenceRequest, theirs_request.InferenceRequest),
    ):
        found, expected = (
            [(field.name, field.default) for field in dataclasses.fields(kind)]
            for kind in (ours, theirs)
        )
        assert found == expected
    assert {each.name: each.value for each in inference_request.Status} == {
        each.name: each.value for each in theirs_request.Status
    }
    values = {"temperature": 0.5, "top_n_logprobs": 2, "min_length": 4}
    ours, theirs = sampling_params.SamplingParams(), theirs_params.SamplingParams()
    for params in (ours, theirs):
        params.add_attributes(values)
    assert ours.serialize() == theirs.serialize()
    assert sampling_params.SamplingParams.deserialize(ours.serialize()) == ours


def test_streams(static: Any) -> None:
    from megatron.core.inference.async_stream import AsyncStream

    invariants.check_streams(static, make_params, make_request, AsyncStream)
