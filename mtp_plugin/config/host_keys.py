"""TensorRT-LLM config keys that this executor does not use, and the values it accepts for them.

An accepted value has no effect: the key is dropped, and one log line lists all dropped keys. Any
other value is an error (`schema`). Names and defaults are those of ``llmapi/llm_args.py`` of
TensorRT-LLM 1.2 to 1.4.
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
    """A key of TensorRT-LLM without effect here, and its accepted values."""

    why: str
    """Why the key has no effect; the first part of the error message."""
    values: tuple[Any, ...] = ()
    """Accepted values."""
    kinds: tuple[type, ...] = ()
    """Types whose values are all accepted."""
    inside: Mapping[str, HostKey] | None = None
    """Accepted keys, if the value is a mapping."""

    def accepts(self, value: Any) -> bool:
        if isinstance(value, Mapping) and self.inside is not None:
            return not list(self.refused(value))
        kinds = (type(value), dict) if isinstance(value, Mapping) else (type(value),)
        # in Python 1 == True and 0 == False
        alike = any(type(value) is type(each) and value == each for each in self.values)
        return alike or any(kind in self.kinds for kind in kinds)

    def refused(self, value: Mapping[Any, Any]) -> list[tuple[str, str]]:
        """Return (key, sentence) for every key of the mapping that is refused."""
        refused: list[tuple[str, str]] = []
        for name, item in value.items():
            key = (self.inside or {}).get(name)
            if key is None:
                known = ", ".join(self.inside or ())
                refused.append((str(name), f"unknown key; expected one of {known}"))
            elif not key.accepts(item):
                refused.append((str(name), key.sentence(item)))
        return refused

    def sentence(self, value: Any) -> str:
        return f"{self.why}; expected {self.expected}, got {got(value)}"

    @property
    def expected(self) -> str:
        shown = [repr(each) if isinstance(each, str) else got(each) for each in self.values]
        words = [*shown, *(_KINDS[kind] for kind in self.kinds)]
        if self.inside is not None:
            words.append(f"a mapping of {', '.join(self.inside)}")
        return " or ".join(words)

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the value."""
        schema: dict[str, Any] = {"description": f"TensorRT-LLM's: {self.why}"}
        if not self.kinds and self.inside is None:
            schema["enum"] = list(self.values)
        return schema


def _table(*rows: tuple[str, Any, str]) -> dict[str, HostKey]:
    """Build the keys of rows (why, accepted, names separated by spaces).

    ``accepted`` is a tuple of values and types, or a mapping of nested keys.
    """
    table = {}
    for why, accepted, names in rows:
        if isinstance(accepted, dict):
            key = HostKey(why, inside=accepted)
        else:
            kinds = tuple(each for each in accepted if isinstance(each, type))
            key = HostKey(why, tuple(e for e in accepted if not isinstance(e, type)), kinds)
        table.update(dict.fromkeys(names.split(), key))
    return table


_ONE_GPU = "this executor runs on one GPU"
_NO_ITERATION_LOG = "streaming reports every step, and there is no iteration log"
_NO_LORA = "LoRA is not supported"
_NO_REMOTE_CODE = "tokenizer and model are loaded from the checkpoint without remote code"
_NO_WAIT = "requests are never held back to fill a batch"
_NO_TREE = "drafts are a chain, not a tree"
_OWN_KERNELS = "fused_layers and attn_backend select the kernels"
_OWN_CACHE = "this executor has its own KV cache, all of it in device memory"
_NO_EVENTS = "the KV cache emits no events"
_NO_REUSE = "KV blocks are not reused between requests"
_IN_PROCESS = "the executor runs in this process"
_NO_ENCODER = "models have no encoder"
_NO_MAMBA = "models have no Mamba states"
_NO_METRICS = "no metrics are written"
_OWN_WEIGHTS = "weights are read from the checkpoint"
_HF_LAYOUT = "weights are in Hugging Face layout"
_NO_BEAMS = "beam search is not supported"
_NO_QUANTIZATION = (
    "quantized weights are not supported, but vLLM with this package's plugin runs them"
)


