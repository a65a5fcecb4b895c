"""Which SGLang is installed, and whether the plugin fits it.

`SIGNATURES` and `NAMES` list all that the plugin uses of SGLang. They are compared with what is
imported here, and with wheels by ``python -m integration.sglang.signatures``.
Further parameters may follow: :mod:`mtp_plugin.speculative.host.signatures`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mtp_plugin.errors import HostError
from mtp_plugin.hosts.sglang.engine_checks import READ_FIELDS
from mtp_plugin.speculative.host.signatures import INSTALLED, Reader, differences, read_table


@dataclass(frozen=True)
class Version:
    """What differs between the versions of SGLang that are served.

    Args:
        slot: where a ``Req`` has its slot.
        has_raw_arguments: fields of ``ServerArgs`` are the user's, before SGLang resolves them.
        samples_pairs: ``Sampler._sample_from_probs`` returns tokens and what it captured.
        has_rank_state: a ``Scheduler`` has its ranks in ``ps``, else SGLang's context has them.
        counts_tokens: ``update_spec_metrics`` gets the tokens of a step, which are counted already.
        lacks: names of `NAMES` that it does not have, after the last part of their target.
    """

    slot: str
    has_raw_arguments: bool
    samples_pairs: bool
    has_rank_state: bool
    counts_tokens: bool
    lacks: tuple[str, ...]


SERVED: Mapping[str, Version] = {
    "0.5.17": Version(
        slot="req_pool_idx",
        has_raw_arguments=False,
        samples_pairs=False,
        has_rank_state=True,
        counts_tokens=False,
        lacks=(
            *("Parallel.dp_rank", "Parallel.num_dp_ranks"),
            "Parallel.attn_tp_group",
            "ReqKvInfo.req_pool_idx",
            "ServerArgs.enable_pd_role_switch",
            "ServerArgs.enable_watermark",
            "ServerArgs.speculative_use_block_verification",
            "model_override_base.resolved_view",
        ),
    ),
    "0.5.23": Version(
        slot="kv.req_pool_idx",
        has_raw_arguments=True,
        samples_pairs=True,
        has_rank_state=False,
        counts_tokens=True,
        lacks=(
            "ParallelContext.attn_tp_group",
            *("ParallelState.dp_rank", "ParallelState.dp_size"),
            "Req.req_pool_idx",
            "Scheduler.ps",
            "ServerArgs.speculative_skip_dp_mlp_sync",
        ),
    ),
}
"""Versions that are served."""

BODIES = Path(__file__).with_name("bodies.json")
"""By version `body_hash` of each function of `SIGNATURES`, in their order."""
_logger = logging.getLogger("sglang.srt.mtp_plugin")

_PACKAGES = {
    "SRT": "sglang.srt",
    "SPEC": "sglang.srt.speculative",
    "MANAGERS": "sglang.srt.managers",
}
_FRONT_END = ("sglang.srt.server_args", "sglang.srt.managers.tokenizer_manager")
# a function that ends with ``...`` is only wrapped
_FUNCTIONS = """
SRT.server_args:ServerArgs.check_server_args(...)
MANAGERS.tokenizer_manager:TokenizerManager._create_tokenized_object(
    obj, input_text, input_ids, ...)
MANAGERS.tokenizer_manager:TokenizerManager._send_one_request(tokenized_obj, ...)
MANAGERS.tokenizer_manager:TokenizerManager._calculate_spec_decoding_metrics(
    meta_info, recv_obj, i, ...)
MANAGERS.scheduler:Scheduler.__init__(server_args, ...)
MANAGERS.scheduler:Scheduler._add_request_to_queue(req, ...)
MANAGERS.scheduler:Scheduler.set_internal_state(recv_req, ...)
MANAGERS.scheduler:Scheduler.process_batch_result(batch, result, ...)
MANAGERS.scheduler_components.batch_result_processor:\
SchedulerBatchResultProcessor._resolve_spec_v2_tokens(result, batch, ...)
MANAGERS.scheduler_components.metrics_reporter:SchedulerMetricsReporter.update_spec_metrics(
    bs, num_correct_drafts, ...)
MANAGERS.schedule_batch:FINISH_ABORT.__init__(message, status_code, err_type)
MANAGERS.schedule_batch:Req.set_finish_with_abort(error_msg)
MANAGERS.schedule_batch:Req.update_finish_state(new_accepted_len, ...)
MANAGERS.tp_worker:TpModelWorker.alloc_memory_pool(...)
SRT.mem_cache.memory_pool:ReqToTokenPool.alloc(reqs, ...)
SRT.model_executor.model_runner:ModelRunner.sample(logits_output, forward_batch, ...)
SRT.layers.sampler:Sampler.forward(logits_output, sampling_info, return_logprob, ...)
SRT.layers.sampler:Sampler._preprocess_logits(logits, sampling_info, ...)
SRT.layers.sampler:Sampler._sample_from_probs(
    probs, sampling_info, positions, simple_sampling_case)
