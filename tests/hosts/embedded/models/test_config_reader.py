"""What config files may say: one message per problem, and what the executor reads of good ones."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mtp_plugin.checkpoint.vllm_command import IN_VLLM, vllm_command
from mtp_plugin.errors import CheckpointError, MTPPluginError, UnsupportedModelError
from mtp_plugin.hosts.embedded.models import (
    NOT_RUNNABLE,
    ModelFacts,
    load_model,
    preflight,
    read_config,
    read_tokenizer,
)

Edited = Callable[..., Path]


def refusal(path: Path, check: Callable[[Path], object] = read_config) -> str:
    with pytest.raises(MTPPluginError) as caught:
        check(path)
    return str(caught.value).replace(str(path), "PATH")


def all_files(path: Path) -> None:
    read_tokenizer(read_config(path))
    preflight(path)


def written(path: Path, **config: Any) -> Path:
    """A directory with a config alone."""
    (path / "config.json").write_text(json.dumps(config))
    return path


GROUPS = "expected experts from topk_group of n_group equal groups of at least 2, got"
TRANSFORMERS = "config, transformers says: "
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # family, change of config.json, begin of the message
    ("glm4_moe", {"model_type": None}, "model_type: expected text, got null"),
    ("glm4_moe", {"model_type": ["glm4_moe"]}, "model_type: expected text, got a list"),
    ("glm4_moe", {"vocab_size": "64"}, "vocab_size: expected an integer from 1 to 16777216, got"),
    ("glm4_moe", {"num_hidden_layers": True}, "num_hidden_layers: expected an integer from 1 to 1"),
    ("glm4_moe", {"num_hidden_layers": 10**6}, "num_hidden_layers: expected an integer from 1 to "),
    ("glm4_moe", {"n_routed_experts": 10**7}, "n_routed_experts: expected an integer from 1 to 65"),
    ("glm4_moe", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers: expected an integer"),
    ("glm4_moe", {"num_nextn_predict_layers": 65}, "num_nextn_predict_layers: expected an integer"),
    ("mimo", {"max_position_embeddings": 10**9}, "max_position_embeddings: expected an integer fr"),
    ("glm4_moe", {"torch_dtype": "float8"},
     "torch_dtype: expected one of 'float32', 'float16', 'bfloat16', got 'float8'"),
    ("glm4_moe", {"num_attention_heads": 4.0, "hidden_size": None},
     "hidden_size: required key is missing\n"
     "PATH/config.json: num_attention_heads: expected an integer from 1 to 65536, got 4.0"),
    ("glm4_moe", {"num_key_value_heads": 3},
     "num_key_value_heads: expected a divisor of num_attention_heads, which is 4, got 3"),
    ("deepseek_v3", {"num_key_value_heads": 2},
     "num_key_value_heads: expected as many as num_attention_heads, 4, got 2"),
    ("glm4_moe", {"partial_rotary_factor": 0.2},
     "partial_rotary_factor: expected an even number of at least 2 rotated of the 16 values of a "
     "head, got 3"),
    ("deepseek_v3", {"qk_rope_head_dim": 7}, "partial_rotary_factor: expected an even number of a"),
    ("mimo", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1 in family mimo, "),
    ("glm4_moe", {"partial_rotary_factor": 2}, "partial_rotary_factor: expected a number from 1e-"),
    ("deepseek_v3", {"n_group": 3}, f"num_experts_per_tok: {GROUPS} 2 from 1 of 3 groups of 8 exp"),
    ("deepseek_v3", {"n_group": 8}, f"num_experts_per_tok: {GROUPS} 2 from 1 of 8 groups of 8 exp"),
    ("deepseek_v3", {"topk_group": 3}, f"num_experts_per_tok: {GROUPS} 2 from 3 of 2 groups of 8"),
    ("deepseek_v3", {"num_experts_per_tok": 5}, f"num_experts_per_tok: {GROUPS} 5 from 1 of 2 gro"),
    ("qwen3_next", {"num_experts_per_tok": 5}, f"num_experts_per_tok: {GROUPS} 5 from 1 of 1 grou"),
    ("qwen3_next", {"layer_types": ["full_attention"]},
     f"expected a qwen3_next {TRANSFORMERS}StrictDataclassClassValidationError: "),
    ("glm4_moe", {"architectures": "X"}, f"expected a glm4_moe {TRANSFORMERS}StrictDataclassField"),
    ("glm4_moe", {"tie_word_embeddings": 1}, f"expected a glm4_moe {TRANSFORMERS}StrictDataclassF"),
    ("mimo", {"hidden_size": float("nan")}, f"expected a mimo {TRANSFORMERS}StrictDataclassFieldV"),
    ("mimo", {"hidden_act": "xielu"}, "hidden_act: expected one of 'silu', 'gelu', 'gelu_new', "),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid', got 'softmax'"),
    ("mimo", {"rope_scaling": {"type": "longrope", "factor": 2}},
     "rope_scaling.rope_type: expected one of 'default', 'dynamic', 'linear', 'llama3', 'yarn', "),
    ("mimo", {"rope_scaling": {"type": "linear"}}, f"expected a mimo {TRANSFORMERS}KeyError: "),
    ("mimo", {"rope_parameters": {"scale": 4}}, "rope_parameters.scale: unknown key"),
    ("mimo", {"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4,
                               "high_freq_factor": 4, "original_max_position_embeddings": 64}},
     "rope_parameters.high_freq_factor: expected above low_freq_factor, which is 4.0, got 4.0"),
    ("mimo", {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "default"}},
     "rope_scaling: expected either it or rope_parameters, got both"),
    ("mimo", {"rope_theta": 0}, "rope_theta: expected a number from 1.01 to "),
    ("mimo", {"eos_token_id": [512]}, "eos_token_id: expected ids below vocab_size, 512, got 512"),
    ("mimo", {"pad_token_id": -2}, "pad_token_id: expected ids below vocab_size, 512, got -2"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_refused_values(edited: Edited, family: str, change: dict[str, Any], message: str) -> None:
    found = refusal(edited(family, lambda config: config.update(change)))
    assert found.startswith(f"PATH/config.json: {message}")
    to_vllm = message.partition(":")[0].endswith(("rope_type", "scoring_func", "hidden_act"))
    assert found.endswith(f"; {IN_VLLM}: {vllm_command('PATH')}") == to_vllm


@pytest.mark.parametrize(
    "change",
    [
        {"intermediate_size": 2**62},
        {"hidden_size": 10**30},
        {"first_k_dense_replace": -(10**9)},
        {"hidden_size": "x" * 10**5},
        {"rope_parameters": {"rope_type": "default", "x" * 10**5: 1}},
    ],
    ids=lambda change: str(change)[:40],
)
def test_impossible_sizes_end_in_one_short_line(edited: Edited, change: dict[str, Any]) -> None:
    message = refusal(edited("glm4_moe", lambda config: config.update(change)), preflight)
    assert "\n" not in message
    assert len(message) < 1000


NESTED, DIGITS = '{"a":' * 10**5 + "1" + "}" * 10**5, '{"vocab_size": %s}' % ("9" * 5000)
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
POINTER = "got a git-lfs pointer instead of the file; download it: git -C PATH lfs pull"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", NESTED, "expected JSON, it nests too deeply"),
        ("tokenizer.json", "[" * 10**5, "expected JSON, it nests too deeply"),
        ("added_tokens.json", "[" * 10**5, "expected JSON, it nests too deeply"),
        ("config.json", DIGITS, "expected JSON, got Exceeds the limit (4300 "),
        ("generation_config.json", "\ud800", "expected JSON, got 'utf-8' codec can't decode"),
        ("generation_config.json", '{"eos_token_id": 512}', "eos_token_id: expected ids below vo"),
        ("config.json", LFS, POINTER),
        ("tokenizer.json", LFS, POINTER),
    ],
)
def test_refused_files(edited: Edited, file: str, content: str, message: str) -> None:
    path = edited("glm4_moe")
    if file.startswith("added"):
        (path / "tokenizer.json").write_text("{}")
    (path / file).write_bytes(content.encode("utf-8", "surrogatepass"))
    assert refusal(path, all_files).startswith(f"PATH/{file}: {message}")


def test_places_that_are_no_files(edited: Edited, tmp_path: Path) -> None:
    path = edited("glm4_moe")
    file = path / "config.json"
    file.unlink()
    assert refusal(path) == "checkpoint PATH: expected a file config.json, found none"
    os.mkfifo(file)
    kind = "expected a regular file, got a pipe or a device"
    assert refusal(path) == f"PATH/config.json: cannot be read: {kind}"
    for device, reason in (("/dev/zero", kind), (path, "Is a directory"), (file, "Too many level")):
        file.unlink()
        file.symlink_to(device)
        assert refusal(path).startswith(f"PATH/config.json: cannot be read: {reason}")
    with pytest.raises(CheckpointError, match=r"expected a directory|cannot be read"):
        read_config("a\0b")
    nowhere = "checkpoint PATH: expected a directory, it does not exist"
    assert refusal(tmp_path / "nowhere") == nowhere
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file").startswith("checkpoint PATH: expected a directory, got a fil")


ACTING: dict[str, Any] = {
    "transformers_weights": "other.safetensors",
    "_attn_implementation": "flash_attention_2",
    "attn_implementation": "org/kernel",
    "auto_map": {"AutoModelForCausalLM": "modeling.Model"},
    "custom_generate": "org/generate",
    "return_dict": False,
}
"""Keys on which transformers acts."""


def test_the_target_is_that_of_the_checked_files(
    edited: Edited, checkpoint: Callable[..., Path]
) -> None:
    further = {"num_labels": 10**9, "time_step_limit": [0.0, float("inf")]}
    path = edited("glm4_moe", lambda config: config.update(ACTING, **further))
    assert read_config(path).unread == (*ACTING, *further)
    shutil.copy(checkpoint("glm4_moe", seed=1) / "model.safetensors", path / "a.safetensors")
    (path / "generation_config.json").write_text(
        '{"eos_token_id": [7], "custom_generate": "org/generate", "temperature": "hot"}'
    )
    model = load_model(path)
    stored = load_file(path / "model.safetensors")
    assert torch.equal(model.embed_tokens.weight, stored["model.embed_tokens.weight"])
    assert model.target.config._attn_implementation == "sdpa"
    assert model.target.generation_config.eos_token_id == [7]
    assert model.target(input_ids=torch.tensor([[3]])).logits.shape == (1, 1, 512)


def test_facts_of_a_checkpoint(checkpoint: Callable[..., Path], edited: Edited) -> None:
    facts = read_config(checkpoint("glm4_moe", num_mtp_layers=3)).facts
    assert facts == ModelFacts(
        model_type="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        hidden_size=64,
        vocab_size=512,
        num_hidden_layers=2,
        num_mtp_layers=3,
        max_position_embeddings=512,
        eos_token_ids=(1,),
        dtype=torch.float32,
    )
    fixed = edited("qwen3_next", lambda config: config.update(num_nextn_predict_layers=7))
    assert read_config(fixed).facts.num_mtp_layers == 1
    without = edited("glm4_moe", lambda config: config.pop("num_nextn_predict_layers"))
    assert read_config(without).facts.num_mtp_layers == 0


@pytest.mark.parametrize(
    ("in_generation", "in_config", "ids"),
    [
        ({"eos_token_id": [7, 8]}, 1, (7, 8)),
        ({"eos_token_id": 7}, [1, 2], (7,)),
        ({}, [1, 2], (1, 2)),
        (None, 1, (1,)),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_stop_ids_of_the_generation_config_go_first(
    edited: Edited, in_generation: dict[str, Any] | None, in_config: object, ids: tuple[int, ...]
) -> None:
    path = edited("glm4_moe", lambda config: config.update(eos_token_id=in_config))
    file = path / "generation_config.json"
    file.unlink()
    if in_generation is not None:
        file.write_text(json.dumps(in_generation))
    assert read_config(path).facts.eos_token_ids == ids


@pytest.mark.parametrize(
    ("config", "message", "drafts"),
    [
        ({"model_type": "llama"}, "model family 'llama' is not in the family table; families", 0),
        ({"model_type": "exaone_moe"}, "model family 'exaone_moe' is not in the family table", 3),
        ({"model_type": "new", "num_nextn_predict_layers": 2}, "", 2),
        ({"model_type": "new", "text_config": {"mtp_num_hidden_layers": 1}}, "", 3),
        ({"model_type": "glm_moe_dsa", "num_nextn_predict_layers": 0}, "", 0),
        *(({"model_type": name}, f"model family {name!r} carries MTP", 3) for name in NOT_RUNNABLE),
    ],
)  # fmt: skip
def test_families_of_vllm_are_refused_with_its_command(
    tmp_path: Path, config: dict[str, Any], message: str, drafts: int
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read_config(written(tmp_path, **config))
    command = vllm_command(tmp_path, drafts)
    if config["model_type"] == "gemma4_assistant":  # not a target
        command = vllm_command("TARGET", drafter=tmp_path)
    assert caught.value.next_command == command
    assert str(caught.value).startswith(message)
    assert str(caught.value).endswith(f"; {IN_VLLM}: {command}")
    assert "families that run: deepseek_v3, glm4_moe, mimo, qwen3_next" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "rotary"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_scaling": None, "rope_theta": 5e6}, {"rope_type": "default", "rope_theta": 5e6}),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 32, "mscale": 1.0}},
            {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0,
             "mscale": 1.0, "original_max_position_embeddings": 512},
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}},
            {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0},
        ),
    ],
)  # fmt: skip
def test_rotary_parameters_reach_transformers(
    edited: Edited, change: dict[str, Any], rotary: dict[str, Any]
) -> None:
    path = edited("deepseek_v3", lambda config: config.update(change))
    assert read_config(path).config.rope_parameters == rotary


RELEASED: list[dict[str, Any]] = [
    {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_deepseek.X"},
        "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3,
        "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
        "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
        "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
    },
    {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "pad_token_id": 151329, "eos_token_id": [151329, 151336, 151338], "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "partial_rotary_factor": 0.5,
        "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 131072,
        "model_type": "glm4_moe", "moe_intermediate_size": 1408, "norm_topk_prob": True,
        "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "routed_scaling_factor": 1.0, "num_experts_per_tok": 8,
        "first_k_dense_replace": 1, "num_hidden_layers": 46, "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 1000000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_cache": True, "use_qk_norm": False, "vocab_size": 151552,
    },
    {
        "architectures": ["MiMoForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_mimo.X"}, "bos_token_id": 151643,
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 32768,
        "max_window_layers": 36, "model_type": "mimo", "num_attention_heads": 32,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
        "pad_token_id": -1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 640000,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_cache": True, "use_mrope": False, "use_sliding_window": False, "vocab_size": 151680,
    },
]  # fmt: skip


@pytest.mark.parametrize("content", RELEASED, ids=lambda content: content["model_type"])
def test_configs_as_they_are_released(tmp_path: Path, content: dict[str, Any]) -> None:
    checked = read_config(written(tmp_path, **content))
    assert checked.facts.num_mtp_layers == 1
    assert checked.facts.dtype is torch.bfloat16
    assert ("auto_map" in checked.unread) == ("auto_map" in content)
    for key, value in content.items():
        theirs = getattr(checked.config, key, None)
        expected = [value] if key == "eos_token_id" and isinstance(value, int) else value
        if key in type(checked.config).__dataclass_fields__ and not key.startswith(
            ("rope", "model_type")
        ):
            assert theirs == (None if value == -1 else expected), key
