"""What a checkpoint says about itself, read from its JSON files only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtp_plugin.errors import CheckpointError
from mtp_plugin.executor.models.checkpoint_files import checkpoint_directory, read_json
from mtp_plugin.executor.models.families import family_of

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a checkpoint. Nobody writes into them, and they hold nothing a user chose."""

    model_type: str
    architecture: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    num_mtp_layers: int
    """Number of MTP layers the config declares (D)."""
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    """From generation_config.json, else from config.json; empty where neither says."""
    dtype: torch.dtype
    """The dtype the config names; float32 where it names none."""


def read_facts(path: str | Path) -> ModelFacts:
    """Read `config.json` (and `generation_config.json` where present) of a checkpoint directory.

    Raises:
        CheckpointError: no directory, no config, bad JSON, a key missing or of a wrong kind.
        UnsupportedModelError: the model family does not run here.
    """
    directory = checkpoint_directory(path)
    config = read_json(directory / "config.json")
    generation_file = directory / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    return facts_from_config(config, generation, where=directory / "config.json")


def facts_from_config(
    config: dict[str, Any], generation: dict[str, Any], *, where: Path
) -> ModelFacts:
    """`read_facts` on files that were already read."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{where}: expected a string 'model_type', got {model_type!r}")
    family = family_of(model_type)
    architectures = config.get("architectures") or [""]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise CheckpointError(
            f"{where}: expected a list of names 'architectures', got {architectures!r}"
        )
    num_mtp_layers = family.default_count
    if family.count_key is not None and config.get(family.count_key) is not None:
        num_mtp_layers = _count(config, family.count_key, where, at_least=0)
    eos = generation.get("eos_token_id")
    return ModelFacts(
        model_type=model_type,
        architecture=architectures[0],
        hidden_size=_count(config, "hidden_size", where),
        vocab_size=_count(config, "vocab_size", where),
        num_hidden_layers=_count(config, "num_hidden_layers", where),
        num_mtp_layers=num_mtp_layers,
        max_position_embeddings=_count(config, "max_position_embeddings", where),
        eos_token_ids=_token_ids(config.get("eos_token_id") if eos is None else eos, where),
        dtype=_dtype(config, where),
    )


def _count(config: dict[str, Any], key: str, where: Path, *, at_least: int = 1) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise CheckpointError(
            f"{where}: expected an integer {key!r} of at least {at_least}, got {value!r}"
        )
    return value


def _token_ids(value: object, where: Path) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(id_, int) and not isinstance(id_, bool) and id_ >= 0 for id_ in ids):
        raise CheckpointError(
            f"{where}: expected 'eos_token_id' to be a token id or a list of them, got {value!r}"
        )
    return tuple(ids)


def _dtype(config: dict[str, Any], where: Path) -> torch.dtype:
    name = config.get("dtype", config.get("torch_dtype")) or "float32"
    if name not in _DTYPES:
        raise CheckpointError(
            f"{where}: expected 'dtype' to be one of {', '.join(_DTYPES)}, got {name!r}"
        )
    return _DTYPES[name]
