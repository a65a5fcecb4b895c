"""What a config comes to on a machine and a checkpoint, and what cannot be there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mtp_plugin.config import LLMConfig
from mtp_plugin.errors import ConfigError, format_value
from mtp_plugin.executor.models import FusedModel, LoadedModel, ModelFacts
from mtp_plugin.speculative.plugin import DraftPlan, SpeculativePlugin, find_plugin, make_plan

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class ResolvedConfig:
    """A config, and all that it comes to before any weight is loaded."""

    config: LLMConfig
    """With the draft length that the checkpoint gives where the file names none."""
    facts: ModelFacts
    plugin: SpeculativePlugin
    plan: DraftPlan
    device: torch.device
    max_seq_len: int
    """Tokens of a request at most."""


def resolve_config(
    config: LLMConfig, facts: ModelFacts, report: Callable[[str], None]
) -> ResolvedConfig:
    """Look a config over.

    Args:
        facts: of its checkpoint.
        report: called with a line where an option changes nothing here.

    Raises:
        ConfigError: an option that cannot be on this checkpoint or machine.
        PluginError: nothing speculates in the way that is asked for.
    """
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
    """The device of ``auto``, ``cpu`` or ``cuda``.

    Raises:
        ConfigError: another name, or CUDA was asked for, and there is none.
    """
    if name not in DEVICES:
        raise ConfigError(f"device: expected one of {', '.join(DEVICES)}, got {format_value(name)}")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, but torch sees no CUDA device")
    return torch.device(name)


def resolve_dtype(name: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of a name; ``auto``: as ``stored``, on a CPU float32."""
    if name == "auto":
        # a CPU gains nothing from half precision, and float32 is exact against target-only decoding
        return torch.float32 if device.type == "cpu" else stored
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def resolve_fusing(config: LLMConfig, device: torch.device) -> bool:
    """Whether layers that are recognised run fused; ``auto``: on CUDA."""
    if config.fused_layers == "auto":
        return device.type == "cuda"
    return config.fused_layers


def resolve_max_seq_len(config: LLMConfig, positions: int) -> int:
    """Tokens of a request at most: as configured, else the model's positions.

    Raises:
        ConfigError: more than these.
    """
    if config.max_seq_len is None:
        return positions
    if config.max_seq_len > positions:
        raise ConfigError(
            f"max_seq_len: {config.max_seq_len} is above the model's {positions} positions"
        )
    return config.max_seq_len


def check_budget(config: LLMConfig, plan: DraftPlan) -> None:
    """Refuse a token budget that cannot hold a full batch of generations, whatever the plugin.

    Raises:
        ConfigError: with the numbers.
    """
    least = config.max_batch_size * plan.step_rows
    if config.max_num_tokens < least:
        raise ConfigError(
            f"max_num_tokens: expected at least max_batch_size ({config.max_batch_size}) times the "
            f"{plan.step_rows} rows of a generation, which is {least}, got {config.max_num_tokens}"
        )


def check_graphs(config: LLMConfig, device: torch.device, report: Callable[[str], None]) -> None:
    """Tell where a device cannot have the graphs that were asked for."""
    if config.cuda_graph_config is not None and device.type != "cuda":
        report("no CUDA device: steps run eagerly, padded as the graphs would be")


def check_model(resolved: ResolvedConfig, model: LoadedModel) -> None:
    """Refuse a model that is not what the config asks for, as a shared one may be.

    Raises:
        ConfigError: too few MTP layers, another dtype or device, or fused where it should not be,
            or not where it should.
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
            f"dtype: {config.dtype} was asked for, the loaded model is {weight.dtype}"
        )
    if weight.device.type != device.type:
        raise ConfigError(f"device: {device} was asked for, the loaded model is on {weight.device}")
    fused = isinstance(model, FusedModel) and bool(model.report.fused)
    if config.fused_layers is True and not fused:
        raise ConfigError(
            f"fused_layers: true was asked for, no layer of the {model.facts.model_type} model is "
            f"fused; expected auto or false"
        )
    if config.fused_layers is False and fused:
        raise ConfigError("fused_layers: false was asked for, the loaded model is fused")
