"""Keys that TensorRT-LLM's files have and one GPU does without: which values change nothing here.

A key with such a value is set aside, and one line of the log names them all; with any other value
it is refused by its name (`schema`). Names and defaults are those of ``llmapi/llm_args.py`` of the
lines 1.2 and 1.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtp_plugin.config.messages import got

_KINDS: Mapping[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    dict: "a mapping",
}


@dataclass(frozen=True)
class HostKey:
    """One key of the host's, and what may stand under it."""

    why: str
    """What is so here, whatever the key says."""
    values: tuple[Any, ...] = ()
    """Values that change nothing."""
    kinds: tuple[type, ...] = ()
    """Types of which every value changes nothing."""
    inside: Mapping[str, HostKey] | None = None
    """The keys of the mapping that stands under it."""

    def accepts(self, value: Any) -> bool:
        """Whether the value changes nothing here."""
        if isinstance(value, Mapping) and self.inside is not None:
            return not list(self.refused(value))
        kinds = (type(value), dict) if isinstance(value, Mapping) else (type(value),)
        # 1 is not true, and 0 is not false
        alike = any(type(value) is type(each) and value == each for each in self.values)
        return alike or any(kind in self.kinds for kind in kinds)

    def refused(self, value: Mapping[Any, Any]) -> list[tuple[str, str]]:
        """(key, sentence) of every key of a mapping under this one that cannot be set aside."""
        told: list[tuple[str, str]] = []
        for name, item in value.items():
            key = (self.inside or {}).get(name)
            if key is None:
                known = ", ".join(self.inside or ())
                told.append((str(name), f"unknown key; expected one of {known}"))
            elif not key.accepts(item):
                told.append((str(name), key.sentence(item)))
        return told

    def sentence(self, value: Any) -> str:
        """Why a value is refused."""
        return f"{self.why}; expected {self.expected}, got {got(value)}"

    @property
    def expected(self) -> str:
        """What may stand here, in words."""
        shown = [repr(each) if isinstance(each, str) else got(each) for each in self.values]
        words = [*shown, *(_KINDS[kind] for kind in self.kinds)]
        if self.inside is not None:
            words.append(f"a mapping of {', '.join(self.inside)}")
        return " or ".join(words)

    def schema(self) -> dict[str, Any]:
        """As JSON schema."""
        told: dict[str, Any] = {"description": f"TensorRT-LLM's: {self.why}"}
        if not self.kinds and self.inside is None:
            told["enum"] = list(self.values)
        return told


def _only(*values: Any, why: str) -> HostKey:
    return HostKey(why, values=values)


def _any(kind: type, *values: Any, why: str) -> HostKey:
    return HostKey(why, values=values, kinds=(kind,))


_ONE_GPU = "this executor runs on one GPU"
_NO_TOLD = "this executor's steps are told by stream, not by such a log"
_NO_LORA = "LoRA is not built here"
_NO_CODE = "tokenizer and model are read as the checkpoint has them, without code of its own"
_NO_WAIT = "a waiting request joins the next step"
_NO_TREE = "drafts are linear"
_OWN_KERNELS = "kernels are chosen by fused_layers and attn_backend"
_NO_LOW_PRECISION = "products of experts keep the model's type"
_OWN_CACHE = "this executor has a KV cache of its own, all of it on the device"
_NO_EVENTS = "the KV cache tells no events"
_NO_REUSE = "blocks are not reused"

