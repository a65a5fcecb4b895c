"""Random models and random checkpoints in the real layouts of the families."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig

from mtp_plugin.checkpoint.families import MTPFamily, family_of
from mtp_plugin.checkpoint.files import SINGLE_FILE
from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.embedded.models.config_reader import FULL_ATTENTION, check_config
from mtp_plugin.hosts.embedded.models.loader import (
    LoadedModel,
    build_layers,
    check_attention,
    plan_layers,
    plan_target,
    uninitialized_target,
    without_storage,
)

_DENSE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_DEEPSEEK_EXPERTS = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_COPIES = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
"""Tensors of the target that released MTP layers store once more."""
_SHAPES: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        **_DENSE,
        **_DEEPSEEK_EXPERTS,
        "architectures": ["Glm4MoeForCausalLM"],
        "first_k_dense_replace": 2,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "deepseek_v3": {
        **{key: value for key, value in _DENSE.items() if key != "head_dim"},
        **_DEEPSEEK_EXPERTS,
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_group": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "mimo": {
        **_DENSE,
        "architectures": ["MiMoForCausalLM"],
        "attention_bias": True,
        "use_sliding_window": False,
        "sliding_window": 128,
        "max_window_layers": 2,
    },
    "qwen3_next": {
        **_DENSE,
        "architectures": ["Qwen3NextForCausalLM"],
        "layer_types": None,
        "partial_rotary_factor": 0.25,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
}


def write_random_checkpoint(
    path: str | Path,
    family: str,
    *,
    num_mtp_layers: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    init_std: float = 0.08,
    residual_scale: float = 1.0,
    echo_draft: bool = False,
    **config_overrides: Any,
) -> Path:
    """Write a random checkpoint of a family: config, generation config, one safetensors file.

    By default hidden size 64, 2 layers, vocabulary 512. Tensor names are those of the family's real
    checkpoints, with experts stored one by one. The same arguments give the same bytes.

    Args:
        path: directory to write, created if it does not exist.
        family: a model type of `FAMILIES`.
        num_mtp_layers: number of MTP layers to declare and to store.
        seed: seed of the weights.
        dtype: dtype of every stored tensor.
        init_std: standard deviation of linear weights.
        residual_scale: factor on the outputs of attention and feed-forward layers. At 0 the next
            token depends on the last token alone.
        echo_draft: make the MTP layers predict from the newest token much as the target does, so
            that many drafts are accepted: all of them at a `residual_scale` of 0, about 7 in 10
            first drafts at 0.3, 3 in 10 at 1. Otherwise about one in `vocab_size` is.
        config_overrides: values of config.json to set, for example `vocab_size=100`.

    Returns:
        The directory.

    Raises:
        UnsupportedModelError: the family is not supported.
        ConfigError: the family's configs cannot declare this number of MTP layers.
    """
    entry = family_of(family)
    raw, config = random_config(entry, num_mtp_layers, dtype, config_overrides)
    tensors = _random_tensors(
        config, entry, num_mtp_layers, seed, init_std, residual_scale, echo_draft
    )
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()},
        directory / SINGLE_FILE,
        metadata={"format": "pt"},
    )
    _write_json(directory / "config.json", raw)
    token_ids = {key: value for key, value in raw.items() if key.endswith("os_token_id")}
    _write_json(directory / "generation_config.json", token_ids)
    return directory


def random_model(
    family: str,
    *,
    num_mtp_layers: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    attn_implementation: str = "sdpa",
    init_std: float = 0.02,
    residual_scale: float = 1.0,
    echo_draft: bool = False,
    **config_overrides: Any,
) -> LoadedModel:
    """Create a model of a family with seeded random weights, in the form that `load_model` returns.

    No checkpoint is written: weights are generated on `device`. The same arguments give the same
    weights on the same kind of device. Default sizes are those of `write_random_checkpoint`.

    Args:
        family: a model type of `FAMILIES`.
        num_mtp_layers: number of MTP layers to declare and to create.
        seed: seed of the weights.
        dtype: fp32, fp16 or bf16; tensors that transformers keeps in fp32 stay in fp32.
        device: device of the weights.
        attn_implementation: name of an attention function registered with transformers.
        init_std: standard deviation of linear weights.
        residual_scale, echo_draft: see `write_random_checkpoint`.
        config_overrides: values of config.json, for example `hidden_size=4096`.

    Raises:
        UnsupportedModelError: the family is not supported.
        ConfigError: the family's configs cannot declare this number of MTP layers, or the dtype or
            attention function is not supported.
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ConfigError(f"dtype: expected float32, float16 or bfloat16, got {dtype}")
    check_attention(attn_implementation)
    entry = family_of(family)
    raw, config = random_config(entry, num_mtp_layers, dtype, config_overrides)
    target = uninitialized_target(config, dtype, attn_implementation, device)
    # without initialization transformers does not tie weights
    target.tie_weights()
    weights = _RandomWeights(seed, init_std, residual_scale, _has_centred_norms(target), device)
    tied = config.tie_word_embeddings
    for key, tensor in target.state_dict().items():
        if not (tied and key == "lm_head.weight"):
            tensor.copy_(weights.sample(key, tuple(tensor.shape), tensor.dtype))
    layers = build_layers(target, target.config, entry, num_mtp_layers)
    kept_in_fp32 = tuple(getattr(target, "_keep_in_fp32_modules_strict", None) or ())
    decoder: Any = target.get_decoder()
    echo = _Echo(entry, weights, decoder.norm.weight) if echo_draft else None
    for layer in layers:
        _fill(layer, weights, dtype, kept_in_fp32, echo)
    return LoadedModel(
        target=target.eval().requires_grad_(False),
        mtp_layers=layers.eval().requires_grad_(False),
        facts=check_config(raw, {}, Path(f"random {family} model")).facts,
        family=entry,
    )


