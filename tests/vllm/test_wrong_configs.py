"""Configurations of the real vLLM that the plugin, or vLLM, refuses when an engine starts."""

from __future__ import annotations

from typing import Any

import pytest

from integration.vllm.engine_process import (
    CHECKPOINT,
    COMMON_ENVIRONMENT,
    CPU_ENVIRONMENT,
)

pytest.importorskip("vllm")

from vllm.engine.arg_utils import EngineArgs

from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.vllm.engine_checks import checked_settings
from mtp_plugin.hosts.vllm.versions import release

pytestmark = pytest.mark.skipif(release() < (0, 32), reason="older versions lack some arguments")
MTP = {"method": "mtp", "num_speculative_tokens": 3}
THINKING = {"thinking_begin_token": 1, "thinking_end_token": 2}
PROBS = {"draft_sample_method": "probabilistic"}
SYNTHETIC = {
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.5, 0.4, 0.3],
}
WRONG: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    ("on", {}, {}, "expected a mapping of options ({} for the defaults) or false, got 'on'"),
    ({"verify": "block"}, {}, {}, "additional_config.mtp_plugin.verify: unknown option"),
    ({"kernels": "cuda"}, {}, {}, "kernels: should be 'auto', 'triton' or 'reference'"),
    ({"relaxed_topk": 0}, {}, {}, "relaxed_topk: should be greater than or equal to 1, got 0"),
    (
        {"relaxed_delta": -1.0},
        {},
        {},
        "relaxed_delta: should be greater than or equal to 0, got -1.0",
    ),
    ({"relaxed_topk": 3}, {}, {}, "needs thinking_begin_token and thinking_end_token: set both"),
    ({"thinking_end_token": 2}, {}, {}, "thinking_begin_token and thinking_end_token: set both"),
    ({**THINKING, "thinking_end_token": 1}, {}, {}, "thinking_end_token must differ, both are 1"),
    ({**THINKING, "thinking_end_token": 2048}, {}, {}, "at most 2047, got 2048"),
    ({"verification": "typical"}, {}, {}, "expected one of coupled, rejection, block, got"),
    ({"verification": "rejection"}, {}, {}, "needs speculative_config.draft_sample_method"),
    ({"verification": "block"}, {}, {}, "needs speculative_config.draft_sample_method"),
    (
        {"verification": "rejection"},
        {**PROBS, **SYNTHETIC},
        {},
        "rejection cannot be combined with rejection_sample_method 'synthetic'",
    ),
    ({"draft_vocab": 4096}, {}, {}, "draft_vocab: expected at most the vocabulary of 2048"),
    ({}, {"rejection_sample_method": "block"}, {}, "rejection_sample_method is 'block'"),
    ({}, {"use_local_argmax_reduction": True}, {}, "use_local_argmax_reduction is not supported"),
    ({"verification": "block"}, {"method": "ngram"}, {}, "not kept with speculative_config.method"),
    ({"draft_vocab": 8}, {"method": "ngram"}, {}, "draft_vocab is served with MTP layers alone"),
    ({"tail": {"ngram": 3}}, {}, {}, "tail.ngram: expected fewer than num_speculative_tokens = 3"),
    ({"tail": {"ngram": 1}}, {"method": "ngram"}, {}, "tail follows drafts of MTP layers alone"),
    ({"tail": {"ngram": 1}}, {}, {}, "tail is not supported with several MTP modules"),
    ({"tail": {"ngram": 1}}, {}, {"data_parallel_size": 2}, "tail is not supported with data_par"),
    (
        {"tail": {"ngram": 1}},
        {"num_speculative_tokens_per_batch_size": [[1, 8, 2]]},
        {},
        "tail is not possible with a speculative_config.num_speculative_tokens_per_batch_size of",
    ),
    ({"tail": {"ngram": 1}}, {}, {"max_num_seqs": 1}, "needs max_num_seqs of 2 or more, got 1"),
    (
        {},
        {"method": "ngram", **PROBS},
        {},
        "draft_sample_method 'probabilistic' is not supported with 'ngram'",
    ),
    (
        {},
        {},
        {"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"},
        "return_sampling_mask is not supported: set it to false",
    ),
    ({}, {}, {"enable_trace_replay": True}, "enable_trace_replay is not supported"),
    ({}, {}, {"runner": "pooling"}, "its runner is 'pooling'"),
    (
        {"verification": "block", "draft_vocab": 4096, "relaxed_topk": 2},
        {"use_local_argmax_reduction": True},
        {"runner": "pooling"},
        "additional_config.mtp_plugin is on, but verification: block needs "
        "speculative_config.draft_sample_method 'probabilistic', with which the engine keeps the "
        "probabilities of drafts; relaxed acceptance needs thinking_begin_token and "
        "thinking_end_token: set both; additional_config.mtp_plugin.draft_vocab: expected at most "
        "the vocabulary of 2048, got 4096; the model does not generate text (its runner is "
        "'pooling'); "
        "speculative_config.use_local_argmax_reduction is not supported: set it to false. Change "
        "this, or turn the plugin off by leaving out additional_config.mtp_plugin.",
    ),
    (
        {},
        {"method": "custom_class", "model": "a.B"},
        {},
        "'custom_class', which vLLM's V2 model runner does not have",
    ),
    ({}, {"parallel_drafting": True}, {}, "speculative_config.parallel_drafting is not supported"),
    # by vLLM itself
    ({}, {"use_heterogeneous_vocab": True}, {}, "only works with method='draft_model'"),
]
"""``additional_config.mtp_plugin``, ``speculative_config``, arguments of the engine, and a part of
the message."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (COMMON_ENVIRONMENT | CPU_ENVIRONMENT).items():
        monkeypatch.setenv(name, value)


def config_of(given: Any, speculative: dict[str, Any], engine: dict[str, Any]) -> Any:
    args = EngineArgs(
        model=CHECKPOINT,
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
        additional_config={"mtp_plugin": given},
        speculative_config={**MTP, **speculative},
        **engine,
    )
    return args.create_engine_config()


def test_a_v1_model_runner_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(
        ConfigError, match="unset the environment variable VLLM_USE_V2_MODEL_RUNNER"
    ):
        checked_settings(config_of({}, {}, {}))


@pytest.mark.parametrize(("given", "speculative", "engine", "message"), WRONG)
def test_wrong_configurations_are_refused_by_name(given, speculative, engine, message):
    with pytest.raises((ConfigError, ValueError)) as error:
        checked_settings(config_of(given, speculative, engine))
    assert message in str(error.value)


def test_it_is_served_without_them():
    assert checked_settings(config_of({}, {}, {})).num_drafts == 3
