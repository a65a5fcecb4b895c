"""`LLMConfig`: what the executor reads, with its KV cache and its CUDA graphs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator
from typing_extensions import Self, override

from mtp_plugin.config import host_keys
from mtp_plugin.config.messages import got, join
from mtp_plugin.config.schema import ConfigModel, Problem, drop_host_keys, report_set_aside
from mtp_plugin.config.speculative import MTPDecodingConfig, SpeculativeConfig, is_mtp
from mtp_plugin.config.values import MAX_ENGINE_SEED, BatchSizes, FilePath, PositiveInt, Switch


class KVCacheConfig(ConfigModel):
    """``kv_cache_config``: the paged KV cache of target and MTP layers."""

    host_keys = host_keys.KV_CACHE

    tokens_per_block: PositiveInt = Field(default=32, description="tokens per KV block")
    max_tokens: PositiveInt | None = Field(
        default=None, description="tokens in the whole cache; null: from free memory"
    )
    free_gpu_memory_fraction: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="share of the free device memory that the cache may take",
    )


KvCacheConfig = KVCacheConfig
"""TensorRT-LLM's spelling."""


class CudaGraphConfig(ConfigModel):
    """``cuda_graph_config``: for which batch sizes a step is captured."""

    host_keys = host_keys.CUDA_GRAPHS

    aliases: ClassVar[Mapping[str, str]] = {"cuda_graph_batch_sizes": "batch_sizes"}

    batch_sizes: BatchSizes | None = Field(
        default=None,
        description="batch sizes to capture, kept ascending; null: chosen up to the largest",
    )
    max_batch_size: PositiveInt | None = Field(
        default=None,
        description="largest batch size to capture; null: the top-level max_batch_size",
    )
    enable_padding: bool = Field(
        default=False,
        description="pad a batch up to the next captured size instead of running eagerly",
    )
    capture: Literal["lazy", "all"] = Field(
        default="lazy",
        description="lazy: at start-up the graphs of greedy and sampled requests, the others when "
        "no request runs (mtp-plugin serve) or at the 4th step that needs one; all: every graph at "
        "start-up",
    )
    prompt_tokens: BatchSizes | None = Field(
        default=None,
        description="prompt tokens of a step to capture, padded (needs enable_padding); null: 64 "
        "to 1024; []: none",
    )

    @field_validator("batch_sizes", mode="after")
    @classmethod
    def _sort_sizes(cls, sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return None if sizes is None else tuple(sorted(sizes))

    @property
    def largest(self) -> int | None:
        """The largest batch size named here."""
        return self.batch_sizes[-1] if self.batch_sizes else self.max_batch_size

    @override
    def _problems(self) -> Iterator[Problem]:
        if self.prompt_tokens and not self.enable_padding:
            yield "prompt_tokens", "expected null or [] without enable_padding: true"
        if self.batch_sizes is None:
            return
        if not self.batch_sizes:
            yield "batch_sizes", "expected at least one batch size, got an empty list"
        twice = sorted(size for size, count in Counter(self.batch_sizes).items() if count > 1)
        if twice:
            yield "batch_sizes", f"expected every size once, got {join(twice)} more than once"
        if self.max_batch_size not in (None, max(self.batch_sizes, default=None)):
            yield "batch_sizes", "expected either batch_sizes or max_batch_size, got both"


class LLMConfig(ConfigModel):
    """The YAML file of the embedded executor, or one of TensorRT-LLM's for one GPU."""

    host_keys = host_keys.TOP_LEVEL_OF_ALL

    renamed: ClassVar[Mapping[str, str]] = {
        "enable_overlap_scheduler": "write disable_overlap_scheduler with the opposite value",
        "use_overlap_scheduler": "write disable_overlap_scheduler with the opposite value",
        "use_cuda_graph": "write cuda_graph_config: {} (graphs) or null (none)",
        "cuda_graph_batch_sizes": "write cuda_graph_config: {batch_sizes: _}",
        "cuda_graph_max_batch_size": "write cuda_graph_config: {max_batch_size: _}",
        "cuda_graph_padding_enabled": "write cuda_graph_config: {enable_padding: _}",
        "kv_cache_free_gpu_memory_fraction": "write kv_cache_config: {free_gpu_memory_fraction: _}",
        "model_dir": "write model",
        "model_path": "write model",
        "max_input_len": "write max_seq_len (prompt plus output)",
        "block_size": "write kv_cache_config: {tokens_per_block: _}",
        "num_gpu_blocks_override": "write kv_cache_config: {max_tokens: _}, a number of tokens",
        "async_scheduling": "write disable_overlap_scheduler with the opposite value",
        "speculative_algorithm": "write speculative_config: {decoding_type: MTP, max_draft_len: _}",
        "speculative_num_steps": "write speculative_config: {decoding_type: MTP, max_draft_len: _}",
        "speculative_num_draft_tokens": "write speculative_config: {decoding_type: MTP, "
        "max_draft_len: _}, one less than this number",
        "mem_fraction_static": "write gpu_memory_utilization",
        "chunked_prefill_size": "write max_num_tokens (tokens per step)",
        "disable_cuda_graph": "write cuda_graph_config: {} (graphs) or null (none)",
        "cuda_graph_max_bs": "write cuda_graph_config: {max_batch_size: _}",
        "attention_backend": "write attn_backend",
    }

    aliases: ClassVar[Mapping[str, str]] = {
        "max_model_len": "max_seq_len",
        "max_num_seqs": "max_batch_size",
        "max_num_batched_tokens": "max_num_tokens",
        "torch_dtype": "dtype",
        "context_length": "max_seq_len",
        "max_running_requests": "max_batch_size",
        "disable_overlap_schedule": "disable_overlap_scheduler",
        "random_seed": "seed",
    }

    model: FilePath = Field(
        description="checkpoint directory; relative: from the YAML file's folder"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="type of weights and KV cache; auto: the checkpoint's, float32 on CPU",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="where the model runs; auto: CUDA when present"
    )
    max_batch_size: PositiveInt = Field(
        default=8, description="maximum number of requests per step"
    )
    max_num_tokens: PositiveInt = Field(
        default=2048, description="maximum number of tokens per step"
    )
    max_seq_len: PositiveInt | None = Field(
        default=None,
        description="maximum length of prompt plus output; null: from the model",
    )
    kv_cache_config: KVCacheConfig = Field(
        default_factory=KVCacheConfig, description="the paged KV cache"
    )
    gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="share of the whole device memory for weights, cache and everything else, as "
        "in vLLM; null: kv_cache_config.free_gpu_memory_fraction",
    )
    attn_backend: Literal["auto", "sdpa", "triton"] = Field(
        default="auto",
        description="attention over the cache; auto: Triton where device and heads have it",
    )
    fused_layers: Switch = Field(
        default="auto",
        description="run the layers in fewer, fused launches where recognised; auto: on CUDA",
    )
    cuda_graph_config: CudaGraphConfig | None = Field(
        default=None, description="captured batch sizes; null: no CUDA graphs"
    )
    disable_overlap_scheduler: bool = Field(
        default=False, description="true: the host waits for each step before it prepares the next"
    )
    enable_chunked_prefill: bool = Field(
        default=True, description="split prompts that do not fit into max_num_tokens"
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        le=MAX_ENGINE_SEED,
        description="combined with the request number into the seed of requests without one, with "
        "and without drafts; null: speculative_config.mtp.seed",
    )
    speculative_config: SpeculativeConfig | None = Field(
        default=None, description="the drafter, chosen by decoding_type; null: target-only decoding"
    )

    @classmethod
    @override
    def _prepare(cls, data: dict[Any, Any], info: ValidationInfo) -> Iterator[Problem]:
        yield from _read_vllm(data)
        names = drop_host_keys(cls, data)
        for section, model in _SECTIONS.items():
            inner = data.get(section)
            if isinstance(inner, BaseModel) and not isinstance(inner, ConfigModel):
                inner = data[section] = _as_mapping(inner)
            if isinstance(inner, Mapping) and (model is not MTPDecodingConfig or is_mtp(inner)):
                data[section] = dict(inner)
                names += [f"{section}.{name}" for name in drop_host_keys(model, data[section])]
        report_set_aside(cls, names, info)
        yield from super()._prepare(data, info)

    @property
    def engine_seed(self) -> int:
        """``seed``, or that of ``speculative_config.mtp``."""
        if self.seed is not None:
            return self.seed
        spec = self.speculative_config
        return spec.mtp.seed if isinstance(spec, MTPDecodingConfig) else 0

    def resolve(self, num_mtp_layers: int) -> Self:
        """The same config with K filled in from the checkpoint (`MTPDecodingConfig.resolve`)."""
        if not isinstance(self.speculative_config, MTPDecodingConfig):
            return self
        resolved = self.speculative_config.resolve(num_mtp_layers)
        return self.model_validate({**dict(self), "speculative_config": resolved})

    @override
    def _problems(self) -> Iterator[Problem]:
        spec, graphs = self.speculative_config, self.cuda_graph_config
        draft_len = 0
        if isinstance(spec, MTPDecodingConfig):
            draft_len = spec.max_draft_len or 0
            for key, message in spec.mode_problems():
                yield f"speculative_config.{key}", message
            if self.seed is not None and spec.mtp.seed not in (0, self.seed):
                yield (
                    "seed",
                    f"{self.seed} contradicts speculative_config.mtp.seed: {spec.mtp.seed}; leave "
                    "one out",
                )
        is_given = "free_gpu_memory_fraction" in self.kv_cache_config.model_fields_set
        if self.gpu_memory_utilization is not None and is_given:
            yield (
                "gpu_memory_utilization",
                "expected either this or kv_cache_config.free_gpu_memory_fraction, got both",
            )
        least = self.max_batch_size * (draft_len + 1)
        if self.max_num_tokens < least:
            with_drafts = f" times max_draft_len + 1 ({draft_len + 1})" if draft_len else ""
            yield (
                "max_num_tokens",
                f"expected at least max_batch_size ({self.max_batch_size}){with_drafts}"
                f"{f', which is {least}' if draft_len else ''}, got {self.max_num_tokens}",
            )
        if graphs is None:
            return
        if self.device == "cpu":
            yield "cuda_graph_config", "expected null with device: cpu"
        if graphs.largest is not None and graphs.largest > self.max_batch_size:
            name = "max_batch_size" if graphs.batch_sizes is None else "batch_sizes"
            yield (
                f"cuda_graph_config.{name}",
                f"expected at most max_batch_size ({self.max_batch_size}), got {graphs.largest}",
            )


