"""The measured model: a checkpoint, or random weights of a named size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from integration.bench.case import BenchmarkError
from integration.random_models import random_model
from integration.shapes import SHAPES
from mtp_plugin.errors import expect
from mtp_plugin.hosts.embedded.models import (
    FusedModel,
    LoadedModel,
    fuse,
    load_model,
    read_config,
    read_tokenizer,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, eq=False)
class Subject:
    """A model on its device."""

    name: str
    model: LoadedModel
    path: str
    """Checkpoint directory, or the name of the shape."""
    is_trained: bool
    """False for random weights, whose drafts are meaningless."""
    tokenizer: Any = None

    @property
    def device(self) -> torch.device:
        return next(self.model.lm_head.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.lm_head.parameters()).dtype

    @property
    def num_parameters(self) -> int:
        """Number of parameters of target and MTP layers."""
        modules = (self.model.target, self.model.mtp_layers)
        return sum(p.numel() for module in modules for p in module.parameters())

    def as_dict(self) -> dict[str, Any]:
        facts = self.model.facts
        return {
            "name": self.name,
            "weights": "checkpoint" if self.is_trained else "random",
            "family": facts.model_type,
            "hidden_size": facts.hidden_size,
            "num_hidden_layers": facts.num_hidden_layers,
            "num_mtp_layers": facts.num_mtp_layers,
            "vocab_size": facts.vocab_size,
            "parameters": self.num_parameters,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "routing": "by the model's own router, from its weights",
            "layers": str(self.model.report) if isinstance(self.model, FusedModel) else "unfused",
        }


def load_checkpoint(path: Path, device: torch.device, dtype: str | None, *, fused: bool) -> Subject:
    """Load a checkpoint with all MTP layers; the default dtype on a CPU is float32.

    Raises:
        BenchmarkError: the dtype is unknown.
        CheckpointError: see `read_config`, `read_tokenizer` and `load_model`.
    """
    requested = _dtype(dtype)
    checked = read_config(path)
    tokenizer = read_tokenizer(checked)
    stored = torch.float32 if device.type == "cpu" else checked.facts.dtype
    model = load_model(path, dtype=requested or stored, device=device)
    model = fuse(model) if fused else model
    resolved = path.resolve()
    name = resolved.parent.name if resolved.name == "checkpoint" else resolved.name
    return Subject(name, model, str(path), True, tokenizer)


def make_shape(
    name: str,
    device: torch.device,
    dtype: str | None,
    seed: int,
    *,
    fused: bool,
) -> Subject:
    """Create a model with random weights; the default dtype is bfloat16.

    Raises:
        BenchmarkError: the shape or dtype is unknown.
    """
    expect(
        name in SHAPES,
        BenchmarkError,
        f"--shape: expected one of {', '.join(SHAPES)}, got {name!r}",
    )
    sizes = dict(SHAPES[name])
    family = sizes.pop("family")
    model = random_model(
        family, seed=seed, dtype=_dtype(dtype) or torch.bfloat16, device=device, **sizes
    )
    return Subject(name, fuse(model) if fused else model, name, False)


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    expect(
        name in DTYPES,
        BenchmarkError,
        f"--dtype: expected one of {', '.join(DTYPES)}, got {name}",
    )
    return DTYPES[name]