TOP_LEVEL: Mapping[str, HostKey] = _table(
    ("there is only one backend", ("pytorch", None), "backend"),
    ("TensorRT-LLM's attention backend is treated as auto", ("TRTLLM",), "attn_backend"),
    (_ONE_GPU, (1,), "tensor_parallel_size pipeline_parallel_size context_parallel_size"),
    (_ONE_GPU, (1, -1, None), "moe_cluster_parallel_size moe_tensor_parallel_size"),
    (_ONE_GPU, (1, -1, None), "moe_expert_parallel_size"),
    (_ONE_GPU, (int, None), "gpus_per_node"),
    (_ONE_GPU, (None,), "pp_partition dwdp_config cache_transceiver_config"),
    (_ONE_GPU, (None, {}), "cp_config"),
    (_ONE_GPU, (False,), "enable_attention_dp enable_lm_head_tp_in_adp"),
    ("used only with enable_attention_dp", (dict, None), "attention_dp_config"),
    ("one GPU needs no all-reduce", (str, None), "allreduce_strategy"),
    (_IN_PROCESS, (None, "rpc"), "orchestrator_type"),
    (_IN_PROCESS, (None,), "mpi_session ray_worker_extension_cls ray_placement_config"),
    (_IN_PROCESS, (None,), "ray_worker_nsight_options"),
    (_IN_PROCESS, (False,), "enable_resource_governor"),
    ("environment variables are not overridden", (None, {}), "env_overrides"),
    (_NO_ITERATION_LOG, (bool,), "print_iter_log enable_iter_perf_stats enable_iter_req_stats"),
    (_NO_ITERATION_LOG, (int, None), "iter_stats_max_iterations request_stats_max_iterations"),
    (_NO_ITERATION_LOG, (int,), "max_stats_len perf_metrics_max_requests"),
    (_NO_METRICS, (False,), "return_perf_metrics enable_energy_metrics"),
    (_NO_METRICS, (None,), "perf_metrics_output_dir prometheus_metrics_config"),
    ("no traces are sent", (None,), "otlp_traces_endpoint"),
    ("no telemetry is sent", (dict, None), "telemetry_config"),
    ("layer benchmarks are separate commands", (None, {}), "layer_wise_benchmarks_config"),
    ("layers have no NVTX markers", (bool,), "enable_layerwise_nvtx_marker"),
    ("text is detokenized in this process", (int,), "num_postprocess_workers"),
    ("text is detokenized in this process", (str, None), "postprocess_tokenizer_dir"),
    ("there is no server", (1,), "num_serve_frontends"),
    ("output text is not post-processed", (None,), "post_processor_hook"),
    ("reasoning is not separated from the output", (str, None), "reasoning_parser"),
    ("streaming reports every step", (1,), "stream_interval"),
    ("streaming reports every step", (bool,), "enable_early_first_token_response"),
    ("gc is frozen while the executor runs", (int,), "garbage_collection_gen0_threshold"),
    ("CUDA streams have no host callbacks", (bool,), "enable_low_latency_host_dispatch"),
    ("weights stay in device memory", (False,), "enable_sleep"),
    ("weights stay in device memory", (None,), "sleep_config"),
    (_NO_REMOTE_CODE, (bool,), "trust_remote_code"),
    (_NO_REMOTE_CODE, (False,), "skip_tokenizer_init"),
    (_NO_REMOTE_CODE, (None,), "tokenizer custom_tokenizer"),
    (_NO_REMOTE_CODE, ("auto",), "tokenizer_mode"),
    ("model is a directory", (str, None), "revision tokenizer_revision"),
    ("the checkpoint's config is read as it is", (None, {}), "model_kwargs"),
    (_OWN_WEIGHTS, ("auto",), "load_format"),
    (_OWN_WEIGHTS, (None, {}), "mx_config gms_config"),
    (_HF_LAYOUT, ("HF", None), "checkpoint_format"),
    (_HF_LAYOUT, (None,), "checkpoint_loader"),
    (_HF_LAYOUT, (str,), "checkpoint_io_policy"),
    (_NO_QUANTIZATION, (False,), "force_dynamic_quantization"),
    (_NO_QUANTIZATION, (dict,), "nvfp4_gemm_config"),
    ("models are not compiled", (None,), "torch_compile_config"),
    ("prompts run without CUDA graphs", ("disabled",), "prefill_cuda_graph_backend"),
    ("prompts run without CUDA graphs", (None,), "prefill_capture_num_tokens"),
    (_OWN_KERNELS, (bool,), "use_cute_dsl_blockscaling_mm use_cute_dsl_blockscaling_bmm"),
    (_OWN_KERNELS, (bool,), "use_cute_dsl_bf16_bmm use_cute_dsl_bf16_gemm use_fine_grained_sync"),
    (_OWN_KERNELS, (bool,), "enable_autotuner enable_min_latency"),
    ("tokens are sampled by kernels of the plugin", (bool,), "disable_flashinfer_sampling"),
    ("attention has no skip-correction", (False,), "enable_mla_skip_correction"),
    ("used only with enable_mla_skip_correction", (float,), "mla_skip_correction_threshold"),
    ("attention is dense", (None,), "sparse_attention_config"),
    (_NO_BEAMS, (1, None), "max_beam_width"),
    (_NO_BEAMS, (bool,), "enable_speculative_beam_history_d2h"),
    ("copies to the host are always asynchronous", (bool,), "sampler_force_async_worker"),
    ("sampling is always part of the CUDA graph", (bool,), "enable_in_graph_sampling"),
    ("there is one sampler", ("auto", "TorchSampler"), "sampler_type"),
    ("the scheduler has one policy", (None, {}), "scheduler_config"),
    ("requests are scheduled in order of arrival", (None,), "reorder_policy_config"),
    (_NO_WAIT, (0, 0.0), "batch_wait_timeout_ms batch_wait_max_tokens_ratio"),
    (_NO_WAIT, (0,), "batch_wait_timeout_iters"),
    ("outputs have no logits", (False,), "gather_generation_logits"),
    ("guided decoding is not supported", (None,), "guided_decoding_backend"),
    ("each request sets its own logits processing", (None,), "batched_logits_processor"),
    ("speculative_config has these options", (None,), "decoding_config"),
    ("each request sets its own sampling options", ("trtllm",), "generation_config"),
    (_NO_LORA, (False,), "enable_lora"),
    (_NO_LORA, (None,), "lora_config peft_cache_config"),
    ("this executor always generates", (False,), "encode_only"),
    ("models are text-only", (False,), "mm_encoder_only"),
    ("models are text-only", (bool,), "disable_mm_encoder"),
    ("models are text-only", (dict, None), "multimodal_config"),
    (_NO_ENCODER, (None,), "encoder_cuda_graph_config"),
    (_NO_ENCODER, (int, None), "encoder_max_batch_size encoder_max_num_tokens"),
    (_NO_ENCODER, (bool,), "enable_encoder_decoder_mixed_cuda_graph"),
    (
        "prompts larger than the KV cache are refused",
        (bool,),
        "fail_fast_on_attention_window_too_large",
    ),
    (_OWN_CACHE, (None,), "kv_connector_config kv_cache_compression_config"),
    (
        _OWN_KERNELS,
        _table(
            (_OWN_KERNELS, (str,), "backend"),
            (_OWN_KERNELS, (int, None), "max_num_tokens"),
            (_OWN_KERNELS, (bool,), "disable_finalize_fusion"),
            (_ONE_GPU, (None,), "load_balancer"),
            (
                "experts are combined in the model's dtype",
                (False,),
                "use_low_precision_moe_combine",
            ),
        ),
        "moe_config",
    ),
)
"""TensorRT-LLM's, at the top level of the file."""

