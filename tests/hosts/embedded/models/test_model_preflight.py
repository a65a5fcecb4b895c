"""Scenario R43 and its relatives: what must fail before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_plugin.checkpoint.vllm_command import IN_VLLM, vllm_command
from mtp_plugin.errors import CheckpointError, ConfigError, UnsupportedModelError
from mtp_plugin.hosts.embedded.models import FAMILIES, load_model, preflight
from mtp_plugin.hosts.embedded.models.preflight import WITHOUT_MTP

Edited = Callable[..., Path]
Tensors = dict[str, torch.Tensor]
INDEX = "model.safetensors.index.json"
TO_VLLM = f"; {IN_VLLM}: {vllm_command('PATH')}"
"""The end of a refusal of what vLLM may run."""
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"


def refusal(path: Path, num_mtp_layers: int | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        preflight(path, num_mtp_layers)
    return str(caught.value).replace(str(path), "PATH")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_good_checkpoints_pass(checkpoint: Callable[..., Path], family: str) -> None:
    found = preflight(checkpoint(family))
    assert found.facts.model_type == found.family.model_type == family
    assert found.num_mtp_layers == 1
    planned = {name for plan in found.plans[0] for name in plan.sources}
    assert planned <= set(found.stored)
    assert preflight(checkpoint(family), 3).num_mtp_layers == 3  # one layer, repeated


def test_number_of_layers(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("glm4_moe", num_mtp_layers=3)
    assert [preflight(path, n).num_mtp_layers for n in (None, 0, 2)] == [3, 0, 2]
    assert refusal(path, 4) == (
        "checkpoint PATH: expected at most 3 requested MTP layers, got 4; only a single layer can "
        "be repeated"
    )
    with pytest.raises(ConfigError, match="num_mtp_layers: expected at least 0, got -1"):
        preflight(path, -1)


def test_a_target_alone_needs_no_mtp_tensors(edited: Edited) -> None:
    path = edited("qwen3_next", edit_tensors=lambda tensors: tensors.pop("mtp.fc.weight"))
    found = preflight(path, 0)
    assert (found.num_mtp_layers, found.plans) == (0, ())


def test_recurrent_targets(checkpoint: Callable[..., Path], edited: Edited) -> None:
    path = checkpoint("qwen3_next", layer_types=["linear_attention", "full_attention"])
    assert refusal(path) == (
        "checkpoint PATH: expected only full_attention layers, got layer types linear_attention "
        f"(1 of 2 layers){TO_VLLM}"
    )
    with pytest.raises(UnsupportedModelError):
        load_model(path)
    # a qwen3_next config without layer types means three linear layers of four
    path = edited("qwen3_next", lambda config: config.pop("layer_types"), num_hidden_layers=4)
    assert "got layer types linear_attention (3 of 4 layers); vLLM" in refusal(path)


def drop_mtp(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("mtp.")]:
        del tensors[name]


def quantize_target(tensors: Tensors) -> None:
    """As released: the target's attention in FP8, the MTP layer in bfloat16."""
    for name in list(tensors):
        if name.startswith("model.layers.0.self_attn"):
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        if name.startswith("model.layers.2."):
            tensors[name] = tensors[name].bfloat16()