TOP_LEVEL: Mapping[str, HostKey] = {
    "backend": _only("pytorch", None, why="there is one backend"),
    "attn_backend": _only("TRTLLM", why="TensorRT-LLM's attention is read as auto"),
    # placement
    "tensor_parallel_size": _only(1, why=_ONE_GPU),
    "pipeline_parallel_size": _only(1, why=_ONE_GPU),
    "context_parallel_size": _only(1, why=_ONE_GPU),
    "moe_cluster_parallel_size": _only(1, -1, None, why=_ONE_GPU),
    "moe_tensor_parallel_size": _only(1, -1, None, why=_ONE_GPU),
    "moe_expert_parallel_size": _only(1, -1, None, why=_ONE_GPU),
    "gpus_per_node": _any(int, None, why=_ONE_GPU),
    "pp_partition": _only(None, why=_ONE_GPU),
    "dwdp_config": _only(None, why=_ONE_GPU),
    "cp_config": _only(None, {}, why=_ONE_GPU),
    "enable_attention_dp": _only(False, why=_ONE_GPU),
    "attention_dp_config": _any(dict, None, why="read with enable_attention_dp alone"),
    "enable_lm_head_tp_in_adp": _only(False, why=_ONE_GPU),
    "allreduce_strategy": _any(str, None, why="one GPU reduces nothing over others"),
    "orchestrator_type": _only(None, "rpc", why="the executor runs in this process"),
    "mpi_session": _only(None, why="the executor runs in this process"),
    "ray_worker_extension_cls": _only(None, why="the executor runs in this process"),
    "ray_placement_config": _only(None, why="the executor runs in this process"),
    "ray_worker_nsight_options": _only(None, why="the executor runs in this process"),
    "enable_resource_governor": _only(False, why="the executor runs in this process"),
    "env_overrides": _only(None, {}, why="the environment is read as it is"),
    # reports
    "print_iter_log": _any(bool, why=_NO_TOLD),
    "enable_iter_perf_stats": _any(bool, why=_NO_TOLD),
    "enable_iter_req_stats": _any(bool, why=_NO_TOLD),
    "iter_stats_max_iterations": _any(int, None, why=_NO_TOLD),
    "request_stats_max_iterations": _any(int, None, why=_NO_TOLD),
    "max_stats_len": _any(int, why=_NO_TOLD),
    "perf_metrics_max_requests": _any(int, why=_NO_TOLD),
    "return_perf_metrics": _only(False, why="answers hold no such metrics"),
    "otlp_traces_endpoint": _only(None, why="no traces are sent"),
    "perf_metrics_output_dir": _only(None, why="no metrics are written"),
    "prometheus_metrics_config": _only(None, why="no metrics are written"),
    "enable_energy_metrics": _only(False, why="no metrics are written"),
    "telemetry_config": _any(dict, None, why="nothing is sent anywhere"),
    "layer_wise_benchmarks_config": _only(None, {}, why="benchmarks of layers are separate"),
    "enable_layerwise_nvtx_marker": _any(bool, why="layers have no markers"),
    # host processes
    "num_postprocess_workers": _any(int, why="text is made in this process"),
    "postprocess_tokenizer_dir": _any(str, None, why="text is made in this process"),
    "num_serve_frontends": _only(1, why="there is no server"),
    "post_processor_hook": _only(None, why="text is given as it is decoded"),
    "reasoning_parser": _any(str, None, why="there is no server that parts answers"),
    "stream_interval": _only(1, why="a stream tells every step"),
    "garbage_collection_gen0_threshold": _any(int, why="the collector is frozen while it runs"),
    "enable_low_latency_host_dispatch": _any(bool, why="no stream calls the host back"),
    "enable_sleep": _only(False, why="weights stay on the device"),
    "sleep_config": _only(None, why="weights stay on the device"),
    # checkpoint and tokenizer
    "trust_remote_code": _only(False, why=_NO_CODE),
    "tokenizer": _only(None, why=_NO_CODE),
    "tokenizer_mode": _only("auto", why=_NO_CODE),
    "custom_tokenizer": _only(None, why=_NO_CODE),
    "skip_tokenizer_init": _only(False, why=_NO_CODE),
    "revision": _only(None, why="model is a directory"),
    "tokenizer_revision": _only(None, why="model is a directory"),
    "model_kwargs": _only(None, {}, why="the checkpoint's config is read as it is"),
    "load_format": _only("auto", why="weights are read from the checkpoint"),
    "checkpoint_format": _only("HF", None, why="weights are in Hugging Face layout"),
    "checkpoint_loader": _only(None, why="weights are in Hugging Face layout"),
    "checkpoint_io_policy": _any(str, why="weights are in Hugging Face layout"),
    "mx_config": _only(None, {}, why="weights are read from the checkpoint"),
    "gms_config": _only(None, {}, why="weights are read from the checkpoint"),
    "force_dynamic_quantization": _only(False, why="quantised weights are not built here"),
    "nvfp4_gemm_config": _any(dict, why="quantised weights are not built here"),
    # kernels
    "moe_config": HostKey(
        _OWN_KERNELS,
        inside={
            "backend": _any(str, why=_OWN_KERNELS),
            "max_num_tokens": _any(int, None, why=_OWN_KERNELS),
            "disable_finalize_fusion": _any(bool, why=_OWN_KERNELS),
            "load_balancer": _only(None, why=_ONE_GPU),
            "use_low_precision_moe_combine": _only(False, why=_NO_LOW_PRECISION),
        },
    ),
    "torch_compile_config": _only(None, why="models are not compiled"),
    "prefill_cuda_graph_backend": _only("disabled", why="prompts run without CUDA graphs"),
    "prefill_capture_num_tokens": _only(None, why="prompts run without CUDA graphs"),
    "use_cute_dsl_blockscaling_mm": _any(bool, why=_OWN_KERNELS),
    "use_cute_dsl_blockscaling_bmm": _any(bool, why=_OWN_KERNELS),
    "use_cute_dsl_bf16_bmm": _any(bool, why=_OWN_KERNELS),
    "use_cute_dsl_bf16_gemm": _any(bool, why=_OWN_KERNELS),
    "use_fine_grained_sync": _any(bool, why=_OWN_KERNELS),
    "disable_flashinfer_sampling": _any(bool, why="tokens are drawn by kernels of the plugin"),
    "enable_mla_skip_correction": _only(False, why="attention takes no such short cut"),
    "mla_skip_correction_threshold": _any(float, why="read with enable_mla_skip_correction alone"),
    "enable_autotuner": _any(bool, why=_OWN_KERNELS),
    "enable_min_latency": _any(bool, why=_OWN_KERNELS),
    "sparse_attention_config": _only(None, why="attention reads all rows"),
    # requests
    "max_beam_width": _only(1, None, why="there are no beams"),
    "enable_speculative_beam_history_d2h": _any(bool, why="there are no beams"),
    "sampler_force_async_worker": _any(bool, why="copies to the host are never waited for early"),
    "enable_in_graph_sampling": _any(bool, why="tokens are drawn in the captured step"),
    "enable_early_first_token_response": _any(bool, why="a stream tells every step"),
    "sampler_type": _only("auto", "TorchSampler", why="there is one sampler"),
    "scheduler_config": _only(None, {}, why="the scheduler has no policies to choose from"),
    "reorder_policy_config": _only(None, why="requests are taken as they come"),
    "batch_wait_timeout_ms": _only(0, 0.0, why=_NO_WAIT),
    "batch_wait_timeout_iters": _only(0, why=_NO_WAIT),
    "batch_wait_max_tokens_ratio": _only(0, 0.0, why=_NO_WAIT),
    "gather_generation_logits": _only(False, why="answers hold no logits"),
    "guided_decoding_backend": _only(None, why="grammars are not built here"),
    "batched_logits_processor": _only(None, why="logits are edited as requests ask"),
    "decoding_config": _only(None, why="speculative_config says so"),
    "generation_config": _only("trtllm", why="requests say how tokens are drawn"),
    "enable_lora": _only(False, why=_NO_LORA),
    "lora_config": _only(None, why=_NO_LORA),
    "peft_cache_config": _only(None, why=_NO_LORA),
    "encode_only": _only(False, why="this executor generates"),
    "mm_encoder_only": _only(False, why="models read text"),
    "disable_mm_encoder": _any(bool, why="models read text"),
    "multimodal_config": _any(dict, None, why="models read text"),
    "encoder_cuda_graph_config": _only(None, why="models have no encoder"),
    "encoder_max_batch_size": _any(int, None, why="models have no encoder"),
    "encoder_max_num_tokens": _any(int, None, why="models have no encoder"),
    "enable_encoder_decoder_mixed_cuda_graph": _any(bool, why="models have no encoder"),
    "fail_fast_on_attention_window_too_large": _any(bool, why="such prompts are always refused"),
    "cache_transceiver_config": _only(None, why=_ONE_GPU),
    "kv_connector_config": _only(None, why=_OWN_CACHE),
    "kv_cache_compression_config": _only(None, why=_OWN_CACHE),
}
"""At the top level of the file."""