VLLM: Mapping[str, HostKey] = _table(
    ("cuda_graph_config selects CUDA graphs", (False,), "enforce_eager"),
    (_NO_REUSE, (False, None), "enable_prefix_caching"),
    (_NO_QUANTIZATION, (None,), "quantization"),
    (_NO_ITERATION_LOG, (bool,), "disable_log_stats disable_log_requests"),
    (_ONE_GPU, (1,), "data_parallel_size"),
    (_ONE_GPU, (False,), "enable_expert_parallel"),
    (_ONE_GPU, (bool,), "disable_custom_all_reduce"),
    (_OWN_CACHE, (0, 0.0), "swap_space cpu_offload_gb"),
    ("the cache has the model's type", ("auto",), "kv_cache_dtype"),
)
"""vLLM's, at the top level."""

TOP_LEVEL_OF_BOTH: Mapping[str, HostKey] = {**TOP_LEVEL, **VLLM}

KV_CACHE: Mapping[str, HostKey] = _table(
    ("the KV cache has the model's dtype", ("auto",), "dtype"),
    ("the KV cache has the model's dtype", (int, None), "fp8_context_mla_kv_len_cap"),
    ("the model defines attention windows", (None,), "max_attention_window sink_token_length"),
    (_OWN_CACHE, (None, 0), "host_cache_size disk_cache_size"),
    (_OWN_CACHE, (str, None), "disk_cache_path"),
    (_OWN_CACHE, (bool,), "onboard_blocks enable_kv_pool_rebalance enable_swa_scratch_reuse"),
    (_OWN_CACHE, (int, None), "secondary_offload_min_priority avg_seq_len"),
    (_OWN_CACHE, (False,), "use_uvm"),
    (_OWN_CACHE, (bool, "auto"), "use_kv_cache_manager_v2"),
    (_OWN_CACHE, (int,), "disk_prefetch_num_reqs"),
    (_OWN_CACHE, (float,), "max_util_for_resume"),
    (_OWN_CACHE, (None,), "pool_ratio"),
    (_NO_ENCODER, (None,), "cross_kv_cache_fraction"),
    (_NO_EVENTS, (0,), "event_buffer_max_size"),
    (_NO_EVENTS, (None,), "kv_events_config"),
    (_NO_EVENTS, (int,), "attention_dp_events_gather_period_ms"),
    (_NO_EVENTS, (str,), "kv_cache_event_hash_algo"),
    (_NO_ITERATION_LOG, (int,), "iteration_stats_interval"),
    (_NO_REUSE, (bool,), "enable_partial_reuse copy_on_partial_reuse"),
    (_NO_REUSE, (str,), "block_reuse_policy"),
    (_NO_REUSE, (dict,), "block_reuse_config"),
    ("max_tokens and free_gpu_memory_fraction size the cache", (0,), "max_gpu_total_bytes"),
    (_NO_MAMBA, (str,), "mamba_ssm_cache_dtype"),
    (_NO_MAMBA, (bool,), "mamba_ssm_stochastic_rounding"),
    (_NO_MAMBA, (int,), "mamba_ssm_philox_rounds"),
    (_NO_MAMBA, (int, None), "mamba_state_cache_interval"),
    (_NO_MAMBA, (dict,), "mamba_state_config"),
)
"""Under ``kv_cache_config``."""

