"""Resolves a config against a checkpoint and the device, and checks that it can run there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mtp_plugin.config import LLMConfig, MTPDecodingConfig
from mtp_plugin.errors import ConfigError, format_value
from mtp_plugin.hosts.embedded.models import FusedModel, LoadedModel, ModelFacts, check_declared
from mtp_plugin.speculative.plugin import DraftPlan, SpeculativePlugin, find_plugin, make_plan

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class ResolvedConfig:
    """A config with everything that follows from it before any weight is loaded."""

    config: LLMConfig
    """The draft length is set, by default from the checkpoint."""
    facts: ModelFacts
    plugin: SpeculativePlugin
    plan: DraftPlan
    device: torch.device
    max_seq_len: int
    """Maximum number of tokens of a request."""


def resolve_config(
    config: LLMConfig, facts: ModelFacts, report: Callable[[str], None]
) -> ResolvedConfig:
    """Resolve a config.

    Args:
        facts: what the checkpoint's config files say.
        report: called with one line for each option that has no effect here.

    Raises:
        CheckpointError: drafts are requested, MTP layers are stored and not declared.
        ConfigError: an option is not possible with this checkpoint or device.
        PluginError: no plugin provides the requested speculative decoding.
    """
    if isinstance(config.speculative_config, MTPDecodingConfig) and not facts.num_mtp_layers:
        check_declared(config.model)
    config = config.resolve(facts.num_mtp_layers)
    speculative = config.speculative_config
    plugin = find_plugin(None if speculative is None else speculative.decoding_type)
    plan = make_plan(plugin, speculative, facts.num_mtp_layers)
    check_budget(config, plan)
    device = resolve_device(config.device)
    check_graphs(config, device, report)
    max_seq_len = resolve_max_seq_len(config, facts.max_position_embeddings)
    return ResolvedConfig(config, facts, plugin, plan, device, max_seq_len)


def resolve_device(name: str) -> torch.device:
    """Return the device of ``auto``, ``cpu`` or ``cuda``.

    Raises:
        ConfigError: an unknown name, or ``cuda`` without a CUDA device.
    """
    if name not in DEVICES:
        raise ConfigError(f"device: expected one of {', '.join(DEVICES)}, got {format_value(name)}")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was requested, but torch sees no CUDA device")
    return torch.device(name)


def resolve_dtype(name: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of a name; ``auto``: ``stored``, on a CPU float32."""
    if name == "auto":
        # a CPU gains nothing from half precision, and float32 is exact against target-only decoding
        return torch.float32 if device.type == "cpu" else stored
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def resolve_fusing(config: LLMConfig, device: torch.device) -> bool:
    """Whether known layers run fused kernels; ``auto``: on CUDA."""
    if config.fused_layers == "auto":
        return device.type == "cuda"
    return config.fused_layers


def resolve_max_seq_len(config: LLMConfig, positions: int) -> int:
    """Return the maximum number of tokens of a request; default: the model's positions.

    Raises:
        ConfigError: more than the model's positions.
    """
    if config.max_seq_len is None:
        return positions
    if config.max_seq_len > positions:
        raise ConfigError(
            f"max_seq_len: {config.max_seq_len} is above the model's {positions} positions"
        )
    return config.max_seq_len


def check_budget(config: LLMConfig, plan: DraftPlan) -> None:
    """Refuse a token budget that cannot hold a full batch of generation requests."""
    least = config.max_batch_size * plan.step_rows
    if config.max_num_tokens < least:
        raise ConfigError(
            f"max_num_tokens: expected at least max_batch_size ({config.max_batch_size}) times the "
            f"{plan.step_rows} rows of a generation, which is {least}, got {config.max_num_tokens}"
        )


def check_graphs(config: LLMConfig, device: torch.device, report: Callable[[str], None]) -> None:
    """Report that CUDA graphs were requested on a device without them."""
    if config.cuda_graph_config is not None and device.type != "cuda":
        report("no CUDA device: steps run eagerly, padded as the graphs would be")
    if config.gpu_memory_utilization is not None and device.type != "cuda":
        report("no CUDA device: gpu_memory_utilization has no effect")


def check_model(resolved: ResolvedConfig, model: LoadedModel) -> None:
    """Refuse a (shared) model that does not match the config.

    Raises:
        ConfigError: too few MTP layers, or another dtype, device or use of fused layers.
    """
    config, device = resolved.config, resolved.device
    if len(model.mtp_layers) < resolved.plan.num_draft_layers:
        raise ConfigError(
            f"the loaded model has {len(model.mtp_layers)} MTP layers, this config needs "
            f"{resolved.plan.num_draft_layers}"
        )
    weight = next(model.lm_head.parameters())
    if config.dtype != "auto" and weight.dtype is not getattr(torch, config.dtype):
        raise ConfigError(
            f"dtype: {config.dtype} was requested, the loaded model is {weight.dtype}"
        )
    if weight.device.type != device.type:
        raise ConfigError(f"device: {device} was requested, the loaded model is on {weight.device}")
    fused = isinstance(model, FusedModel) and bool(model.report.fused)
    if config.fused_layers is True and not fused:
        raise ConfigError(
            f"fused_layers: true was requested, no layer of the {model.facts.model_type} model is "
            f"fused; expected auto or false"
        )
    if config.fused_layers is False and fused:
        raise ConfigError("fused_layers: false was requested, the loaded model is fused")
