"""Which SGLang configurations the plugin serves."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib import import_module
from typing import Any

from mtp_plugin.errors import ConfigError, HostError, format_value
from mtp_plugin.hosts.sglang import VARIABLE
from mtp_plugin.hosts.sglang.options import DRAFTERS, read_settings
from mtp_plugin.speculative.rows.options import EngineSettings
from mtp_plugin.speculative.rows.request_options import method_problems
from mtp_plugin.version import __version__

_RANK_SECONDS = 120
_SERVED = "set it to EAGLE, EAGLE3 or NEXTN, or leave it out"
_GEMMA = (
    "SGLang reads NEXTN and EAGLE so with the assistant model of Gemma 4, whose drafts the plugin "
    "does not serve: leave out the options --speculative-..."
)

_WRONG: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "device": (lambda value: value != "cuda", "the plugin runs on CUDA devices: set it to cuda"),
    "sampling_backend": (
        lambda value: value not in (None, "flashinfer", "pytorch"),
        "the plugin takes the place of SGLang's own sampler: set it to flashinfer or pytorch",
    ),
    "is_embedding": (bool, "the model does not generate text: unset it"),
    "dllm_algorithm": (bool, "diffusion models do not sample token by token: leave it out"),
    "rl_on_policy_target": (bool, "it has a sampler of its own: leave it out"),
    "pp_size": (lambda value: value > 1, "it is not supported: set it to 1"),
    "attn_cp_size": (lambda value: value > 1, "it is not supported: set it to 1"),
    "dcp_size": (lambda value: value > 1, "it is not supported: set it to 1"),
    "encoder_only": (bool, "it is not supported: leave it out"),
    "enable_watermark": (bool, "the plugin samples without watermarks: leave it out"),
    "enable_two_batch_overlap": (bool, "it is not supported: leave it out"),
    "enable_pdmux": (bool, "it is not supported: leave it out"),
    "elastic_ep_backend": (
        lambda value: value != "none",
        "the number of ranks must not change: leave it out",
    ),
}
"""Field of ``ServerArgs`` -> whether a value is wrong, and what to change."""
_WRONG_WITH_DRAFTS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "speculative_eagle_topk": (
        lambda value: value != 1,
        "the plugin verifies one sequence of drafts: set it to 1",
    ),
    "speculative_adaptive": (bool, "the number of drafts must not change: leave it out"),
    "speculative_skip_dp_mlp_sync": (bool, "it is not supported: leave it out"),
    "speculative_use_rejection_sampling": (bool, "the plugin verifies drafts: leave it out"),
    "speculative_use_block_verification": (bool, "the plugin verifies drafts: leave it out"),
    "speculative_accept_threshold_single": (
        lambda value: value != 1,
        "it changes the distribution of the output: leave it out (mtp_relaxed_topk and "
        "mtp_relaxed_delta accept more drafts while a request thinks)",
    ),
    "speculative_accept_threshold_acc": (
        lambda value: value != 1,
        "it changes the distribution of the output: leave it out",
    ),
}
_WRONG_IN_SPLIT: Mapping[str, tuple[Callable[[Any], bool], str]] = dict.fromkeys(
    ("enable_multi_layer_eagle", "enable_hisparse", "enable_pd_role_switch"),
    (bool, "it is not supported with --disaggregation-mode: leave it out"),
)
_HICACHE = ("disaggregation_decode_enable_radix_cache", "enable_hierarchical_cache")
"""Both: the engine that decodes restores prompts from the host."""
REFUSED_FIELDS = (*_WRONG, *_WRONG_WITH_DRAFTS, *_WRONG_IN_SPLIT, *_HICACHE)
READ_FIELDS = (*REFUSED_FIELDS, "disaggregation_mode")
"""A version of SGLang that lacks one of them is not served, but for those of `Version.lacks`."""
SIMULATION = "SGLANG_SIMULATE_ACC_LEN"
SIMULATION_MODE = "SGLANG_SIMULATE_ACC_TOKEN_MODE"


def checked_settings(
    server_args: Any, environment: Mapping[str, str] = os.environ
) -> EngineSettings:
    """Return the settings of an engine with the plugin.

    Raises:
        ConfigError: an unknown option, or a configuration that the plugin cannot serve; lists
            every problem and what to change.
    """
    settings = read_settings(server_args, environment)
    problems = problems_of(server_args, settings, environment)
    if problems:
        raise ConfigError(
            f"mtp_plugin is on ({VARIABLE} is set), but {'; '.join(problems)}. Change this, or "
            f"turn the plugin off by unsetting {VARIABLE}."
        )
    return settings


def problems_of(
    server_args: Any, settings: EngineSettings, environment: Mapping[str, str]
) -> list[str]:
    """Return one line for every reason why the plugin cannot serve an engine."""
    problems = _option_problems(settings)
    algorithm = server_args.speculative_algorithm
    fields = [*_WRONG]
    if (server_args.disaggregation_mode or "null") != "null":
        fields += _WRONG_IN_SPLIT
        if server_args.disaggregation_mode == "decode" and all(
            getattr(server_args, name) for name in _HICACHE
        ):
            given = " and ".join(map(_flag, _HICACHE))
            problems.append(f"{given} are set: it is not supported to decode with both")
    if algorithm is not None:
        if algorithm.upper() in DRAFTERS:
            fields += _WRONG_WITH_DRAFTS
            if not settings.num_drafts:
                problems.append("--speculative-num-steps is 0: set it to 1 or more")
            given, width = server_args.speculative_num_draft_tokens, settings.num_drafts + 1
            if given is not None and given != width:
                problems.append(
                    f"--speculative-num-draft-tokens is {given}: set it to {width}, one more than "
                    "--speculative-num-steps"
                )
        else:
            what_to_do = _GEMMA if algorithm.upper() == "FROZEN_KV_MTP" else _SERVED
            problems.append(f"--speculative-algorithm is {format_value(algorithm)}: {what_to_do}")
        mode = environment.get(SIMULATION_MODE, "fixed")
        if _is_positive(environment.get(SIMULATION, "")) and mode == "fixed":
            problems.append(
                f"{SIMULATION} replaces every token by one id: also set "
                f"{SIMULATION_MODE}=real-draft-token, or unset it"
            )
    return problems + field_problems({name: getattr(server_args, name, None) for name in fields})


def field_problems(given: Mapping[str, Any]) -> list[str]:
    """Return one line for every value of a field of ``ServerArgs`` that the plugin refuses."""
    problems = []
    tables = {**_WRONG, **_WRONG_WITH_DRAFTS, **_WRONG_IN_SPLIT}
    for name, (is_wrong, what_to_do) in tables.items():
        value = given.get(name)
        if value is not None and is_wrong(value):
            problems.append(f"{_flag(name)} is {format_value(value)}: {what_to_do}")
    return problems


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _option_problems(settings: EngineSettings) -> list[str]:
    options = settings.options
    problems = method_problems("verification", options.verification, settings)
    begin, end = options.thinking_begin_token, options.thinking_end_token
    if not options.is_relaxed and (
        (begin, end) != (None, None) or options.relaxed_topk > 1 or options.relaxed_delta > 0
    ):
        problems.append(
            "relaxed acceptance needs thinking_begin_token and thinking_end_token: set both"
        )
    elif begin is not None and begin == end:
        problems.append(
            f"thinking_begin_token and thinking_end_token must differ, both are {begin}"
        )
    return problems


def _is_positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def fingerprint(settings: EngineSettings, seed: int) -> str:
    """Return a hash of everything that must be equal on all ranks."""
    return hashlib.sha256(f"{__version__} {settings!r} {seed}".encode()).hexdigest()


def expect_equal_ranks(group: Any, settings: EngineSettings, seed: int) -> None:
    """Compare the options of all ranks of tensor parallelism, which may be on other nodes.

    Args:
        group: SGLang's ``GroupCoordinator``.
        seed: of requests without a seed.

    Raises:
        HostError: a rank has other options or another seed, or runs without the plugin; names it.
    """
    if group.world_size == 1:
        return
    store = import_module("torch.distributed.distributed_c10d")._get_default_store()
    own = fingerprint(settings, seed)
    store.set(f"mtp_plugin/{group.rank}", own)
    for rank in group.ranks:
        key = f"mtp_plugin/{rank}"
        try:
            store.wait([key], timedelta(seconds=_RANK_SECONDS))
        except RuntimeError:
            raise HostError(
                f"mtp_plugin is on in rank {group.rank}, but not in rank {rank}: install the "
                f"package and set {VARIABLE} on every node"
            ) from None
        if store.get(key).decode() != own:
            raise HostError(
                f"mtp_plugin has other options, or another seed, in rank {rank} than in rank "
                f"{group.rank}: give {VARIABLE} and --random-seed the same value, and install one "
                "version, on every node"
            )
