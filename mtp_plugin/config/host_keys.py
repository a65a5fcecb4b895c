"""Keys of TensorRT-LLM's files that one GPU does without, and the values that change nothing here.

A key with such a value is set aside, and one line of the log lists them all; any other value is
refused by name (`schema`). Names and defaults are those of ``llmapi/llm_args.py`` of the lines 1.2
and 1.3.
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
    """A key of TensorRT-LLM, and the values under which it changes nothing here."""

    why: str
    """What holds here whatever the value is."""
    values: tuple[Any, ...] = ()
    """Accepted values."""
    kinds: tuple[type, ...] = ()
    """Types of which every value is accepted."""
    inside: Mapping[str, HostKey] | None = None
    """Keys of the mapping that is accepted."""

    def accepts(self, value: Any) -> bool:
        if isinstance(value, Mapping) and self.inside is not None:
            return not list(self.refused(value))
        kinds = (type(value), dict) if isinstance(value, Mapping) else (type(value),)
        # 1 is not true, and 0 is not false
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
    """Return the keys of rows (why, what is accepted, names).

    What is accepted: values and types in a tuple, or the keys of a mapping.
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
_NO_LOG = "steps are reported by stream, not by such a log"
_NO_LORA = "LoRA is not built here"
_NO_CODE = "tokenizer and model are read as the checkpoint has them, without code of its own"
_NO_WAIT = "a waiting request joins the next step"
_NO_TREE = "drafts are linear"
_OWN_KERNELS = "kernels are chosen by fused_layers and attn_backend"
_OWN_CACHE = "this executor has a KV cache of its own, all of it on the device"
_NO_EVENTS = "the KV cache emits no events"
_NO_REUSE = "blocks are not reused"
_IN_PROCESS = "the executor runs in this process"
_NO_ENCODER = "models have no encoder"
_NO_MAMBA = "models have no such states"
_NO_METRICS = "no metrics are written"
_OWN_WEIGHTS = "weights are read from the checkpoint"
_HF_LAYOUT = "weights are in Hugging Face layout"
_NO_BEAMS = "there are no beams"


