"""Which vLLM configurations the plugin serves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mtp_plugin.checkpoint.families import FAMILIES
from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.vllm.options import (
    DRAFTERS,
    KEY,
    VllmOptions,
    VllmSettings,
    draft_ids_of,
    read_settings,
)
from mtp_plugin.hosts.vllm.scheduled_draft_len import length_problems
from mtp_plugin.hosts.vllm.versions import release, untested, where_tested
from mtp_plugin.speculative.rows.request_options import load_problem, method_problems
from mtp_plugin.verifications import codes, custom_codes

MAPPED = ("eagle3", "dflash", "dspark")
"""Drafters whose checkpoints may have a map of draft ids (``d2t``)."""
OWN_SAMPLING = ("LiLiCorr", "XPress")
"""In the architecture of a DFlash model that chooses drafts by a head of its own, and was not
tried. DFlash2 has such a head too: vLLM's kernel chooses its drafts."""
NOT_IN_V2 = ("suffix", "custom_class")
DRAFT_IDS_VARIABLE = "VLLM_MTP_DRAFT_VOCAB"
"""A draft vocabulary in branches of vLLM and images of others, as ``draft_token_map``."""


def checked_settings(vllm_config: Any) -> VllmSettings | None:
    """Return the settings of an engine; None if the plugin is off.

    Raises:
        ConfigError: an unknown option, or a configuration that the plugin cannot serve; lists
            every problem and what to change.
    """
    settings = read_settings(vllm_config)
    if settings is None:
        return None
    problems = problems_of(vllm_config, settings)
    if problems:
        raise ConfigError(
            "additional_config.mtp_plugin is on, but "
            + "; ".join(problems)
            + ". Change this, or turn the plugin off by leaving out additional_config.mtp_plugin."
        )
    found = draft_ids_of(vllm_config, settings.options)
    if found is None:
        return settings
    ranks = vllm_config.parallel_config.tensor_parallel_size
    return replace(settings, draft_ids=found[0], num_added_ids=found[1], num_ranks=ranks)


def start_warnings() -> list[str]:
    """Return what to log once when an engine starts."""
    warnings = []
    if where_tested() is None:
        warnings.append(untested("{}.{}".format(*release())))
    from vllm.platforms import current_platform

    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        warnings.append(
            f"the platform {current_platform.device_name!r} was not tested (tested: cuda, cpu)"
        )
    for name in custom_codes():
        problem = load_problem(name)
        if problem is not None:
            warnings.append(f"verification method {name!r} is left out: {problem}")
    return warnings


def problems_of(
    vllm_config: Any, settings: VllmSettings, environment: Mapping[str, str] = os.environ
) -> list[str]:
    """Return one line for every reason why the plugin cannot serve an engine."""
    options = settings.options
    problems = _option_problems(options, settings) + _thinking_problems(options, vllm_config)
    problems += _draft_vocab_problems(options, vllm_config)
    problems += _tail_problems(options, vllm_config)
    if not vllm_config.use_v2_model_runner:
        problems.append(
            "the engine uses the V1 model runner: unset the environment variable "
            "VLLM_USE_V2_MODEL_RUNNER if it is 0; else vLLM's log says what the V2 runner lacks"
        )
    problems += _model_problems(vllm_config)
    spec = vllm_config.speculative_config
    if spec is not None:
        problems += _speculative_problems(vllm_config, spec, environment)
        problems += length_problems(vllm_config, options)
    elif options.draft_len is not None:
        problems.append(
            "draft_len chooses the number of drafts, and there is no speculative_config: leave it "
            "out"
        )
    return problems


def _option_problems(options: VllmOptions, settings: VllmSettings) -> list[str]:
    problems = method_problems("verification", options.verification, settings)
    tokens = (options.thinking_begin_token, options.thinking_end_token)
    if not options.is_relaxed and (
        tokens != (None, None) or options.relaxed_topk > 1 or options.relaxed_delta > 0
    ):
        problems.append(
            "relaxed acceptance needs thinking_begin_token and thinking_end_token: set both"
        )
    return problems


def _draft_vocab_problems(options: VllmOptions, vllm_config: Any) -> list[str]:
    spec = vllm_config.speculative_config
    if options.draft_vocab is None:
        return []
    problems = _mtp_problems("draft_vocab is served with", spec)
    if problems:
        return problems
    try:
        draft_ids_of(vllm_config, options)
    except ConfigError as error:
        problems.append(str(error))
    if getattr(spec, "draft_lm_head_quantization", None):
        problems.append(
            "draft_vocab is not supported with speculative_config.draft_lm_head_quantization: "
            "leave out one of them"
        )
    return problems


def _mtp_problems(what: str, spec: Any) -> list[str]:
    if spec is not None and spec.method == "mtp":
        return []
    given = "there is no speculative_config" if spec is None else f"method is {spec.method!r}"
    return [f"{what} MTP layers alone, and {given}: leave it out"]


def _tail_problems(options: VllmOptions, vllm_config: Any) -> list[str]:
    if options.tail is None:
        return []
    spec = vllm_config.speculative_config
    problems = _mtp_problems("tail follows drafts of", spec)
    if problems:
        return problems
    num_drafts = spec.num_speculative_tokens
    if options.tail.ngram >= num_drafts:
        problems.append(
            f"tail.ngram: expected fewer than num_speculative_tokens = {num_drafts}, got "
            f"{options.tail.ngram}: the MTP layers make the drafts before the tail"
        )
    if getattr(spec, "use_multi_module_mtp", bool)():
        problems.append(
            "tail is not supported with several MTP modules, which vLLM always runs all: leave it "
            "out"
        )
    return problems


