"""Scenario R43 and its relatives: what must fail before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtp_plugin.checkpoint.vllm_command import IN_VLLM, vllm_command
from mtp_plugin.errors import CheckpointError, UnsupportedModelError
from mtp_plugin.hosts.embedded.models import FAMILIES, load_model, preflight
from mtp_plugin.hosts.embedded.models.loader import WITHOUT_MTP

Edited = Callable[..., Path]
Sharded = Callable[[Path], Path]
Tensors = dict[str, torch.Tensor]
INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00002.safetensors"
TO_VLLM = f"; {IN_VLLM}: {vllm_command('PATH')}"
"""The end of a refusal of what vLLM may run."""


def refusal(path: Path, num_mtp_layers: int | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        preflight(path, num_mtp_layers)
    return str(caught.value).replace(str(path), "PATH")


@pytest.fixture
def _no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("mtp_plugin.hosts.embedded.models.loader.read_tensors", forbidden)


@pytest.mark.usefixtures("_no_weight_is_read")
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_good_checkpoints_pass(checkpoint: Callable[..., Path], family: str) -> None:
    found = preflight(checkpoint(family))
    assert found.facts.model_type == found.family.model_type == family
    assert found.num_mtp_layers == 1
    planned = {name for plan in found.plans[0] for name in plan.sources}
    assert planned <= set(found.stored)
    assert preflight(checkpoint(family), 3).num_mtp_layers == 3  # one layer, repeated
    assert preflight(checkpoint(family), 0).plans == ()


def drop_mtp(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("mtp.")]:
        del tensors[name]


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.ones(shape).to(dtype)})


def config_with(**values: object) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(values)


EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"
ODD = "expected tensors of F32, F16, BF16 only, got"
UNKNOWN = "tensor(s) are unknown to the model of config.json:"
EH_PROJ, INPUT_PROJ = "model.layers.2.eh_proj.weight", "model.mtp_layers.0.input_proj.weight"
LINEAR = "expected only full_attention layers, got layer types linear_attention"
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
        drop(EXPERT),
        f"1 tensor(s) of the MTP layers are missing: {EXPERT} (of 4 experts); take the",
    ),
    (
        "mimo",
        None,
        drop("model.norm.weight"),
        "1 tensor(s) of the target are missing: model.norm.weight; take the files of the original",
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
        "2 tensor(s) of the target do not fit: model.embed_tokens.weight [512, 64] (expected "
        "[500, 64]), lm_head.weight [512, 64] (expected [500, 64]); take the files",
    ),
    (
        "mimo",
        None,
        put(INPUT_PROJ, 64, 64),
        f"1 tensor(s) of the MTP layers do not fit: {INPUT_PROJ} [64, 64] (expected [64, 128])",
    ),
    (
        "deepseek_v3",
        None,
        put("model.layers.2.mlp.experts.1.down_proj.weight", 64, 33),
        "1 tensor(s) of the MTP layers do not fit: model.layers.2.mlp.experts.1.down_proj.weight "
        "[64, 33] (expected [64, 32])",
    ),
    (
        "mimo",
        None,
        put("model.layers.0.self_attn.q_proj.weight", 64, 63),
        "1 tensor(s) have a wrong shape: model.layers.0.self_attn.q_proj.weight: expected [64, "
        "64], got [64, 63]",
    ),
    *(
        (
            "glm4_moe",
            None,
            put(EH_PROJ, 64, 128, dtype=dtype),
            f"{ODD} 1 of other dtypes: {EH_PROJ} ({name}){TO_VLLM}",
        )
        for dtype, name in ((torch.float8_e4m3fn, "F8_E4M3"), (torch.float64, "F64"))
    ),
    # refused before so many modules are built
    (
        "glm4_moe",
        config_with(num_hidden_layers=1000),
        None,
        "config.json says num_hidden_layers = 1000, the files have no tensor of model.layers.3",
    ),
    (
        "glm4_moe",
        config_with(n_routed_experts=60_000),
        None,
        "179988 tensor(s) of the MTP layers are missing: model.layers.2.mlp.experts.10.down_proj",
    ),
    (
        "deepseek_v3",
        config_with(n_routed_experts=60_000, num_nextn_predict_layers=0),
        lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith("model.layers.2.")],
        "179976 tensor(s) of the target are missing: model.layers.1.mlp.experts.",
    ),
    (
        "qwen3_next",
        config_with(layer_types=["linear_attention", "full_attention"]),
        None,
        f"{LINEAR} (1 of 2 layers){TO_VLLM}",
    ),
    # a config without layer types means three linear layers of four
    (
        "qwen3_next",
        lambda config: (config.pop("layer_types"), config.update(num_hidden_layers=4)),
        None,
        f"{LINEAR} (3 of 4 layers); vLLM",
    ),
    # names that no terminal should show
    *(
        ("glm4_moe", None, put(name, 1), f"1 {UNKNOWN} {shown}")
        for name, shown in (
            ("model.layers." + "9" * 5000 + ".x", "model.layers." + "9" * 184 + "..."),
            ("model.\x1b[31m\n", r"'model.\x1b[31m\n'"),
        )
    ),
]


@pytest.mark.parametrize(("family", "config", "tensors", "message"), WRONG)
def test_wrong_tensors(
    edited: Edited, family: str, config: Any, tensors: Any, message: str
) -> None:
    path = edited(family, config, tensors)
    assert refusal(path).startswith(f"checkpoint PATH: {message}")
    if TO_VLLM in message:
        with pytest.raises(UnsupportedModelError):
            load_model(path)


def test_other_kinds_of_files(edited: Edited) -> None:
    path = edited("glm4_moe")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    assert refusal(path) == (
        f"checkpoint PATH: expected weights in safetensors files, got pytorch_model.bin{TO_VLLM}"
    )
    (path / "pytorch_model.bin").unlink()
    assert refusal(path) == "checkpoint PATH: expected *.safetensors files, found none"


def test_shards(edited: Edited, sharded: Sharded) -> None:
    path = sharded(edited("glm4_moe"))
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["model.extra"] = SHARD
    (path / INDEX).write_text(json.dumps(index))
    assert preflight(path).num_mtp_layers == 1  # the names of its files count
    (path / INDEX).write_text('{"weight_map": []}')
    assert refusal(path) == f"PATH/{INDEX}: expected a table 'weight_map', got []"
    (path / INDEX).write_text("[]")
    assert refusal(path) == f"PATH/{INDEX}: expected a JSON object, got list"
    del index["weight_map"]["model.extra"]
    del index["metadata"]  # is not read
    (path / INDEX).write_text(json.dumps(index))
    extra = {**load_file(path / SHARD), "lm_head.weight": torch.zeros(512, 64)}
    save_file(extra, path / SHARD, {"format": "pt"})
    head = load_model(path).target.get_output_embeddings().weight
    assert not head.any()  # of a tensor in several files, the last one counts
    (path / SHARD).unlink()
    absent = f"PATH/{INDEX}: names 1 file(s) that are not there: {SHARD}; download them"
    assert refusal(path) == absent


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("../model.safetensors", "'../model.safetensors'"),
        ("/etc/model.safetensors", "'/etc/model.safetensors'"),
        ("pytorch_model.bin", "'pytorch_model.bin'"),
        ("a\0.safetensors", r"'a\x00.safetensors'"),
        ("..\\a.safetensors", r"'..\\a.safetensors'"),
        (["a"], "a list"),
        (None, "null"),
    ],
)
def test_shards_by_plain_names(edited: Edited, file: object, shown: str) -> None:
    path = edited("glm4_moe")
    (path / "model.safetensors").rename(path / SHARD)
    content = {"weight_map": {"lm_head.weight": file}}
    (path / INDEX).write_text(json.dumps(content))
    assert refusal(path) == (
        f"PATH/{INDEX}: expected plain names of .safetensors files next to it, got {shown}"
    )