TOP_LEVEL: Mapping[str, HostKey] = _table(
    ("there is one backend", ("pytorch", None), "backend"),
    ("TensorRT-LLM's attention is read as auto", ("TRTLLM",), "attn_backend"),
    (_ONE_GPU, (1,), "tensor_parallel_size pipeline_parallel_size context_parallel_size"),
    (_ONE_GPU, (1, -1, None), "moe_cluster_parallel_size moe_tensor_parallel_size"),
    (_ONE_GPU, (1, -1, None), "moe_expert_parallel_size"),
    (_ONE_GPU, (int, None), "gpus_per_node"),
    (_ONE_GPU, (None,), "pp_partition dwdp_config cache_transceiver_config"),
    (_ONE_GPU, (None, {}), "cp_config"),
    (_ONE_GPU, (False,), "enable_attention_dp enable_lm_head_tp_in_adp"),
    ("read with enable_attention_dp alone", (dict, None), "attention_dp_config"),
    ("one GPU reduces nothing over others", (str, None), "allreduce_strategy"),
    (_IN_PROCESS, (None, "rpc"), "orchestrator_type"),
    (_IN_PROCESS, (None,), "mpi_session ray_worker_extension_cls ray_placement_config"),
    (_IN_PROCESS, (None,), "ray_worker_nsight_options"),
    (_IN_PROCESS, (False,), "enable_resource_governor"),
    ("the environment is read as it is", (None, {}), "env_overrides"),
    (_NO_LOG, (bool,), "print_iter_log enable_iter_perf_stats enable_iter_req_stats"),
    (_NO_LOG, (int, None), "iter_stats_max_iterations request_stats_max_iterations"),
    (_NO_LOG, (int,), "max_stats_len perf_metrics_max_requests"),
    (_NO_METRICS, (False,), "return_perf_metrics enable_energy_metrics"),
    (_NO_METRICS, (None,), "perf_metrics_output_dir prometheus_metrics_config"),
    ("no traces are sent", (None,), "otlp_traces_endpoint"),
    ("nothing is sent anywhere", (dict, None), "telemetry_config"),
    ("benchmarks of layers are separate", (None, {}), "layer_wise_benchmarks_config"),
    ("layers have no markers", (bool,), "enable_layerwise_nvtx_marker"),
    ("text is made in this process", (int,), "num_postprocess_workers"),
    ("text is made in this process", (str, None), "postprocess_tokenizer_dir"),
    ("there is no server", (1,), "num_serve_frontends"),
    ("text is returned as it is decoded", (None,), "post_processor_hook"),
    ("there is no server that splits answers", (str, None), "reasoning_parser"),
    ("a stream reports every step", (1,), "stream_interval"),
    ("a stream reports every step", (bool,), "enable_early_first_token_response"),
    ("the collector is frozen while it runs", (int,), "garbage_collection_gen0_threshold"),
    ("no stream calls the host back", (bool,), "enable_low_latency_host_dispatch"),
    ("weights stay on the device", (False,), "enable_sleep"),
    ("weights stay on the device", (None,), "sleep_config"),
    (_NO_CODE, (False,), "trust_remote_code skip_tokenizer_init"),
    (_NO_CODE, (None,), "tokenizer custom_tokenizer"),
    (_NO_CODE, ("auto",), "tokenizer_mode"),
    ("model is a directory", (None,), "revision tokenizer_revision"),
    ("the checkpoint's config is read as it is", (None, {}), "model_kwargs"),
    (_OWN_WEIGHTS, ("auto",), "load_format"),
    (_OWN_WEIGHTS, (None, {}), "mx_config gms_config"),
    (_HF_LAYOUT, ("HF", None), "checkpoint_format"),
    (_HF_LAYOUT, (None,), "checkpoint_loader"),
    (_HF_LAYOUT, (str,), "checkpoint_io_policy"),
    ("quantised weights are not built here", (False,), "force_dynamic_quantization"),
    ("quantised weights are not built here", (dict,), "nvfp4_gemm_config"),
    ("models are not compiled", (None,), "torch_compile_config"),
    ("prompts run without CUDA graphs", ("disabled",), "prefill_cuda_graph_backend"),
    ("prompts run without CUDA graphs", (None,), "prefill_capture_num_tokens"),
    (_OWN_KERNELS, (bool,), "use_cute_dsl_blockscaling_mm use_cute_dsl_blockscaling_bmm"),
    (_OWN_KERNELS, (bool,), "use_cute_dsl_bf16_bmm use_cute_dsl_bf16_gemm use_fine_grained_sync"),
    (_OWN_KERNELS, (bool,), "enable_autotuner enable_min_latency"),
    ("tokens are sampled by kernels of the plugin", (bool,), "disable_flashinfer_sampling"),
    ("attention takes no such short cut", (False,), "enable_mla_skip_correction"),
    ("read with enable_mla_skip_correction alone", (float,), "mla_skip_correction_threshold"),
    ("attention reads all rows", (None,), "sparse_attention_config"),
    (_NO_BEAMS, (1, None), "max_beam_width"),
    (_NO_BEAMS, (bool,), "enable_speculative_beam_history_d2h"),
    ("copies to the host are never waited for early", (bool,), "sampler_force_async_worker"),
    ("tokens are sampled in the captured step", (bool,), "enable_in_graph_sampling"),
    ("there is one sampler", ("auto", "TorchSampler"), "sampler_type"),
    ("the scheduler has no policies to choose from", (None, {}), "scheduler_config"),
    ("requests are taken as they come", (None,), "reorder_policy_config"),
    (_NO_WAIT, (0, 0.0), "batch_wait_timeout_ms batch_wait_max_tokens_ratio"),
    (_NO_WAIT, (0,), "batch_wait_timeout_iters"),
    ("answers hold no logits", (False,), "gather_generation_logits"),
    ("grammars are not built here", (None,), "guided_decoding_backend"),
    ("logits are processed as requests require", (None,), "batched_logits_processor"),
    ("speculative_config has these options", (None,), "decoding_config"),
    ("each request has its sampling options", ("trtllm",), "generation_config"),
    (_NO_LORA, (False,), "enable_lora"),
    (_NO_LORA, (None,), "lora_config peft_cache_config"),
    ("this executor generates", (False,), "encode_only"),
    ("models read text", (False,), "mm_encoder_only"),
    ("models read text", (bool,), "disable_mm_encoder"),
    ("models read text", (dict, None), "multimodal_config"),
    (_NO_ENCODER, (None,), "encoder_cuda_graph_config"),
    (_NO_ENCODER, (int, None), "encoder_max_batch_size encoder_max_num_tokens"),
    (_NO_ENCODER, (bool,), "enable_encoder_decoder_mixed_cuda_graph"),
    ("such prompts are always refused", (bool,), "fail_fast_on_attention_window_too_large"),
    (_OWN_CACHE, (None,), "kv_connector_config kv_cache_compression_config"),
    (
        _OWN_KERNELS,
        _table(
            (_OWN_KERNELS, (str,), "backend"),
            (_OWN_KERNELS, (int, None), "max_num_tokens"),
            (_OWN_KERNELS, (bool,), "disable_finalize_fusion"),
            (_ONE_GPU, (None,), "load_balancer"),
            (
                "products of experts keep the model's type",
                (False,),
                "use_low_precision_moe_combine",
            ),
        ),
        "moe_config",
    ),
)
"""At the top level of the file."""

KV_CACHE: Mapping[str, HostKey] = _table(
    ("the cache has the model's type", ("auto",), "dtype"),
    ("the cache has the model's type", (int, None), "fp8_context_mla_kv_len_cap"),
    ("windows are the model's", (None,), "max_attention_window sink_token_length"),
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
    (_NO_LOG, (int,), "iteration_stats_interval"),
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
    ("steps that generate are captured", ("decode",), "mode"),
    ("0 is TensorRT-LLM's null", (0,), "max_batch_size"),
)
"""Under ``cuda_graph_config``."""

SPECULATIVE: Mapping[str, HostKey] = _table(
    (_NO_TREE, (None,), "max_total_draft_tokens dynamic_tree_max_topK"),
    (_NO_TREE, (False,), "use_dynamic_tree"),
    ("the checkpoint holds the MTP layers", (None,), "speculative_model speculative_model_dir"),
    (_OWN_WEIGHTS, (None,), "load_format"),
    ("suffix automata are not built here", (None,), "sa_config"),
    (_OWN_KERNELS, (str, None), "moe_backend"),
    ("drafts are truncated as their targets are", (False,), "draft_skip_top_k_top_p"),
    ("MTP always runs in one engine", (True,), "mtp_eagle_one_model"),
    ("mtp.verification selects it", (False,), "use_rejection_sampling"),
    ("sampling is always on", (bool,), "allow_advanced_sampling"),
    ("every filter is available", ("full",), "advanced_sampling_mode"),
    ("penalties are always on", (bool,), "enable_penalty"),
    ("the gate goes by acceptance_window", (None, 0), "acceptance_rate_window_size"),
    ("the gate goes by acceptance_window", (None,), "acceptance_rate_threshold"),
)
"""Under a ``speculative_config`` of MTP."""