CUDA_GRAPHS: Mapping[str, HostKey] = _table(
    ("decode steps are captured", ("decode",), "mode"),
    ("0 is TensorRT-LLM's null", (0,), "max_batch_size"),
)
"""Under ``cuda_graph_config``."""

SPECULATIVE: Mapping[str, HostKey] = _table(
    (_NO_TREE, (None,), "max_total_draft_tokens dynamic_tree_max_topK"),
    (_NO_TREE, (False,), "use_dynamic_tree"),
    ("the checkpoint holds the MTP layers", (None,), "speculative_model speculative_model_dir"),
    (_OWN_WEIGHTS, (None,), "load_format"),
    ("suffix-automaton drafting is not supported", (None,), "sa_config"),
    (_OWN_KERNELS, (str, None), "moe_backend"),
    ("there is one way to draft and verify", (1,), "spec_dec_variant"),
    ("drafts use the top-k and top-p of their targets", (False,), "draft_skip_top_k_top_p"),
    ("MTP always runs in one engine", (True,), "mtp_eagle_one_model"),
    ("mtp.verification selects rejection sampling", (False,), "use_rejection_sampling"),
    ("sampling options are always enabled", (bool,), "allow_advanced_sampling"),
    ("every truncation option is enabled", ("full",), "advanced_sampling_mode"),
    ("penalties are always enabled", (bool,), "enable_penalty"),
    ("acceptance_window configures the gate", (None, 0), "acceptance_rate_window_size"),
    ("acceptance_window configures the gate", (None,), "acceptance_rate_threshold"),
)
"""Under a ``speculative_config`` of MTP."""
