from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_plugin.checkpoint.vllm_command import vllm_command
from mtp_plugin.errors import CheckpointError, UnsupportedModelError
from mtp_plugin.hosts.embedded.models import NOT_RUNNABLE, ModelFacts, read_config


def read_facts(path: Path) -> ModelFacts:
    return read_config(path).facts


def test_facts_of_a_checkpoint(checkpoint: Callable[..., Path]) -> None:
    facts = read_facts(checkpoint("glm4_moe", num_mtp_layers=3))
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
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts.num_mtp_layers = 1  # type: ignore[misc]


def test_facts_need_no_weights(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint("mimo") / "config.json"
    (tmp_path / "config.json").write_bytes(source.read_bytes())
    facts = read_facts(tmp_path)
    assert (facts.model_type, facts.architecture) == ("mimo", "MiMoForCausalLM")
    # no generation_config.json: the ids of config.json count
    assert facts.eos_token_ids == (1,)


def test_qwen3_next_has_one_layer_whatever_the_config_says(edited: Callable[..., Path]) -> None:
    path = edited("qwen3_next", lambda config: config.update(num_nextn_predict_layers=7))
    assert read_facts(path).num_mtp_layers == 1


def test_a_config_without_the_count_declares_no_layers(edited: Callable[..., Path]) -> None:
    path = edited("glm4_moe", lambda config: config.pop("num_nextn_predict_layers"))
    assert read_facts(path).num_mtp_layers == 0


@pytest.mark.parametrize(
    ("in_generation", "in_config", "ids"),
    [
        ({"eos_token_id": [7, 8]}, 1, (7, 8)),
        ({"eos_token_id": 7}, [1, 2], (7,)),
        ({}, [1, 2], (1, 2)),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_stop_ids_of_the_generation_config_go_first(
    edited: Callable[..., Path], in_generation: dict[str, Any], in_config: object, ids: tuple
) -> None:
    path = edited("glm4_moe", lambda config: config.update(eos_token_id=in_config))
    (path / "generation_config.json").write_text(json.dumps(in_generation))
    assert read_facts(path).eos_token_ids == ids


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({}, torch.float32),
    ],
)
def test_dtype_by_either_name(
    edited: Callable[..., Path], keys: dict[str, str], dtype: torch.dtype
) -> None:
    def rename(config: dict[str, Any]) -> None:
        del config["torch_dtype"]
        config.update(keys)

    assert read_facts(edited("glm4_moe", rename)).dtype is dtype


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "model_type: expected text, got null"),
        ({"model_type": ["glm4_moe"]}, "model_type: expected text, got a list"),
        (
            {"architectures": "X"},
            "expected a glm4_moe config, transformers says: StrictDataclassFieldValidationError",
        ),
        ({"vocab_size": "64"}, "vocab_size: expected an integer from 1 to 16777216, got '64'"),
        (
            {"num_hidden_layers": True},
            "num_hidden_layers: expected an integer from 1 to 10000, got true",
        ),
        (
            {"num_nextn_predict_layers": -1},
            "num_nextn_predict_layers: expected an integer from 0 to 64, got -1",
        ),
        (
            {"torch_dtype": "float8"},
            "torch_dtype: expected one of 'float32', 'float16', 'bfloat16', got 'float8'",
        ),
    ],
)
def test_bad_values(edited: Callable[..., Path], change: dict[str, Any], message: str) -> None:
    path = edited("glm4_moe", lambda config: config.update(change))
    with pytest.raises(CheckpointError, match=re.escape(f"{path / 'config.json'}: {message}")):
        read_facts(path)


def test_unknown_family(edited: Callable[..., Path]) -> None:
    path = edited("glm4_moe", lambda config: config.update(model_type="llama"))
    with pytest.raises(UnsupportedModelError, match="model family 'llama' is not in the family"):
        read_facts(path)


@pytest.mark.parametrize("family", [*NOT_RUNNABLE, "exaone_moe"])
def test_families_of_vllm_are_refused_with_its_command(tmp_path: Path, family: str) -> None:
    config = {"model_type": family, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError) as caught:
        read_facts(tmp_path)
    command = vllm_command(tmp_path)
    if family == "gemma4_assistant":  # not a target
        command = vllm_command("TARGET", drafter=tmp_path)
    assert caught.value.next_command == command
    assert str(caught.value).endswith(f"; vLLM with this package's plugin may run it: {command}")


@pytest.mark.parametrize(
    ("config", "drafts"),
    [
        ({"model_type": "llama"}, 0),
        ({"model_type": "mamba", "time_step_limit": [0.0, float("inf")]}, 0),
        ({"model_type": "new", "num_nextn_predict_layers": 2}, 2),
        ({"model_type": "new", "text_config": {"mtp_num_hidden_layers": 1}}, 3),
        ({"model_type": "glm_moe_dsa", "num_nextn_predict_layers": 0}, 0),
    ],
)
def test_drafts_of_vllm_follow_the_declared_layers(
    tmp_path: Path, config: dict[str, Any], drafts: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError) as caught:
        read_facts(tmp_path)
    assert caught.value.next_command == vllm_command(tmp_path, drafts)


class TestFiles:
    def test_no_such_path(self, tmp_path: Path) -> None:
        path = tmp_path / "nowhere"
        with pytest.raises(CheckpointError) as caught:
            read_facts(path)
        assert str(caught.value) == f"checkpoint {path}: expected a directory, it does not exist"

    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "model.bin"
        path.touch()
        with pytest.raises(CheckpointError) as caught:
            read_facts(path)
        assert str(caught.value) == (
            f"checkpoint {path}: expected a directory, got a file; give {path.parent}"
        )

    def test_no_config(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError) as caught:
            read_facts(tmp_path)
        assert str(caught.value) == (
            f"checkpoint {tmp_path}: expected a file config.json, found none"
        )