SRT.layers.sampler:Sampler._sync_token_ids_across_tp(batch_next_token_ids, sampling_info)
SPEC.eagle_utils:eagle_sample(verify_input, batch, logits_output, grammar_mask)
SPEC.eagle_worker_v2:EagleDraftWorker.alloc_memory_pool(...)
SPEC.eagle_worker_v2:EagleDraftWorker.draft(batch, ...)
SPEC.eagle_worker_v2:EagleDraftWorker.draft_forward(forward_batch, ...)
SPEC.eagle_worker_v2:EagleDraftWorker._draft_extend_for_prefill(batch, ...)
SPEC.eagle_worker_v2:EagleDraftWorker._draft_extend_for_decode(batch, batch_result, ...)
SRT.model_executor.model_runner:ModelRunner.forward(forward_batch, ...)
SPEC.eagle_draft_extend_cuda_graph_runner:EAGLEDraftExtendCudaGraphRunner.execute(
    forward_batch, ...)
SPEC.spec_utils:generate_simulated_accept_index(
    accept_index, predict, num_correct_drafts, candidates, target_predict, bs, spec_steps,
    simulate_acc_len, simulate_acc_method, simulate_acc_token_mode)
SRT.utils.async_probe:sanitize_nan_logits(logits, msg)
SRT.layers.sampler:apply_custom_logit_processor(logits, sampling_batch_info, num_tokens_in_batch)
SRT.disaggregation.decode_schedule_batch_mixin:\
ScheduleBatchDisaggregationDecodeMixin.prepare_for_prebuilt(...)
SRT.disaggregation.utils:MetadataBuffers.set_buf(req, ...)
SRT.disaggregation.utils:prepare_abort(req, error_message, status_code)
SRT.disaggregation.decode:DecodeTransferQueue._commit_transfer_to_req(decode_req, ...)
MANAGERS.schedule_batch:Req.build_rebootstrap_payload(...)
"""
_ATTRIBUTES = """
SRT.plugins.hook_registry:HookRegistry(_hooks, _patched, apply_hooks, register)
SRT.sampling.sampling_params:SamplingParams(
    temperature, top_k, top_p, min_p, n, max_new_tokens, sampling_seed, custom_params,
    repetition_penalty, presence_penalty, frequency_penalty, min_new_tokens, stop_token_ids)
MANAGERS.schedule_batch:Req(
    rid, req_pool_idx, kv, sampling_params, origin_input_ids, output_ids, to_finish, finished,
    grammar, is_retracted, retraction_count, inflight_middle_chunks, spec_verify_ct,
    spec_correct_drafts_histogram, custom_logit_processor, return_sampling_mask, eos_token_ids,
    tokenizer, bootstrap_host, bootstrap_room, metadata_buffer_index)
MANAGERS.schedule_batch:ReqKvInfo(req_pool_idx)
MANAGERS.schedule_batch:ScheduleBatch(
    reqs, forward_mode, req_pool_indices, req_pool_indices_cpu, sampling_info, seq_lens)
SRT.sampling.sampling_batch_info:SamplingBatchInfo(
    logit_bias, has_custom_logit_processor, return_sampling_masks)
SRT.model_executor.forward_batch_info:ForwardBatch(
    forward_mode, positions, req_pool_indices, seq_lens, rids)
SRT.arg_groups.model_override_base(resolved_view)
SRT.mem_cache.memory_pool:ReqToTokenPool(req_to_token, free_slots)
MANAGERS.tokenizer_manager:TokenizerManager(rid_to_state, preferred_sampling_params)
MANAGERS.utils:GenerationBatchResult(logits_output, num_correct_drafts_per_req_cpu)
MANAGERS.scheduler_components.metrics_reporter:SchedulerMetricsReporter(num_generated_tokens)
MANAGERS.scheduler:Scheduler(
    random_seed, tp_group, dp_tp_group, ps, server_args, disagg_metadata_buffers)
