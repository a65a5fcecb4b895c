"""The checkpoint folder: writing and reading it."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from integration.tiny_model.model import ModelShape, TinyMtpModel

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def save_checkpoint(model: TinyMtpModel, folder: Path, tokenizer_folder: Path) -> None:
    """Write weights in bfloat16, both configurations and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.shape.to_hf_config(), indent=2) + "\n")
    generation = {"eos_token_id": 0, "pad_token_id": 0, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if tokenizer_folder.resolve() != folder.resolve():
        for name in TOKENIZER_FILES:
            shutil.copyfile(tokenizer_folder / name, folder / name)
    # write a temporary file and rename it, so that an interrupted run leaves no partial file
    unfinished = folder / "model.safetensors.part"
    save_file(to_checkpoint(model), str(unfinished), metadata={"format": "pt"})
    unfinished.chmod(0o644)
    unfinished.replace(folder / "model.safetensors")


def load_checkpoint(folder: Path) -> TinyMtpModel:
    """Read a checkpoint folder into a float32 model on the CPU, in evaluation mode."""
    shape = ModelShape.from_hf_config(json.loads((folder / "config.json").read_text()))
    model = TinyMtpModel(shape)
    tensors = load_file(str(folder / "model.safetensors"))
    own = {}
    for name, tensor in model.state_dict().items():
        parts = [tensors[key] for key in _checkpoint_keys(name, shape)]
        own[name] = torch.cat(parts, dim=_split_dim(name)).to(tensor.dtype)
    model.load_state_dict(own)
    return model.eval()


def to_checkpoint(model: TinyMtpModel) -> dict[str, Tensor]:
    """The tensors under the names of real GLM-4.5 checkpoints, one entry per expert."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        keys = _checkpoint_keys(name, model.shape)
        for key, part in zip(keys, tensor.chunk(len(keys), dim=_split_dim(name)), strict=True):
            dtype = torch.float32 if key.endswith("correction_bias") else torch.bfloat16
            tensors[key] = (
                part.detach().to("cpu", dtype).clone(memory_format=torch.contiguous_format)
            )
    return tensors


def _checkpoint_keys(name: str, shape: ModelShape) -> list[str]:
    """The keys that one tensor of `TinyMtpModel` is stored under, in the order of its slices."""
    if name == "lm_head.weight":
        return [name]
    if name.startswith("mtp."):
        _, depth, rest = name.split(".", 2)
        if rest.startswith("norm."):
            rest = "shared_head." + rest
        name = f"layers.{shape.num_hidden_layers + int(depth)}.{rest.removeprefix('block.')}"
    name = "model." + name
    if name.endswith("mlp.e_score_correction_bias"):
        return [name.replace("mlp.", "mlp.gate.")]
    if not _is_expert_projection(name, shape):
        return [name]
    owners = [f"experts.{index}" for index in range(shape.n_routed_experts)] + ["shared_experts"]
    return [name.replace("mlp.", f"mlp.{owner}.") for owner in owners]


def _is_expert_projection(name: str, shape: ModelShape) -> bool:
    prefix, _, rest = name.partition(".mlp.")
    if rest.removesuffix(".weight") not in _EXPERT_PROJECTIONS:
        return False
    return int(prefix.rsplit(".", 1)[1]) >= shape.num_hidden_layers - 1


def _split_dim(name: str) -> int:
    return 1 if name.endswith("down_proj.weight") else 0
