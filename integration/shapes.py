"""Sizes of the models with random weights that benchmarks measure, each with one MTP layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ACCEPTANCE = [0.78, 0.605, 0.467, 0.36, 0.28, 0.22, 0.17]
"""Synthetic acceptance: share of steps that accept at least 1, 2, ... drafts."""
SHAPES: dict[str, dict[str, Any]] = {
    "8gb": {
        "family": "glm4_moe",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 18,
        "first_k_dense_replace": 17,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 129280,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_qk_norm": False,
    },
    "sparse": {
        "family": "glm4_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "first_k_dense_replace": 0,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "n_shared_experts": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_qk_norm": False,
    },
    "toy": {
        "family": "glm4_moe",
        "num_hidden_layers": 2,
        "vocab_size": 256,
        "max_position_embeddings": 1024,
        "init_std": 0.08,
    },
}
"""``sparse``: every layer is a mixture of experts, with one shared expert as GLM-4.5, DeepSeek-V3
and Qwen3.5 have it. In bfloat16 the experts of its 24 layers are 29.0 GB, all weights 32.7 GB."""

_VLLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 1,
}


def vllm_config(shape: str) -> dict[str, Any]:
    """Return the ``config.json`` of a shape for vLLM, which makes the weights itself."""
    sizes = {name: value for name, value in SHAPES[shape].items() if name != "family"}
    return {**_VLLM, **sizes, "max_position_embeddings": 40960}


def write_config(folder: Path, config: dict[str, Any]) -> str:
    """Write a ``config.json``, all that an engine needs with ``load_format="dummy"``; returns the
    path of its folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