SRT.distributed.parallel_state_wrapper:ParallelState(dp_rank, dp_size)
SRT.runtime_context(get_parallel)
SRT.runtime_context:ParallelContext(attn_tp_group)
SRT.arg_groups.fields.parallel:Parallel(attn_tp_group, dp_rank, num_dp_ranks)
SRT.layers.dp_attention(is_dp_attention_enabled)
MANAGERS.io_struct:TokenizedGenerateReqInput(sampling_params, bootstrap_room)
SRT.disaggregation.utils(FAKE_BOOTSTRAP_HOST)
SRT.disaggregation.utils:MetadataBuffers(output_ids)
SRT.disaggregation.decode:DecodeRequest(req, metadata_buffer_index, kv_receiver)
SRT.disaggregation.decode:DecodeTransferQueue(metadata_buffers, scheduler)
MANAGERS.io_struct:SetInternalStateReq(server_args)
MANAGERS.io_struct:SetInternalStateReqOutput(updated)
MANAGERS.tp_worker:TpModelWorker(is_draft_worker, model_runner)
SPEC.eagle_info:EagleVerifyInput(draft_token, draft_token_num)
SPEC.eagle_info:EagleDraftInput(topk_index)
SPEC.eagle_worker_v2:EagleDraftWorker(draft_runner, hot_token_id)
SPEC.spec_utils(SIMULATE_ACC_LEN, SIMULATE_ACC_TOKEN_MODE)
"""


_LISTED = read_table(_FUNCTIONS, _PACKAGES)
SIGNATURES: Mapping[str, tuple[str, ...]] = {
    target: tuple(name for name in names if name != "...") for target, names in _LISTED.items()
}
"""``module:Class.method`` or ``module:function`` -> the first parameter names after ``self``."""
WRAPPED = frozenset(target for target, names in _LISTED.items() if "..." in names)
"""Functions whose calls are handed on to the original."""
NAMES: Mapping[str, tuple[str, ...]] = {
    **read_table(_ATTRIBUTES, _PACKAGES),
    "sglang.srt.server_args:ServerArgs": ("served_model_name", "enable_metrics", *READ_FIELDS),
}
"""``module:Class`` -> attributes of its instances; ``module`` -> names in it; in `Version.lacks`
those that a version does not have."""


def release() -> str:
    """Return the version of the installed SGLang.

    Raises:
        HostError: there is none.
    """
    try:
        return version("sglang")
    except PackageNotFoundError:
        raise HostError("SGLang is not installed here") from None


@cache
def installed() -> Version:
    """Return the row of the installed SGLang.

    Raises:
        HostError: it is not served.
    """
    found = release()
    if found not in SERVED:
        raise HostError(refusal(found, problems_of(found)))
    return SERVED[found]


def data_parallel_rank(scheduler: Any) -> tuple[int, int]:
    """Return the rank of a ``Scheduler`` among replicas, or in DP attention, and their number."""
    if installed().has_rank_state:
        return scheduler.ps.dp_rank or 0, scheduler.ps.dp_size
    parallel = import_module("sglang.srt.runtime_context").get_parallel()
    return parallel.dp_rank or 0, parallel.num_dp_ranks


def names_of(found: str) -> dict[str, tuple[str, ...]]:
    """Return the part of `NAMES` that a served version has."""
    kept = {}
    for target, names in NAMES.items():
        owner = target.replace(":", ".").rpartition(".")[2]
        has = tuple(name for name in names if f"{owner}.{name}" not in SERVED[found].lacks)
        if has:
            kept[target] = has
    return kept


def problems_of(
    found: str, reader: Reader = INSTALLED, is_wanted: Callable[[str], bool] = lambda _: True
) -> list[str]:
    """Return one line for everything of an SGLang version that does not fit.

    Args:
        is_wanted: whether to compare a target.
    """
    if found not in SERVED:
        return [f"version {found} is not served"]
    signatures = {target: names for target, names in SIGNATURES.items() if is_wanted(target)}
    names = {target: names for target, names in names_of(found).items() if is_wanted(target)}
    return differences(signatures, names, WRAPPED, reader)


def changed_bodies(
    found: str,
    body: Callable[[str], str] = INSTALLED.body,
    is_wanted: Callable[[str], bool] = lambda _: True,
) -> list[str]:
    """Return the functions whose code is another one than that of a served version.

    Args:
        body: what returns `body_hash` of a target.
        is_wanted: whether to compare a target.
    """
    known = json.loads(BODIES.read_text(encoding="utf-8"))[found].split()
    return [
        target
        for target, expected in zip(SIGNATURES, known, strict=True)
        if is_wanted(target) and body(target) != expected
    ]


def refusal(found: str, problems: list[str]) -> str:
    """Return the message for a version that does not fit."""
    return (
        f"mtp_plugin does not fit SGLang {found}: {'; '.join(problems)}. Install SGLang "
        f"{' or '.join(SERVED)}, or unset MTP_PLUGIN_SGLANG"
    )


def expect_fitting(*, is_scheduler: bool) -> None:
    """Compare the installed SGLang with what a process of it needs, which has it imported.

    Raises:
        HostError: names all that differs.
    """
    found = release()

    def is_wanted(target: str) -> bool:
        return (target.partition(":")[0] in _FRONT_END) != is_scheduler

    problems = problems_of(found, is_wanted=is_wanted)
    if problems:
        raise HostError(refusal(found, problems))
    changed = changed_bodies(found, is_wanted=is_wanted)
    if changed:
        _logger.warning(
            "mtp_plugin was not tested with the code of SGLang that is installed, %s with changes "
            "in %s: compare outputs with and without drafts",
            found,
            ", ".join(changed),
        )