KV_CACHE: Mapping[str, HostKey] = {
    "dtype": _only("auto", why="the cache has the model's type"),
    "max_attention_window": _only(None, why="windows are the model's"),
    "sink_token_length": _only(None, why="windows are the model's"),
    "host_cache_size": _only(None, 0, why=_OWN_CACHE),
    "disk_cache_size": _only(None, 0, why=_OWN_CACHE),
    "disk_cache_path": _any(str, None, why=_OWN_CACHE),
    "onboard_blocks": _any(bool, why=_OWN_CACHE),
    "cross_kv_cache_fraction": _only(None, why="models have no encoder"),
    "secondary_offload_min_priority": _any(int, None, why=_OWN_CACHE),
    "event_buffer_max_size": _only(0, why=_NO_EVENTS),
    "kv_events_config": _only(None, why=_NO_EVENTS),
    "attention_dp_events_gather_period_ms": _any(int, why=_NO_EVENTS),
    "iteration_stats_interval": _any(int, why=_NO_TOLD),
    "enable_partial_reuse": _any(bool, why=_NO_REUSE),
    "copy_on_partial_reuse": _any(bool, why=_NO_REUSE),
    "use_uvm": _only(False, why=_OWN_CACHE),
    "max_gpu_total_bytes": _only(0, why="max_tokens and free_gpu_memory_fraction size the cache"),
    "mamba_ssm_cache_dtype": _any(str, why="models have no such states"),
    "mamba_ssm_stochastic_rounding": _any(bool, why="models have no such states"),
    "mamba_ssm_philox_rounds": _any(int, why="models have no such states"),
    "mamba_state_cache_interval": _any(int, None, why="models have no such states"),
    "mamba_state_config": _any(dict, why="models have no such states"),
    "use_kv_cache_manager_v2": _any(bool, "auto", why=_OWN_CACHE),
    "disk_prefetch_num_reqs": _any(int, why=_OWN_CACHE),
    "max_util_for_resume": _any(float, why=_OWN_CACHE),
    "enable_kv_pool_rebalance": _any(bool, why=_OWN_CACHE),
    "enable_swa_scratch_reuse": _any(bool, why=_OWN_CACHE),
    "pool_ratio": _only(None, why=_OWN_CACHE),
    "avg_seq_len": _any(int, None, why=_OWN_CACHE),
    "fp8_context_mla_kv_len_cap": _any(int, None, why="the cache has the model's type"),
    "kv_cache_event_hash_algo": _any(str, why=_NO_EVENTS),
    "block_reuse_policy": _any(str, why=_NO_REUSE),
    "block_reuse_config": _any(dict, why=_NO_REUSE),
}
"""Under ``kv_cache_config``."""