ConfigModel.outermost = LLMConfig


def _read_vllm(data: dict[Any, Any]) -> Iterator[Problem]:
    """Rewrite vLLM's keys that have no equal here."""
    if data.get("enforce_eager") is True:
        del data["enforce_eager"]
        if data.setdefault("cuda_graph_config", None) is not None:
            yield "enforce_eager", "true contradicts cuda_graph_config; leave one of them out"
    speculative = data.get("speculative_config")
    if isinstance(speculative, str):
        with suppress(ValueError, RecursionError):
            data["speculative_config"] = speculative = json.loads(speculative)
    if not isinstance(speculative, Mapping):
        return
    if "method" not in speculative and not (
        "num_speculative_tokens" in speculative and "decoding_type" not in speculative
    ):
        return
    inner = {"decoding_type": "MTP", **speculative}
    if inner.get("model", data) == data.get("model"):
        del inner["model"]
    method = inner.pop("method", "mtp")
    data["speculative_config"] = inner
    if not (isinstance(method, str) and method.casefold().endswith("mtp")):
        yield "speculative_config.method", f"expected 'mtp', got {got(method)}"
    elif not is_mtp(inner):
        yield (
            "speculative_config.method",
            f"{method!r} contradicts decoding_type: {got(inner['decoding_type'])}; leave one out",
        )


def _as_mapping(section: BaseModel) -> dict[str, Any]:
    """Return what was given to a config object of TensorRT-LLM, or of its adapter."""
    given = section.model_dump(exclude_unset=True)
    if type(section).__name__ == "MTPDecodingConfig":
        given["decoding_type"] = "MTP"
    return given


_SECTIONS: Mapping[str, type[ConfigModel]] = {
    "kv_cache_config": KVCacheConfig,
    "cuda_graph_config": CudaGraphConfig,
    "speculative_config": MTPDecodingConfig,
}