def cast(name: str, dtype: torch.dtype) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def put(name: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


def config_with(**values: object) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(values)


ODD = "expected tensors of F32, F16, BF16 only, got"
UNKNOWN = "tensor(s) are unknown to the model of config.json:"
EH_PROJ, INPUT_PROJ = "model.layers.2.eh_proj.weight", "model.mtp_layers.0.input_proj.weight"
FLOAT8 = torch.float8_e4m3fn
WRONG: list[tuple[str, Any, Any, str]] = [
    (
        "qwen3_next",
        None,
        drop_mtp,
        "config.json declares 1 MTP layer(s), the files have none of their tensors (transformers "
        "leaves them out when it saves a model): take the files of the original checkpoint; "
        f"{WITHOUT_MTP}: mtp-plugin generate --model PATH --no-mtp",
    ),
    (
        "glm4_moe",
        None,
        lambda tensors: tensors.pop(EXPERT),
        f"1 tensor(s) of the MTP layers are missing: {EXPERT} (of 4 experts); take the",
    ),
    (
        "mimo",
        None,
        lambda tensors: tensors.pop("model.norm.weight"),
        "1 of the 43 tensors of config.json are missing: model.norm.weight",
    ),
    (
        "mimo",
        None,
        put("model.layers.0.self_attn.q_norm.weight", 16),
        f"1 {UNKNOWN} model.layers.0.self_attn.q_norm.weight",
    ),
    (
        "mimo",
        config_with(vocab_size=500),
        None,
        "2 tensor(s) have a wrong shape: model.embed_tokens.weight: expected [500, 64], got "
        "[512, 64], lm_head.weight: expected [500, 64], got [512, 64]",
    ),
    (
        "mimo",
        config_with(num_nextn_predict_layers=2),
        None,
        "config.json declares 2 MTP layers, the files have 1: set num_nextn_predict_layers to 1",
    ),
    (
        "glm4_moe",
        None,
        put("model.layers.2.final_layernorm.weight", 64),
        "1 tensor(s) of the MTP layers are unknown to family glm4_moe: "
        "model.layers.2.final_layernorm.weight",
    ),
    # a second layer that config.json does not declare
    (
        "glm4_moe",
        None,
        put("model.layers.3.enorm.weight", 64),
        "config.json declares 1 MTP layer(s), the files have 2: set num_nextn_predict_layers to 2",
    ),
    (
        "mimo",
        None,
        put(INPUT_PROJ, 64, 64),
        f"1 tensor(s) have a wrong shape: {INPUT_PROJ}: expected [64, 128], got [64, 64]",
    ),
    (
        "deepseek_v3",
        None,
        put("model.layers.2.mlp.experts.1.down_proj.weight", 64, 33),
        "1 tensor(s) have a wrong shape: model.layers.2.mlp.experts.1.down_proj.weight: expected "
        "[64, 32], got [64, 33]",
    ),
    (
        "glm4_moe",
        None,
        cast(EH_PROJ, FLOAT8),
        f"{ODD} 1 of other dtypes: {EH_PROJ} (F8_E4M3){TO_VLLM}",
    ),
    (
        "glm4_moe",
        None,
        cast(EH_PROJ, torch.float64),
        f"{ODD} 1 of other dtypes: {EH_PROJ} (F64){TO_VLLM}",
    ),
    (
        "deepseek_v3",
        None,
        quantize_target,
        f"{ODD} 7 of other dtypes: model.layers.0.self_attn.kv_a_layernorm.weight",
    ),
]


@pytest.mark.parametrize(("family", "config", "tensors", "message"), WRONG)
def test_wrong_tensors(
    edited: Edited, family: str, config: Any, tensors: Any, message: str
) -> None:
    assert refusal(edited(family, config, tensors)).startswith(f"checkpoint PATH: {message}")


def test_stored_copies_and_fused_experts_pass(edited: Edited) -> None:
    def drop_copies(tensors: Tensors) -> None:
        del tensors["model.layers.2.embed_tokens.weight"]
        del tensors["model.layers.2.shared_head.head.weight"]

    def fuse(tensors: Tensors) -> None:
        stem = "mtp.layers.0.mlp.experts"
        parts = {
            half: [tensors.pop(f"{stem}.{expert}.{half}_proj.weight") for expert in range(4)]
            for half in ("gate", "up", "down")
        }
        gates_and_ups = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        tensors[f"{stem}.gate_up_proj"] = torch.stack(gates_and_ups)
        tensors[f"{stem}.down_proj"] = torch.stack(parts["down"])

    for family, edit in (("glm4_moe", drop_copies), ("qwen3_next", fuse)):
        assert preflight(edited(family, edit_tensors=edit)).num_mtp_layers == 1


class TestFiles:
    def test_no_safetensors(self, edited: Edited) -> None:
        path = edited("glm4_moe")
        (path / "model.safetensors").rename(path / "pytorch_model.bin")
        assert refusal(path) == (
            "checkpoint PATH: expected weights in safetensors files, got pytorch_model.bin"
            f"{TO_VLLM}"
        )
        (path / "pytorch_model.bin").unlink()
        assert refusal(path) == ("checkpoint PATH: expected *.safetensors files, found none")

    def test_broken_file(self, edited: Edited) -> None:
        path = edited("glm4_moe")
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
        assert refusal(path).startswith("PATH/model.safetensors: expected a safetensors file, got ")

    def test_shards(self, edited: Edited, sharded: Callable[[Path], Path]) -> None:
        path = sharded(edited("glm4_moe"))
        assert preflight(path).num_mtp_layers == 1
        index = json.loads((path / INDEX).read_text())
        index["weight_map"]["model.extra"] = "model-00001-of-00002.safetensors"
        (path / INDEX).write_text(json.dumps(index))
        assert refusal(path) == (
            f"checkpoint PATH: {INDEX} names 1 tensor(s) that its files do not hold: model.extra"
        )
        (path / INDEX).write_text('{"weight_map": []}')
        assert refusal(path) == f"PATH/{INDEX}: expected a table 'weight_map', got []"

    def test_missing_shard(self, edited: Edited, sharded: Callable[[Path], Path]) -> None:
        path = sharded(edited("glm4_moe"))
        (path / "model-00002-of-00002.safetensors").unlink()
        message = "PATH/model-00002-of-00002.safetensors: expected a safetensors file, got "
        assert refusal(path).startswith(message)
        assert "No such file or directory" in refusal(path)

    def test_a_whole_file_goes_before_an_index(self, edited: Edited) -> None:
        # as in transformers
        path = edited("glm4_moe")
        (path / INDEX).write_text("{}")
        assert preflight(path).num_mtp_layers == 1

    def test_no_weight_is_read(self, edited: Edited, monkeypatch: pytest.MonkeyPatch) -> None:
        def forbidden(*_: Any, **__: Any) -> None:
            raise AssertionError("a weight was read")

        monkeypatch.setattr(
            "mtp_plugin.hosts.embedded.models.checkpoint_files.read_tensors", forbidden
        )
        monkeypatch.setattr("safetensors.torch.load_file", forbidden)
        preflight(edited("deepseek_v3"))