CUDA_GRAPHS: Mapping[str, HostKey] = {
    "mode": _only("decode", why="steps that generate are captured"),
    "max_batch_size": _only(0, why="0 is TensorRT-LLM's null"),
}
"""Under ``cuda_graph_config``."""

SPECULATIVE: Mapping[str, HostKey] = {
    "max_total_draft_tokens": _only(None, why=_NO_TREE),
    "use_dynamic_tree": _only(False, why=_NO_TREE),
    "dynamic_tree_max_topK": _only(None, why=_NO_TREE),
    "speculative_model": _only(None, why="the checkpoint holds the MTP layers"),
    "speculative_model_dir": _only(None, why="the checkpoint holds the MTP layers"),
    "load_format": _only(None, why="weights are read from the checkpoint"),
    "sa_config": _only(None, why="suffix automata are not built here"),
    "moe_backend": _any(str, None, why=_OWN_KERNELS),
    "draft_skip_top_k_top_p": _only(False, why="drafts are cut as their targets are"),
    # these have other names here
    "mtp_eagle_one_model": _only(True, why="MTP always runs in one engine"),
    "use_rejection_sampling": _only(False, why="mtp.verification says so"),
    "allow_advanced_sampling": _any(bool, why="sampling is always on"),
    "advanced_sampling_mode": _only("full", why="every filter is at hand"),
    "enable_penalty": _any(bool, why="penalties are always on"),
    "acceptance_rate_window_size": _only(None, 0, why="the gate goes by acceptance_window"),
    "acceptance_rate_threshold": _only(None, why="the gate goes by acceptance_window"),
}
"""Under a ``speculative_config`` of MTP."""
