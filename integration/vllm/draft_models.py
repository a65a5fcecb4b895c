"""A Llama with random weights, and draft models for it: EAGLE, EAGLE3, DFlash, DFlash2 and DSpark;
and the tiny model with quantized weights, or in a longer context."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from integration.vllm.engine_process import CHECKPOINT, ROOT, has_gpu, write_one_mtp_layer

TINY = ROOT / CHECKPOINT
"""With the tokenizer of all."""
HIDDEN, INTERMEDIATE, HEAD, NUM_HEADS, VOCAB, DRAFTED = 64, 128, 32, 2, 2048, 1536
RANK, TAPS, GROUP = 8, 2, 16
PARALLEL = ("dflash", "dflash_full", "dflash2", "dspark")
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 4,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "eagle": {**LLAMA, "num_hidden_layers": 1},
    # the last ids cannot be drafted, those in the middle are
    "eagle3": {
        **LLAMA,
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFTED,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    },
    "dflash": {
        **LLAMA,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "dflash_config": {"mask_token_id": 2, "target_layer_ids": [0, 1, 2], "causal": True},
    },
    "dspark": {
        **LLAMA,
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFTED,
        "markov_rank": RANK,
        "mask_token_id": 2,
        "target_layer_ids": [0, 1, 2],
        "is_causal": True,
    },
}


_OF_DFLASH = CONFIGS["dflash"]["dflash_config"]
CONFIGS["dflash_full"] = {**CONFIGS["dflash"], "dflash_config": {**_OF_DFLASH, "causal": False}}
CONFIGS["dflash2"] = {
    **CONFIGS["dflash"],
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": {
        **_OF_DFLASH,
        "conv_kernel_size": TAPS,
        "conv_group_size": GROUP,
        "selector_rank": RANK,
        "selector_top_k": 4,
    },
}

YARN = {
    "max_position_embeddings": 8192,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
"""Extends the tiny model's context."""
SYMMETRIC = {"symmetric": True, "dynamic": False}
QUANTIZED: dict[str, dict[str, Any]] = {
    "fp8": {
        "format": "float-quantized",
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", **SYMMETRIC},
        "input_activations": {
            "num_bits": 8,
            "type": "float",
            "strategy": "token",
            "symmetric": True,
            "dynamic": True,
        },
    },
    "int4": {
        "format": "pack-quantized",
        "weights": {
            "num_bits": 4,
            "type": "int",
            "strategy": "group",
            "group_size": 32,
            **SYMMETRIC,
        },
    },
}
"""Groups of compressed-tensors."""


GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": 0,
    "hidden_size": HIDDEN,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_HEADS,
    "head_dim": HEAD,
    "global_head_dim": HEAD,
    "sliding_window": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""``gemma4``, and its ``gemma4_assistant`` of half the layers."""


def write(folder: Path, name: str) -> str:
    """Write a checkpoint; its folder.

    Args:
        name: of `CONFIGS`, or see `GEMMA4`; or of the tiny model: ``tiny`` as it is,
            ``one_mtp_layer``, ``yarn`` (config.json with `YARN`), or a key of `QUANTIZED`, with
            ``_mtp``: MTP layers too.
    """
    if name == "tiny":
        return str(TINY)
    if name == "one_mtp_layer":
        return write_one_mtp_layer(folder / name)
    if name.startswith("gemma4"):
        return _write_gemma4(folder / name, name.endswith("assistant"))
    if name not in CONFIGS:
        return _write_tiny(folder / name, *name.partition("_")[::2])
    import torch
    from safetensors.torch import save_file

    rng = torch.Generator().manual_seed(len(name))
    config = CONFIGS[name]
    tensors: dict[str, Any] = {}

    def add(key: str, *shape: int, scale: float = 0.12) -> None:
        noise = torch.randn(*shape, generator=rng)
        tensors[f"{key}.weight"] = 1 + 0.1 * noise if len(shape) == 1 else scale * noise

    attention = NUM_HEADS * HEAD
    first = "model." if name == "llama" else ""
    for number in range(config["num_hidden_layers"]):
        layer = f"{first}layers.{number}."
        width = 2 * HIDDEN if name == "eagle3" else HIDDEN
        for projection in "qkv":
            add(f"{layer}self_attn.{projection}_proj", attention, width)
        add(f"{layer}self_attn.o_proj", HIDDEN, attention)
        for projection in ("gate", "up"):
            add(f"{layer}mlp.{projection}_proj", INTERMEDIATE, HIDDEN)
        add(f"{layer}mlp.down_proj", HIDDEN, INTERMEDIATE)
        add(f"{layer}post_attention_layernorm", HIDDEN)
        if name != "eagle":
            add(f"{layer}input_layernorm", HIDDEN)
        if name == "eagle3":
            add(f"{layer}hidden_norm", HIDDEN)
        if name in PARALLEL:
            for norm in "qk":
                add(f"{layer}self_attn.{norm}_norm", HEAD)
        if name == "dflash2":
            for convolved in ("attention", "mlp"):
                part = f"{layer}{convolved}_conv."
                add(f"{part}kernel_projection", 2 * TAPS * HIDDEN // GROUP, HIDDEN)
                tensors[f"{part}base_kernel"] = torch.randn(2, TAPS, HIDDEN, generator=rng)
    if name == "llama":
        add("model.embed_tokens", VOCAB, HIDDEN)
        add("model.norm", HIDDEN)
        add("lm_head", VOCAB, HIDDEN, scale=0.04)
    else:
        add("fc", HIDDEN, (2 if name == "eagle" else 3) * HIDDEN)
    if name in ("eagle3", *PARALLEL):
        add("norm", HIDDEN)
    if name in PARALLEL:
        add("hidden_norm", HIDDEN)
    if name == "dflash2":
        add("candidate_selector.hidden_projection", RANK, HIDDEN)
        for side in ("predecessor", "successor"):
            book = 0.12 * torch.randn(VOCAB, RANK, generator=rng)
            tensors[f"candidate_selector.{side}_codebook"] = book
    if name == "dspark":
        add("markov_head.markov_w1", VOCAB, RANK)
        add("markov_head.markov_w2", DRAFTED, RANK)
    if name in ("eagle3", "dspark"):
        add("lm_head", DRAFTED, HIDDEN, scale=0.04)
        tensors["d2t"] = torch.full((DRAFTED,), VOCAB - DRAFTED)
        tensors["d2t"][: DRAFTED // 2] = 0
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    _copy_tokenizer(path)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return str(path)


def _copy_tokenizer(path: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TINY / file, path / file)


def _write_gemma4(path: Path, is_assistant: bool) -> str:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"]
    if is_assistant:
        text = {**GEMMA4, "num_hidden_layers": 2, "layer_types": kinds}
        config = AutoConfig.for_model(
            "gemma4_assistant", text_config=text, backbone_hidden_size=HIDDEN
        )
    else:
        text = {**GEMMA4, "num_hidden_layers": 4, "layer_types": 2 * kinds}
        config = AutoConfig.for_model(**text)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    _copy_tokenizer(path)
    return str(path)


def _write_tiny(path: Path, kind: str, quantized_mtp: str) -> str:
    from safetensors.torch import load_file, save_file

    shutil.copytree(TINY, path, dirs_exist_ok=True)
    config = json.loads((TINY / "config.json").read_text())
    if kind == "yarn":
        del config["rope_scaling"], config["rope_theta"], config["partial_rotary_factor"]
        config |= YARN
    else:
        first, count = config["num_hidden_layers"], config["num_nextn_predict_layers"]
        mtp = "|".join(str(first + n) for n in range(count))
        ignored = r"lm_head|.*(eh_proj|mlp\.gate|shared_head\.head)"
        if not quantized_mtp:
            ignored += rf"|model\.layers\.({mtp})\..*"
        if not has_gpu():  # kernels of quantized experts need AMX there
            ignored += r"|.*\.experts\..*"
        tensors: dict[str, Any] = {}
        for key, x in load_file(path / "model.safetensors").items():
            module = key.removesuffix(".weight")
            is_kept = re.fullmatch(ignored, module) or not module.endswith("_proj")
            tensors |= {key: x} if is_kept else _quantized(key, x.float(), kind)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": QUANTIZED[kind]["format"],
            "config_groups": {"group_0": {"targets": ["Linear"], **QUANTIZED[kind]}},
            "ignore": [f"re:({ignored})$"],
        }
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def _quantized(key: str, x: Any, kind: str) -> dict[str, Any]:
    """Return the tensors of a weight [N, K]: FP8 by row, or int4 by 32 columns, eight an int32."""
    import torch

    if kind == "fp8":
        scale = x.abs().amax(1, keepdim=True) / 448
        return {key: (x / scale).to(torch.float8_e4m3fn), f"{key}_scale": scale}
    groups = x.unflatten(1, (-1, 32))
    scale = groups.abs().amax(2, keepdim=True) / 7
    values = (groups / scale).round().long() + 8
    packed = (values.view(len(x), -1, 8) << torch.arange(0, 32, 4)).sum(2).to(torch.int32)
    return {
        f"{key}_packed": packed,
        f"{key}_scale": scale[..., 0].bfloat16(),
        f"{key}_shape": torch.tensor(x.shape),
    }