def _thinking_problems(options: VllmOptions, vllm_config: Any) -> list[str]:
    problems = []
    begin, end = options.thinking_begin_token, options.thinking_end_token
    if begin is not None and begin == end:
        problems.append(
            f"thinking_begin_token and thinking_end_token must differ, both are {begin}"
        )
    largest = vllm_config.model_config.get_vocab_size() - 1
    for name, token in (("thinking_begin_token", begin), ("thinking_end_token", end)):
        if token is not None and token > largest:
            problems.append(
                f"{name}: expected a token id of the model, at most {largest}, got {token}"
            )
    return problems


def _model_problems(vllm_config: Any) -> list[str]:
    problems = []
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if getattr(model, "runner_type", "generate") != "generate":
        problems.append(f"the model does not generate text (its runner is {model.runner_type!r})")
    if getattr(model, "is_diffusion", False):
        problems.append("the model is a diffusion model, which does not sample token by token")
    if getattr(model, "return_sampling_mask", False):
        problems.append("return_sampling_mask is not supported: set it to false")
    if getattr(model, "enable_trace_replay", False):
        problems.append("enable_trace_replay is not supported: set it to false")
    if getattr(vllm_config, "watermark_config", None) is not None:
        problems.append("watermarking is not supported: leave out watermark_config")
    if getattr(parallel, "enable_batch_sharded_sampling", False):
        problems.append("enable_batch_sharded_sampling is not supported: set it to false")
    return problems


def _speculative_problems(vllm_config: Any, spec: Any, environment: Mapping[str, str]) -> list[str]:
    problems = _drafter_problems(vllm_config, spec)
    for name, is_set in (
        ("speculative_config.draft_token_map", getattr(spec, "draft_token_map", None)),
        (f"the environment variable {DRAFT_IDS_VARIABLE}", environment.get(DRAFT_IDS_VARIABLE)),
    ):
        if is_set:  # vLLM maps the ids in its sampling of drafts, which the plugin replaces
            problems.append(
                f"{name} is not supported: leave it out; additional_config.{KEY}.draft_vocab takes "
                "the same ids"
            )
    method = getattr(spec, "rejection_sample_method", "standard")
    if method not in ("standard", "synthetic"):
        instead = "the plugin verifies drafts itself"
        if method in codes() and DRAFTERS.get(spec.method, False):
            instead = (
                f'and set "verification": "{method}" in additional_config.mtp_plugin, which needs '
                '"draft_sample_method": "probabilistic" in speculative_config'
            )
        problems.append(
            f"speculative_config.rejection_sample_method is {method!r}: leave it out, {instead}"
        )
    for name in (
        "use_local_argmax_reduction",
        "enable_adaptive_verification",
        "use_heterogeneous_vocab",
        "parallel_drafting",
    ):
        # vLLM sets parallel_drafting for DFlash and DSpark
        is_own = name == "parallel_drafting" and spec.method in ("dflash", "dspark")
        if getattr(spec, name, False) and not is_own:
            problems.append(f"speculative_config.{name} is not supported: set it to false")
    return problems


def _has_mtp_layers(config: Any) -> bool:
    family = FAMILIES.get(str(getattr(config, "model_type", None)))
    if family is None:
        return False
    given = (getattr(config, key, None) for key in family.keys)
    return bool(next((n for n in given if n is not None), family.default_count))


def _drafter_problems(vllm_config: Any, spec: Any) -> list[str]:
    method = spec.method
    if method not in DRAFTERS:
        why = "" if method not in NOT_IN_V2 else ", which vLLM's V2 model runner does not have"
        model = vllm_config.model_config
        has_mtp = any(map(_has_mtp_layers, (model.hf_config, model.hf_text_config)))
        served = [name for name in DRAFTERS if has_mtp or name != "mtp"]
        expected = ", ".join(map(repr, served))
        return [
            f"the speculative method is {method!r}{why}: set speculative_config.method to "
            f"{expected}, or leave out speculative_config"
        ]
    problems = []
    if not DRAFTERS[method] and getattr(spec, "draft_sample_method", "") == "probabilistic":
        problems.append(
            "speculative_config.draft_sample_method 'probabilistic' is not supported with "
            f"{method!r}, whose draft probabilities are not kept: leave it out"
        )
    if method == "mtp" or method.startswith("ngram"):
        return problems
    draft, target = spec.draft_model_config, vllm_config.model_config.get_vocab_size()
    sizes = {draft.get_vocab_size()}
    if method not in MAPPED:
        sizes.add(getattr(draft.hf_config, "draft_vocab_size", None) or target)
    for size in sizes - {target}:
        problems.append(
            f"the draft model has a vocabulary of {size} ids without a map to the model's "
            f"{target}: use a draft model of the same vocabulary"
        )
    own = [name for name in draft.architectures if any(part in name for part in OWN_SAMPLING)]
    if own:
        problems.append(
            f"the draft model {own[0]} chooses drafts by a head of its own: use another draft "
            "model, or leave out speculative_config"
        )
    return problems
