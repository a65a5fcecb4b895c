"""What config files may say, in tables: one line per problem, with its message."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtp_plugin.checkpoint.vllm_command import IN_VLLM, vllm_command
from mtp_plugin.errors import CheckpointError, MTPPluginError
from mtp_plugin.hosts.embedded.models import (
    load_model,
    preflight,
    read_config,
    read_tokenizer,
)

Edited = Callable[..., Path]
INDEX = "model.safetensors.index.json"


def refusal(path: Path, check: Callable[[Path], object] = read_config) -> str:
    with pytest.raises(MTPPluginError) as caught:
        check(path)
    return str(caught.value).replace(str(path), "PATH")


def whole(path: Path) -> object:
    return preflight(path)


def all_files(path: Path) -> None:
    read_tokenizer(read_config(path))
    whole(path)


GROUPS = "topk_group of n_group equal groups of at least 2"


RELATIONS: list[tuple[str, dict[str, Any], str]] = [
    (
        "glm4_moe",
        {"num_key_value_heads": 3},
        "num_key_value_heads: expected a divisor of num_attention_heads, which is 4, got 3",
    ),
    (
        "deepseek_v3",
        {"num_key_value_heads": 2},
        "num_key_value_heads: expected as many as num_attention_heads, 4, got 2",
    ),
    (
        "glm4_moe",
        {"partial_rotary_factor": 0.2},
        "partial_rotary_factor: expected an even number of at least 2 rotated of the 16 values of "
        "a head, got 3",
    ),
    (
        "mimo",
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor: expected 1 in family mimo, got 0.5",
    ),
    (
        "glm4_moe",
        {"partial_rotary_factor": 2},
        "partial_rotary_factor: expected a number from 1e-30 to 1.0, got 2",
    ),
    (
        "deepseek_v3",
        {"qk_rope_head_dim": 7},
        "partial_rotary_factor: expected an even number of at least 2 rotated of the 7 values of "
        "a head, got 7",
    ),
    *(
        (family, change, f"num_experts_per_tok: expected experts from {GROUPS}, got {choice}")
        for family, change, choice in (
            ("deepseek_v3", {"n_group": 3}, "2 from 1 of 3 groups of 8 experts"),
            ("deepseek_v3", {"n_group": 8}, "2 from 1 of 8 groups of 8 experts"),
            ("deepseek_v3", {"topk_group": 3}, "2 from 3 of 2 groups of 8 experts"),
            ("deepseek_v3", {"num_experts_per_tok": 5}, "5 from 1 of 2 groups of 8 experts"),
            ("qwen3_next", {"num_experts_per_tok": 5}, "5 from 1 of 1 groups of 4 experts"),
        )
    ),
    (
        "qwen3_next",
        {"layer_types": ["full_attention"]},
        "expected a qwen3_next config, transformers says: StrictDataclassClassValidationError: "
        "Class validation error for validator 'validate_layer_type': ValueError: "
        "`num_hidden_layers` (2) must be equal to the number of `layer_types` (1)",
    ),
    (
        "mimo",
        {"hidden_act": "xielu"},
        "hidden_act: expected one of 'silu', 'gelu', 'gelu_new', 'gelu_fast', "
        "'gelu_pytorch_tanh', 'quick_gelu', 'relu', 'relu2', 'mish', 'tanh', 'sigmoid', "
        "got 'xielu'",
    ),
    (
        "mimo",
        {"max_position_embeddings": 10**9},
        "max_position_embeddings: expected an integer from 1 to 16777216, got 1000000000",
    ),
    ("mimo", {"eos_token_id": [512]}, "eos_token_id: expected ids below vocab_size, 512, got 512"),
    ("mimo", {"pad_token_id": 600}, "pad_token_id: expected ids below vocab_size, 512, got 600"),
    (
        "mimo",
        {"pad_token_id": -2},
        "pad_token_id: expected ids below vocab_size, 512, got -2",
    ),
    (
        "deepseek_v3",
        {"scoring_func": "softmax"},
        "scoring_func: expected 'sigmoid', got 'softmax'",
    ),
    (
        "glm4_moe",
        {"num_hidden_layers": 10**6},
        "num_hidden_layers: expected an integer from 1 to 10000, got 1000000",
    ),
    (
        "glm4_moe",
        {"n_routed_experts": 10**7},
        "n_routed_experts: expected an integer from 1 to 65536, got 10000000",
    ),
    (
        "glm4_moe",
        {"num_nextn_predict_layers": 1000},
        "num_nextn_predict_layers: expected an integer from 0 to 64, got 1000",
    ),
    (
        "glm4_moe",
        {"num_attention_heads": 4.0, "hidden_size": None},
        "hidden_size: required key is missing\n"
        "PATH/config.json: num_attention_heads: expected an integer from 1 to 65536, got 4.0",
    ),
    (
        "mimo",
        {"rope_scaling": {"type": "longrope", "factor": 2}},
        "rope_scaling.rope_type: expected one of 'default', 'dynamic', 'linear', 'llama3', "
        "'yarn', got 'longrope'",
    ),
    (
        "mimo",
        {"rope_scaling": {"type": "linear"}},
        "expected a mimo config, transformers says: KeyError: \"Missing required keys in "
        "`rope_parameters` for 'rope_type'='linear': {'factor'}\"",
    ),
    ("mimo", {"rope_parameters": {"scale": 4}}, "rope_parameters.scale: unknown key"),
    (
        "mimo",
        {"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4,
                          "high_freq_factor": 4, "original_max_position_embeddings": 64}},
        "rope_parameters.high_freq_factor: expected above low_freq_factor, which is 4.0, got 4.0",
    ),
    (
        "mimo",
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "default"}},
        "rope_scaling: expected either it or rope_parameters, got both",
    ),
    ("mimo", {"rope_theta": 0}, "rope_theta: expected a number from 1.01 to 1000000000000000.0, "
     "got 0"),
    ("glm4_moe", {"tie_word_embeddings": 1}, "expected a glm4_moe config, transformers says: "
     "StrictDataclassFieldValidationError: Validation error for field 'tie_word_embeddings': "
     "TypeError: Field 'tie_word_embeddings' expected bool, got int (value: 1)"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "change", "message"), RELATIONS)
def test_values_and_their_relations(
    edited: Edited, family: str, change: dict[str, Any], message: str
) -> None:
    path = edited(family, lambda config: config.update(change))
    expected = f"PATH/config.json: {message}"
    if message.partition(":")[0].endswith(("rope_type", "scoring_func", "hidden_act")):
        expected += f"; {IN_VLLM}: {vllm_command('PATH')}"
    assert refusal(path) == expected


NESTED, DIGITS = '{"a":' * 10**5 + "1" + "}" * 10**5, '{"vocab_size": %s}' % ("9" * 5000)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", NESTED, "expected JSON, it nests too deeply"),
        ("tokenizer.json", "[" * 10**5, "expected JSON, it nests too deeply"),
        ("config.json", DIGITS, "expected JSON, got Exceeds the limit (4300 "),
        ("generation_config.json", "", "expected JSON, got Expecting value: line 1 column 1 "),
        ("generation_config.json", "\ud800", "expected JSON, got 'utf-8' codec can't decode"),
        (INDEX, "[]", "expected a JSON object, got list"),
    ],
)
def test_bombs_and_broken_json(edited: Edited, file: str, content: str, message: str) -> None:
    path = edited("glm4_moe")
    (path / file).write_bytes(content.encode("utf-8", "surrogatepass"))
    if file == INDEX:
        (path / "model.safetensors").unlink()
    assert refusal(path, all_files).startswith(f"PATH/{file}: {message}")


def test_infinity_in_a_config_hides_no_other_reason(edited: Edited) -> None:
    path = edited("glm4_moe", lambda config: config.update(time_step_limit=[0.0, float("inf")]))
    assert whole(path)
    path = edited("mimo", lambda config: config.update(hidden_size=float("nan")))
    assert "Field 'hidden_size' expected int, got float (value: nan)" in refusal(path)


@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"]
)
def test_a_git_lfs_pointer_is_named(edited: Edited, file: str) -> None:
    path = edited("glm4_moe")
    (path / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert refusal(path, all_files) == (
        f"PATH/{file}: got a git-lfs pointer instead of the file; download it: git -C PATH lfs pull"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"eos_token_id": 512}, "eos_token_id: expected ids below vocab_size, 512, got 512"),
        ({"pad_token_id": "x"}, "pad_token_id: expected ids below vocab_size, 512, got 'x'"),
    ],
)
def test_generation_config(edited: Edited, content: dict[str, Any], message: str) -> None:
    path = edited("glm4_moe")
    (path / "generation_config.json").write_text(json.dumps(content))
    assert refusal(path) == f"PATH/generation_config.json: {message}"


def test_places_that_are_no_files(edited: Edited) -> None:
    path = edited("glm4_moe")
    file = path / "config.json"
    file.unlink()
    endless = "PATH/config.json: cannot be read: Too many levels of symbolic links"
    other_kind = "PATH/config.json: expected a regular file, got another kind of file"
    os.mkfifo(file)
    assert refusal(path) == other_kind
    for device in ("/dev/zero", "/dev/null", path):
        file.unlink()
        file.symlink_to(device)
        assert refusal(path) == other_kind
    file.unlink()
    file.symlink_to(file)
    assert refusal(path) == endless
    with pytest.raises(CheckpointError, match=r"expected a directory|cannot be read"):
        read_config("a\0b")


def test_an_adapter(edited: Edited) -> None:
    path = edited("glm4_moe")
    (path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/other"}')
    assert refusal(path) == (
        "checkpoint PATH: expected a whole checkpoint, adapter_config.json makes it an adapter of "
        "another one"
    )


class TestKeysOnWhichTransformersActs:
    ACTING: ClassVar[dict[str, Any]] = {
        "transformers_weights": "other.safetensors",
        "_attn_implementation": "flash_attention_2",
        "attn_implementation": "org/kernel",
        "auto_map": {"AutoModelForCausalLM": "modeling.Model"},
        "custom_generate": "org/generate",
        "return_dict": False,
    }

    def test_named_as_not_read(self, edited: Edited) -> None:
        path = edited("glm4_moe", lambda config: config.update(self.ACTING, num_labels=10**9))
        assert read_config(path).unread == (*self.ACTING, "num_labels")

    def test_the_target_is_that_of_the_checked_files(
        self, edited: Edited, checkpoint: Callable[..., Path]
    ) -> None:
        path = edited("glm4_moe", lambda config: config.update(self.ACTING))
        shutil.copy(
            checkpoint("glm4_moe", seed=1) / "model.safetensors", path / "other.safetensors"
        )
        (path / "generation_config.json").write_text(
            '{"eos_token_id": [7], "custom_generate": "org/generate", "temperature": "hot"}'
        )
        model = load_model(path)
        stored = load_file(path / "model.safetensors")
        assert torch.equal(model.embed_tokens.weight, stored["model.embed_tokens.weight"])
        assert model.target.config._attn_implementation == "sdpa"
        assert model.target.generation_config.eos_token_id == [7]
        assert model.target(input_ids=torch.tensor([[3]])).logits.shape == (1, 1, 512)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_hidden_layers": 10_000},
            "config.json says num_hidden_layers = 10000, the files have no tensor of "
            "model.layers.3",
        ),
        (
            {"n_routed_experts": 60_000},
            "179988 tensor(s) of the MTP layers are missing: "
            "model.layers.2.mlp.experts.10.down_proj.weight, ",
        ),
    ],
)
def test_sizes_beyond_the_files(edited: Edited, change: dict[str, Any], message: str) -> None:
    """They are refused before so many modules are built."""
    path = edited("glm4_moe", lambda config: config.update(change))
    assert refusal(path, whole).startswith(f"checkpoint PATH: {message}")


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("../model.safetensors", "'../model.safetensors'"),
        ("/etc/model.safetensors", "'/etc/model.safetensors'"),
        ("pytorch_model.bin", "'pytorch_model.bin'"),
        ("a\0.safetensors", r"'a\x00.safetensors'"),
        ("..\\a.safetensors", r"'..\\a.safetensors'"),
        (5, "5"),
        (["a"], "a list"),
        (None, "null"),
    ],
)
def test_shards_by_plain_names(
    edited: Edited, sharded: Callable[[Path], Path], file: object, shown: str
) -> None:
    path = sharded(edited("glm4_moe"))
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = file
    (path / INDEX).write_text(json.dumps(index))
    assert refusal(path, whole) == (
        f"PATH/{INDEX}: expected plain names of .safetensors files next to it, got {shown}"
    )


def test_an_index_that_transformers_could_not_read(
    edited: Edited, sharded: Callable[[Path], Path]
) -> None:
    path = sharded(edited("glm4_moe"))
    index = json.loads((path / INDEX).read_text())
    del index["metadata"]
    (path / INDEX).write_text(json.dumps(index))
    assert refusal(path, whole) == f"PATH/{INDEX}: expected a table 'metadata', got null"


def test_a_tensor_in_two_shards(edited: Edited, sharded: Callable[[Path], Path]) -> None:
    path = sharded(edited("glm4_moe"))
    file = path / "model-00002-of-00002.safetensors"
    extra = {**load_file(file), "lm_head.weight": torch.zeros(512, 64)}
    save_file(extra, file, {"format": "pt"})
    assert refusal(path, whole) == ("checkpoint PATH: a tensor is in several files: lm_head.weight")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("model.layers." + "9" * 5000 + ".x", "model.layers." + "9" * 184 + "..."),
        ("model.\x1b[31m\n", r"'model.\x1b[31m\n'"),
    ],
)
def test_hostile_tensor_names(edited: Edited, name: str, shown: str) -> None:
    path = edited("glm4_moe", edit_tensors=lambda tensors: tensors.update({name: torch.ones(1)}))
    assert refusal(path, whole) == (
        f"checkpoint PATH: 1 tensor(s) are unknown to the model of config.json: {shown}"
    )


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


SKIPPED = ("rope", "model_type")


@pytest.mark.parametrize("content", RELEASED, ids=lambda content: content["model_type"])
def test_configs_as_they_are_released(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    checked = read_config(tmp_path)
    assert checked.facts.num_mtp_layers == 1
    assert ("auto_map" in checked.unread) == ("auto_map" in content)
    for key, value in content.items():
        theirs = getattr(checked.config, key, None)
        if key in type(checked.config).__dataclass_fields__ and not key.startswith(SKIPPED):
            assert theirs == (None if value == -1 else _as_list(key, value)), key


def _as_list(key: str, value: Any) -> Any:
    return [value] if key == "eos_token_id" and isinstance(value, int) else value


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": -1},
        {"intermediate_size": 2**62},
        {"moe_intermediate_size": 0},
        {"hidden_size": 10**30},
        {"first_k_dense_replace": -(10**9)},
        {"hidden_size": "x" * 10**5},
        {"rope_parameters": {"rope_type": "default", "x" * 10**5: 1}},
    ],
    ids=lambda change: str(change)[:40],
)
def test_impossible_sizes_end_in_one_short_line(edited: Edited, change: dict[str, Any]) -> None:
    message = refusal(edited("glm4_moe", lambda config: config.update(change)), whole)
    assert "\n" not in message
    assert len(message) < 1000
