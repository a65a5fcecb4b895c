"""Scenario R43 and its relatives: what must fail before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_plugin.errors import CheckpointError, ConfigError, UnsupportedModelError
from mtp_plugin.extras import IN_VLLM, vllm_command
from mtp_plugin.hosts.embedded.models import FAMILIES, load_model, preflight
from mtp_plugin.hosts.embedded.models.preflight import WITHOUT_MTP

Edited = Callable[..., Path]


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


def test_recurrent_targets(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("qwen3_next", layer_types=["linear_attention", "full_attention"])
    message = (
        "checkpoint PATH: expected only full_attention layers, got layer types linear_attention "
        f"(1 of 2 layers); {IN_VLLM}: {vllm_command('PATH')}"
    )
    assert refusal(path) == message
    with pytest.raises(UnsupportedModelError):
        load_model(path)


def test_recurrent_by_default_of_the_family(edited: Edited) -> None:
    # a qwen3_next config without layer types means three linear layers of four
    path = edited("qwen3_next", lambda config: config.pop("layer_types"), num_hidden_layers=4)
    assert "got layer types linear_attention (3 of 4 layers); vLLM" in refusal(path)


def test_a_config_of_wrong_types(edited: Edited) -> None:
    path = edited("glm4_moe", lambda config: config.update(num_attention_heads="four"))
    assert refusal(path) == (
        "PATH/config.json: num_attention_heads: expected an integer from 1 to 65536, got 'four'"
    )


class TestTensors:
    def test_declared_layers_missing_altogether(self, edited: Edited) -> None:
        def drop_mtp(tensors: dict[str, torch.Tensor]) -> None:
            for name in [name for name in tensors if name.startswith("mtp.")]:
                del tensors[name]

        assert refusal(edited("qwen3_next", edit_tensors=drop_mtp)) == (
            "checkpoint PATH: config.json declares 1 MTP layer(s), the files have none of their "
            "tensors (transformers leaves them out when it saves a model): take the files of the "
            f"original checkpoint; {WITHOUT_MTP}: mtp-plugin generate --model PATH --no-mtp"
        )

    def test_one_expert_missing(self, edited: Edited) -> None:
        name = "model.layers.2.mlp.experts.3.up_proj.weight"
        path = edited("glm4_moe", edit_tensors=lambda tensors: tensors.pop(name))
        assert refusal(path) == (
            f"checkpoint PATH: 1 of the 63 tensors of config.json are missing: {name}"
        )

    def test_missing_second_layer(self, edited: Edited) -> None:
        path = edited("mimo", lambda config: config.update(num_nextn_predict_layers=2))
        assert "checkpoint PATH: 16 of the " in refusal(path)
        assert "config.json are missing: model.mtp_layers.1." in refusal(path)

    def test_unknown_name_in_a_layer(self, edited: Edited) -> None:
        def add(tensors: dict[str, torch.Tensor]) -> None:
            tensors["model.layers.2.final_layernorm.weight"] = torch.ones(64)

        assert refusal(edited("glm4_moe", edit_tensors=add)) == (
            "checkpoint PATH: 1 tensor(s) are unknown to the model of config.json: "
            "model.layers.2.final_layernorm.weight"
        )

    def test_more_layers_stored_than_declared(self, edited: Edited) -> None:
        path = edited(
            "deepseek_v3",
            lambda config: config.update(num_nextn_predict_layers=1),
            num_mtp_layers=2,
        )
        message = refusal(path)
        assert "tensor(s) are unknown to the model of config.json: model.layers.3." in message

    def test_stored_copies_are_known(self, edited: Edited) -> None:
        def drop_copies(tensors: dict[str, torch.Tensor]) -> None:
            del tensors["model.layers.2.embed_tokens.weight"]
            del tensors["model.layers.2.shared_head.head.weight"]

        preflight(edited("glm4_moe", edit_tensors=drop_copies))

    def test_wrong_shape(self, edited: Edited) -> None:
        def halve(tensors: dict[str, torch.Tensor]) -> None:
            name = "model.mtp_layers.0.input_proj.weight"
            tensors[name] = tensors[name][:, :64].contiguous()

        assert refusal(edited("mimo", edit_tensors=halve)) == (
            "checkpoint PATH: 1 tensor(s) have a wrong shape: "
            "model.mtp_layers.0.input_proj.weight: expected [64, 128], got [64, 64]"
        )

    def test_wrong_shape_of_an_expert(self, edited: Edited) -> None:
        def grow(tensors: dict[str, torch.Tensor]) -> None:
            tensors["model.layers.2.mlp.experts.1.down_proj.weight"] = torch.zeros(64, 33)

        assert refusal(edited("deepseek_v3", edit_tensors=grow)).endswith(
            "model.layers.2.mlp.experts.1.down_proj.weight: expected [64, 32], got [64, 33]"
        )

    @pytest.mark.parametrize(
        ("dtype", "named"),
        [
            (torch.float8_e4m3fn, "F8_E4M3"),
            (torch.int8, "I8"),
            (torch.uint8, "U8"),
            (torch.float64, "F64"),
        ],
    )
    def test_odd_dtypes(self, edited: Edited, dtype: torch.dtype, named: str) -> None:
        name = "model.layers.2.eh_proj.weight"

        def cast(tensors: dict[str, torch.Tensor]) -> None:
            tensors[name] = tensors[name].to(dtype)

        assert refusal(edited("glm4_moe", edit_tensors=cast)) == (
            "checkpoint PATH: expected tensors of F32, F16, BF16 only, got 1 of other dtypes: "
            f"{name} ({named}); {IN_VLLM}: {vllm_command('PATH')}"
        )

    def test_quantised_target_with_bf16_mtp(self, edited: Edited) -> None:
        def quantise(tensors: dict[str, torch.Tensor]) -> None:
            for name in list(tensors):
                if name.startswith("model.layers.0.self_attn"):
                    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
                if name.startswith("model.layers.2."):
                    tensors[name] = tensors[name].bfloat16()

        message = refusal(edited("deepseek_v3", edit_tensors=quantise))
        assert "got 7 of other dtypes: model.layers.0.self_attn.kv_a_layernorm.weight" in message
        assert "model.layers.2" not in message

    @pytest.mark.parametrize(
        ("config", "method"),
        [
            ({"quant_method": "fp8"}, "fp8"),
            ({"quant_method": "awq", "bits": 4}, "awq"),
            ({"bits": 4}, "a method without a name"),
        ],
    )
    def test_quantization_config(self, edited: Edited, config: object, method: str) -> None:
        path = edited("glm4_moe", lambda content: content.update(quantization_config=config))
        assert refusal(path) == self.quantized(method)

    def test_quantization_by_modelopt(self, edited: Edited) -> None:
        path = edited("glm4_moe")
        content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
        (path / "hf_quant_config.json").write_text(json.dumps(content))
        assert refusal(path) == self.quantized("NVFP4")

    @staticmethod
    def quantized(method: str) -> str:
        return (
            f"checkpoint PATH: expected weights that are not quantized, got {method}; "
            f"{IN_VLLM}: {vllm_command('PATH')}"
        )


class TestFiles:
    def test_no_safetensors(self, edited: Edited) -> None:
        path = edited("glm4_moe")
        (path / "model.safetensors").rename(path / "pytorch_model.bin")
        assert refusal(path) == (
            "checkpoint PATH: expected weights in safetensors files, got pytorch_model.bin; "
            f"{IN_VLLM}: {vllm_command('PATH')}"
        )
        (path / "pytorch_model.bin").unlink()
        assert refusal(path) == (
            "checkpoint PATH: expected model.safetensors or model.safetensors.index.json, "
            "found neither"
        )

    def test_broken_file(self, edited: Edited) -> None:
        path = edited("glm4_moe")
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
        assert refusal(path).startswith("PATH/model.safetensors: expected a safetensors file, got ")

    def test_missing_shard(self, edited: Edited, sharded: Callable[[Path], Path]) -> None:
        path = sharded(edited("glm4_moe"))
        (path / "model-00002-of-00002.safetensors").unlink()
        message = "PATH/model-00002-of-00002.safetensors: expected a safetensors file, got "
        assert refusal(path).startswith(message)
        assert "No such file or directory" in refusal(path)

    def test_index_names_a_tensor_that_no_file_holds(
        self, edited: Edited, sharded: Callable[[Path], Path]
    ) -> None:
        path = sharded(edited("glm4_moe"))
        file = path / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        index["weight_map"]["model.extra"] = "model-00001-of-00002.safetensors"
        file.write_text(json.dumps(index))
        assert refusal(path) == (
            "checkpoint PATH: model.safetensors.index.json names 1 tensor(s) that its files do "
            "not hold: model.extra"
        )

    def test_index_without_a_table(self, edited: Edited) -> None:
        path = edited("glm4_moe")
        (path / "model.safetensors").unlink()
        (path / "model.safetensors.index.json").write_text('{"weight_map": []}')
        assert refusal(path) == (
            "PATH/model.safetensors.index.json: expected a table 'weight_map', got []"
        )

    def test_shards_pass(self, edited: Edited, sharded: Callable[[Path], Path]) -> None:
        path = sharded(edited("glm4_moe"))
        assert preflight(path).num_mtp_layers == 1

    def test_no_weight_is_read(self, edited: Edited, monkeypatch: pytest.MonkeyPatch) -> None:
        def forbidden(*_: Any, **__: Any) -> None:
            raise AssertionError("a weight was read")

        monkeypatch.setattr(
            "mtp_plugin.hosts.embedded.models.checkpoint_files.read_tensors", forbidden
        )
        monkeypatch.setattr("safetensors.torch.load_file", forbidden)
        preflight(edited("deepseek_v3"))


def test_experts_stored_fused_pass(edited: Edited) -> None:
    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        stem = "mtp.layers.0.mlp.experts"
        parts = {
            half: [tensors.pop(f"{stem}.{expert}.{half}_proj.weight") for expert in range(4)]
            for half in ("gate", "up", "down")
        }
        gates_and_ups = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        tensors[f"{stem}.gate_up_proj"] = torch.stack(gates_and_ups)
        tensors[f"{stem}.down_proj"] = torch.stack(parts["down"])

    fused = edited("qwen3_next", edit_tensors=fuse)
    assert preflight(fused).num_mtp_layers == 1


def test_a_whole_file_goes_before_an_index(edited: Edited) -> None:
    # as in transformers
    path = edited("glm4_moe")
    (path / "model.safetensors.index.json").write_text("{}")
    assert preflight(path).num_mtp_layers == 1