def random_config(
    family: MTPFamily, num_mtp_layers: int, dtype: torch.dtype, overrides: dict[str, Any]
) -> tuple[dict[str, Any], PreTrainedConfig]:
    """Return (config.json of a small model of the family, transformers config of its target).

    Raises:
        ConfigError: the family's configs cannot declare this number of MTP layers.
    """
    if family.count_key is None and num_mtp_layers != family.default_count:
        raise ConfigError(
            f"num_mtp_layers: {family.model_type} checkpoints always have {family.default_count}, "
            f"got {num_mtp_layers}"
        )
    raw = {**_SHAPES[family.model_type], **overrides, "model_type": family.model_type}
    if "layer_types" in raw and "layer_types" not in overrides:
        raw["layer_types"] = [FULL_ATTENTION] * raw["num_hidden_layers"]
    raw["torch_dtype"] = str(dtype).removeprefix("torch.")
    if family.count_key is not None:
        raw[family.count_key] = num_mtp_layers
    config = CONFIG_MAPPING[family.target_type].from_dict({**raw, "model_type": family.target_type})
    return raw, config


def _random_tensors(
    config: PreTrainedConfig,
    family: MTPFamily,
    num_mtp_layers: int,
    seed: int,
    init_std: float,
    residual_scale: float,
    echo_draft: bool,
) -> dict[str, torch.Tensor]:
    target = without_storage(config)
    layers = build_layers(target, config, family, num_mtp_layers)
    weights = _RandomWeights(seed, init_std, residual_scale, _has_centred_norms(target))
    tensors: dict[str, torch.Tensor] = {}
    for plan in plan_target(target, stored=()):
        tensors.update(plan.take_apart(weights.sample(plan.module_key, plan.shape)))
    for depth, plans in enumerate(plan_layers(layers, family, config, stored=())):
        for plan in plans:
            value = weights.sample(plan.module_key, plan.shape)
            if echo_draft:
                echo = _Echo(family, weights, tensors["model.norm.weight"])
                value = echo.change(plan.module_key, value)
            tensors.update(plan.take_apart(value))
        for name, source in _COPIES.items() if family.is_absolute else ():
            if source in tensors:
                stored_name = f"model.layers.{config.num_hidden_layers + depth}.{name}.weight"
                tensors[stored_name] = tensors[source].clone()
    return tensors


class _RandomWeights:
    """Samples seeded values for a tensor by its name."""

    def __init__(
        self,
        seed: int,
        init_std: float,
        residual_scale: float,
        centred_norms: bool,
        device: torch.device | str = "cpu",
    ) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.init_std = init_std
        self.residual_scale = residual_scale
        # the weight with which a norm multiplies by one
        self.norm_one = 0.0 if centred_norms else 1.0

    def sample(
        self, key: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        device = self.generator.device
        noise = torch.randn(shape, generator=self.generator, device=device, dtype=dtype)
        name = key.removesuffix(".weight").rpartition(".")[2]
        if "norm" in name:
            return self.norm_one + 0.1 * noise
        if name == "embed_tokens":
            return noise
        if name in ("o_proj", "down_proj"):
            return self.residual_scale * self.init_std * noise
        if name == "e_score_correction_bias" or name == "bias":
            return 0.02 * noise
        return self.init_std * noise


@dataclass(frozen=True)
class _Echo:
    """Makes MTP layers predict from the newest token much as the target does."""

    family: MTPFamily
    weights: _RandomWeights
    target_norm: torch.Tensor

    def change(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """Return the weights of a tensor of an MTP layer in place of random ones."""
        if key == "eh_proj.weight":
            identity = torch.eye(value.shape[0], dtype=value.dtype, device=value.device)
            state_half = self.weights.residual_scale * value[:, : value.shape[0]]
            embed_first = self.family.traits.concat == "embed_hidden"
            return torch.cat(
                (identity, state_half) if embed_first else (state_half, identity), dim=1
            )
        if key == "enorm.weight":
            return torch.full_like(value, self.weights.norm_one)
        if key == "norm.weight":
            return self.target_norm.clone()
        return value


def _has_centred_norms(target: nn.Module) -> bool:
    """Whether the family's norms multiply by 1 + weight: then new weights are initialized to 0."""
    norm_class = type(target.get_decoder().norm)  # type: ignore[operator]
    return not bool(norm_class(1).weight.any())


def _fill(
    layer: nn.Module,
    weights: _RandomWeights,
    dtype: torch.dtype,
    kept_in_fp32: tuple[str, ...],
    echo: _Echo | None,
) -> None:
    state = {}
    for key, tensor in layer.state_dict().items():
        kept = any(part in key for part in kept_in_fp32)
        value = weights.sample(key, tuple(tensor.shape), torch.float32 if kept else dtype)
        state[key] = value if echo is None else echo.change(key, value)
    layer.load_state_dict(state, assign=True)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
