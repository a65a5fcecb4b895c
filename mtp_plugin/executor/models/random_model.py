"""Models of any size with random weights, made on their device without a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from mtp_plugin.errors import ConfigError
from mtp_plugin.executor.models.block_layout import build_layers, target_class
from mtp_plugin.executor.models.config_reader import facts_from_config
from mtp_plugin.executor.models.families import family_of
from mtp_plugin.executor.models.loader import LoadedModel, check_attention
from mtp_plugin.executor.models.testing import WeightDice, centred_norms, random_config


def random_model(
    family: str,
    *,
    num_mtp_layers: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    attn_implementation: str = "sdpa",
    init_std: float = 0.02,
    **config_overrides: Any,
) -> LoadedModel:
    """A model of a family with seeded random weights, as `load_model` would return it.

    The same arguments give the same weights on the same kind of device. Sizes that are not given
    are those of `write_random_checkpoint`.

    Args:
        family: a model type of `FAMILIES`.
        num_mtp_layers: MTP layers to declare and to make.
        seed: of the weights.
        dtype: fp32, fp16 or bf16, but for tensors that transformers keeps in fp32.
        device: where the weights are drawn.
        attn_implementation: name of an attention function registered with transformers.
        init_std: standard deviation of linear weights.
        config_overrides: values of config.json, for example `hidden_size=4096`.

    Raises:
        UnsupportedModelError: the family does not run here.
        ConfigError: a count of MTP layers that the family's configs cannot declare, a dtype or an
            attention function that cannot be used.
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ConfigError(f"dtype: expected float32, float16 or bfloat16, got {dtype}")
    check_attention(attn_implementation)
    entry = family_of(family)
    raw, config = random_config(entry, num_mtp_layers, dtype, config_overrides)
    target = _without_values(config, dtype, device, attn_implementation)
    dice = WeightDice(seed, init_std, 1.0, centred_norms(target), device)
    tied = config.tie_word_embeddings
    for key, tensor in target.state_dict().items():
        if not (tied and key == "lm_head.weight"):
            tensor.copy_(dice.roll(key, tuple(tensor.shape), tensor.dtype))
    layers = build_layers(target, target.config, entry, num_mtp_layers)
    kept_in_fp32 = tuple(getattr(target, "_keep_in_fp32_modules_strict", None) or ())
    for layer in layers:
        _fill(layer, dice, dtype, kept_in_fp32)
    return LoadedModel(
        target=target.eval().requires_grad_(False),
        mtp_layers=layers.eval().requires_grad_(False),
        facts=facts_from_config(raw, where=Path(f"random {family} model")),
        family=entry,
    )


def _without_values(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device | str, attention: str
) -> PreTrainedModel:
    """The target with storage on the device; only what is computed from the config has values."""
    cls: Any = target_class(config)
    with torch.device(device), no_init_weights():
        target = cls._from_config(config, dtype=dtype, attn_implementation=attention)
    # where weights are not initialised transformers ties none
    target.tie_weights()
    return cast(PreTrainedModel, target)


def _fill(
    layer: nn.Module, dice: WeightDice, dtype: torch.dtype, kept_in_fp32: tuple[str, ...]
) -> None:
    state = {}
    for key, tensor in layer.state_dict().items():
        kept = any(part in key for part in kept_in_fp32)
        state[key] = dice.roll(key, tuple(tensor.shape), torch.float32 if kept else dtype)
    layer.load_state_dict(state, assign=True)
