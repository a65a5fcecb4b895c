"""Whose attention a shared model has."""

from __future__ import annotations

import pytest

from mtp_plugin.errors import ConfigError, ExecutorError
from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.hosts.embedded import llm as llm_module
from mtp_plugin.hosts.embedded.attention import SDPA_BACKEND, TRITON_BACKEND
from mtp_plugin.hosts.embedded.models import LoadedModel, load_model
from tests.greedy import greedy_decode
from tests.hosts.embedded.conftest import Harness

PROMPT = [5, 9, 14]


def attention_of(model: LoadedModel) -> str:
    return model.target.config._attn_implementation


@pytest.fixture
def model(harness: Harness) -> LoadedModel:
    """As users load one."""
    return load_model(harness.path)


def make(harness: Harness, model: LoadedModel, **options) -> LLM:
    return LLM({"model": harness.path, **options}, model=model)


def test_a_model_is_restored_after_its_executor(harness: Harness, model: LoadedModel) -> None:
    want = greedy_decode(model.target, PROMPT, 6)
    with make(harness, model) as llm:
        assert attention_of(model) == SDPA_BACKEND
        output = llm.generate([PROMPT], SamplingParams(max_tokens=6, ignore_eos=True))[0]
        assert output.token_ids == want
        with pytest.raises(ExecutorError, match="attends by pages, for an LLM: shut it down"):
            greedy_decode(model.target, PROMPT, 6)
    assert attention_of(model) == "sdpa"
    assert {layer.config._attn_implementation for layer in layers_of(model)} == {"sdpa"}
    assert greedy_decode(model.target, PROMPT, 6) == want
    llm.shutdown()
    assert attention_of(model) == "sdpa"


def layers_of(model: LoadedModel) -> list:
    return [module for module in model.mtp_layers.modules() if hasattr(module, "config")]


def test_the_last_executor_gives_it_back(harness: Harness, model: LoadedModel) -> None:
    model.set_attn_implementation("eager")
    first = make(harness, model)
    second = make(harness, model, attn_backend="triton")
    first.shutdown()
    first.shutdown()
    assert attention_of(model) == TRITON_BACKEND
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    text = second.generate([PROMPT], params)[0].token_ids
    second.shutdown()
    assert attention_of(model) == "eager"
    assert greedy_decode(model.target, PROMPT, 4) == text


def test_one_that_could_not_be_built_keeps_nothing(harness: Harness, model: LoadedModel) -> None:
    with pytest.raises(ConfigError):
        make(harness, model, kv_cache_config={"max_tokens": 1})
    assert attention_of(model) == "sdpa"
    with pytest.raises(ConfigError, match="stop_callback"):
        LLM({"model": harness.path}, model=model, stop_callback=3)
    assert attention_of(model) == "sdpa"


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ("Engine", RuntimeError),
        ("Admission", KeyboardInterrupt),
        ("_set_stop_callback", RuntimeError),
        ("on_progress", RuntimeError),
    ],
)
def test_error_after_the_build_releases_the_attention(
    harness: Harness, model: LoadedModel, monkeypatch, part: str, error: type[BaseException]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error("after the build")

    def report(line: str) -> None:
        if line == "ready" and part == "on_progress":
            fail()

    if part != "on_progress":
        monkeypatch.setattr(llm_module, part, fail)
    with pytest.raises(error, match="after the build"):
        LLM({"model": harness.path}, model=model, on_progress=report, stop_callback=lambda _: [])
    assert attention_of(model) == "sdpa"
