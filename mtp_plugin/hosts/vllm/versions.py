"""Which vLLM is installed, and which of our modules fits it.

A version is served by the module whose recorded parameter names equal those of the methods found.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from mtp_plugin.errors import HostError

TESTED = ("0.24", "0.26", "0.32")

Signatures = Mapping[str, tuple[str, ...]]
"""``module:Class.method`` or ``module:function`` -> parameter names after ``self``."""

_GPU = "vllm.v1.worker.gpu"
_COMMON: Signatures = {
    "vllm.v1.worker.worker_base:WorkerBase.__init__": (
        "vllm_config",
        "local_rank",
        "rank",
        "distributed_init_method",
        "is_driver_worker",
    ),
    "vllm.v1.engine.input_processor:InputProcessor.__init__": (
        "vllm_config",
        "renderer",
        "mm_registry",
    ),
    "vllm.v1.engine.input_processor:InputProcessor._validate_params": (
        "params",
        "supported_tasks",
    ),
    "vllm.sampling_params:SamplingParams._validate_spec_decode": ("speculative_config",),
    "vllm.v1.core.sched.scheduler:Scheduler.make_spec_decoding_stats": (
        "spec_decoding_stats",
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_invalid_spec_tokens",
        "request_id",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler.add_request": ("request",),
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": (
        "scheduler_output",
        "model_runner_output",
    ),
    "vllm.v1.engine.core:EngineCore.preprocess_add_request": ("request",),
    "vllm.v1.engine.core:EngineCoreProc._handle_request_preproc_error": ("request",),
    "vllm.v1.engine.core:EngineCoreProc._send_error_outputs_to_client": (
        "req_ids",
        "client_index",
    ),
    f"{_GPU}.model_states.interface:ModelState.custom_sampler": ("sampler",),
    f"{_GPU}.sample.sampler:Sampler.apply_staged_writes": (),
    f"{_GPU}.sample.states:SamplingStates.apply_temperature": (
        "logits",
        "expanded_idx_mapping",
        "idx_mapping_np",
    ),
    f"{_GPU}.sample.states:SamplingStates.apply_min_p": (
        "logits",
        "expanded_idx_mapping",
        "idx_mapping_np",
    ),
    f"{_GPU}.sample.states:SamplingStates.apply_top_k_top_p": (
        "logits",
        "expanded_idx_mapping",
        "idx_mapping_np",
    ),
    f"{_GPU}.spec_decode.speculator:DraftModelSpeculator.load_model": ("target_model",),
    f"{_GPU}.states:RequestState.add_request": (
        "req_id",
        "prompt_len",
        "all_token_ids",
        "num_computed_tokens",
        "max_tokens",
    ),
    f"{_GPU}.input_batch:get_num_sampled_and_rejected": (
        "num_sampled",
        "seq_lens",
        "cu_num_logits",
        "idx_mapping",
        "prefill_len",
    ),
}
_ROWS_24 = (
    "logits",
    "expanded_idx_mapping",
    "idx_mapping_np",
    "pos",
    "input_ids",
    "expanded_local_pos",
)
ROWS_32 = (
    "logits",
    "expanded_idx_mapping",
    "idx_mapping",
    "idx_mapping_np",
    "pos",
    "input_ids",
    "expanded_local_pos",
    "seq_lens_upper_bound_np",
)
_AUTOREGRESSIVE = f"{_GPU}.spec_decode.autoregressive.speculator:AutoRegressiveSpeculator"
_DRAFT = ("idx_mapping", "temperature", "seeds", "draft_step", "draft_logits")
SIGNATURES: Mapping[str, Signatures] = {
    "v24": {
        **_COMMON,
        f"{_GPU}.model_runner:GPUModelRunner.load_model": ("load_dummy_weights", "args", "kwargs"),
        f"{_GPU}.sample.sampler:Sampler.add_request": ("req_idx", "prompt_len", "sampling_params"),
        f"{_GPU}.sample.sampler:Sampler.apply_sampling_params": (*_ROWS_24, "skip_top_k_top_p"),
        f"{_GPU}.sample.sampler:Sampler.sample": (*_ROWS_24, "return_logprobs"),
        f"{_GPU}.sample.logit_bias:LogitBiasState.apply_logit_bias": (
            "logits",
            "expanded_idx_mapping",
            "idx_mapping_np",
            "pos",
        ),
        f"{_GPU}.sample.logit_bias:apply_logit_bias": (
            "logits",
            "expanded_idx_mapping",
            "pos",
            "num_allowed_token_ids",
            "allowed_token_ids",
            "num_logit_bias",
            "logit_bias_token_ids",
            "logit_bias",
            "min_lens",
            "num_stop_token_ids",
            "stop_token_ids",
        ),
        f"{_GPU}.spec_decode.rejection_sampler:RejectionSampler.__call__": (
            "logits",
            "input_batch",
            "draft_logits",
        ),
        f"{_GPU}.spec_decode.rejection_sampler:RejectionSampler._get_logprobs_tensors": (
            "input_batch",
            "sampled",
            "num_sampled",
            "logits",
        ),
        f"{_GPU}.spec_decode.speculator:DraftModelSpeculator.sample_draft": (
            "hidden_states",
            "positions",
            *_DRAFT,
        ),
        f"{_GPU}.spec_decode.speculator:DraftModelSpeculator._build_draft_attn_metadata": (
            "num_reqs",
            "num_reqs_padded",
            "num_tokens_padded",
            "num_query_per_req",
            "causal",
        ),
        f"{_AUTOREGRESSIVE}._generate_draft": (
            "num_reqs",
            "num_tokens_padded",
            "attn_metadata",
            "slot_mappings",
            "num_tokens_across_dp",
            "cudagraph_runtime_mode",
        ),
        f"{_AUTOREGRESSIVE}._multi_step_decode": (
            "num_reqs",
            "skip_attn",
            "batch_desc",
            "num_tokens_across_dp",
        ),
    },
    "v32": {
        **_COMMON,
        f"{_GPU}.model_runner:GPUModelRunner.load_model": (
            "load_dummy_weights",
            "args",
            "model",
            "kwargs",
        ),
        f"{_GPU}.sample.sampler:Sampler.add_request": ("req_idx", "sampling_params"),
        f"{_GPU}.sample.logits_processor.interface:LogitsContext": (
            "expanded_idx_mapping",
            "idx_mapping",
            "idx_mapping_np",
            "expanded_local_pos",
            "input_ids",
            "pos",
            "seq_lens_upper_bound_np",
        ),
        f"{_GPU}.sample.sampler:Sampler.sample": (*ROWS_32, "return_logprobs"),
        f"{_GPU}.spec_decode.rejection_sampler:RejectionSampler.__call__": (
            "logits",
            "input_batch",
            "draft_logits",
            "invalid_drafts",
        ),
        f"{_GPU}.spec_decode.rejection_sampler:RejectionSampler._get_logprobs_tensors": (
            "sampled",
            "num_sampled",
            "logits",
            "cu_num_logits",
            "cu_num_logits_np",
            "max_num_logprobs",
        ),
        f"{_GPU}.spec_decode.rejection_sampler:gather_draft_sampled": (
            "input_ids",
            "positions",
            "logits_indices",
            "expanded_idx_mapping",
            "expanded_local_pos",
            "prefill_len",
        ),
        f"{_GPU}.spec_decode.speculator:DraftModelSpeculator.sample_draft": (
            "hidden_states",
            "sample_src_positions",
            *_DRAFT,
            "spec_step_idx",
        ),
        f"{_GPU}.spec_decode.speculator:DraftModelSpeculator.compute_draft_logits": (
            "hidden_states",
            "spec_step_idx",
        ),
    },
}
"""Module of ours -> signatures that it needs."""


def release() -> tuple[int, int]:
    """Return major and minor version of the installed vLLM."""
    import vllm

    numbers = re.match(r"(\d+)\.(\d+)", str(vllm.__version__))
    if numbers is None:
        raise HostError(f"vLLM: expected a version such as 0.32.0, got {vllm.__version__!r}")
    return int(numbers[1]), int(numbers[2])


def is_tested() -> bool:
    """Whether the installed vLLM is one of the tested versions."""
    return "{}.{}".format(*release()) in TESTED


def differences(signatures: Signatures) -> list[str]:
    """Return one line for every method of the installed vLLM that is missing or differs."""
    found = (mismatch(target, names) for target, names in signatures.items())
    return [problem for problem in found if problem is not None]


def mismatch(target: str, names: tuple[str, ...]) -> str | None:
    """Return how a method of the installed vLLM differs from its recorded parameter names."""
    found = parameters(target)
    if found is None:
        return f"{target.replace(':', '.')} is missing"
    if found == names:
        return None
    return (
        f"{target.replace(':', '.')}({', '.join(found)}) was expected to have the parameters "
        f"({', '.join(names)})"
    )


def parameters(target: str) -> tuple[str, ...] | None:
    """Return the parameter names of ``module:name``; None if there is no such function."""
    module, _, path = target.partition(":")
    try:
        found: Any = import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return None
    names = tuple(inspect.signature(found).parameters)
    return names[1:] if "." in path else names


def fitting_module() -> ModuleType:
    """Return our module for the installed vLLM.

    Raises:
        HostError: no module fits; names the methods that differ from the nearest one.
    """
    found = {name: differences(signatures) for name, signatures in SIGNATURES.items()}
    for name, problems in found.items():
        if not problems:
            return import_module(f"mtp_plugin.hosts.vllm.{name}")
    nearest = min(found.values(), key=len)
    major, minor = release()
    raise HostError(
        f"mtp_plugin does not fit vLLM {major}.{minor}: {'; '.join(nearest)}. Supported versions: "
        f"{', '.join(TESTED)}"
    )
