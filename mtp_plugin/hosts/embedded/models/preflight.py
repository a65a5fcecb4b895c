"""Checks that a checkpoint can serve MTP decoding, before any weight is read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from mtp_plugin.errors import (
    CheckpointError,
    ConfigError,
    MTPPluginError,
    UnsupportedModelError,
    describe_error,
)
from mtp_plugin.extras import IN_VLLM
from mtp_plugin.hosts.embedded.models.block_layout import (
    TensorPlan,
    build_layers,
    plan_layer,
    plan_target,
    without_storage,
)
from mtp_plugin.hosts.embedded.models.checkpoint_files import (
    StoredTensor,
    listed,
    read_headers,
)
from mtp_plugin.hosts.embedded.models.config_reader import (
    LONGEST_REASON,
    CheckedConfig,
    read_config,
)
from mtp_plugin.hosts.embedded.models.families import MTPFamily

FLOATING = ("F32", "F16", "BF16")
WITHOUT_MTP = "to run without MTP, set speculative_config to null (None in Python), or type"
_OTHER_WEIGHTS = (".bin", ".gguf", ".pt", ".pth")
_STALE_BUFFER = ".rotary_emb.inv_freq"
"""Stored by old converters, computed from the config since."""


@dataclass(frozen=True)
class Preflight(CheckedConfig):
    """A valid checkpoint, with everything that loading it needs."""

    num_mtp_layers: int
    """How many MTP layers will run: 0 without drafts, 1 for eagle, K for vanilla."""
    stored: Mapping[str, StoredTensor]
    """Every tensor of the checkpoint by name."""
    plans: tuple[tuple[TensorPlan, ...], ...]
    """Per declared MTP layer, where its tensors come from; empty without drafts."""


def preflight(path: str | Path, num_mtp_layers: int | None = None) -> Preflight:
    """Check a checkpoint directory from its JSON files and safetensors headers alone.

    Args:
        path: directory in Hugging Face layout.
        num_mtp_layers: number of MTP layers that will run; 0 checks the target alone; None: all
            that the checkpoint declares.

    Raises:
        ConfigError: a negative number.
        UnsupportedModelError: a family, a layer type or a dtype (quantized weights) that does not
            run here; with the command for vLLM.
        CheckpointError: anything else that would make loading fail or draft from invalid weights:
            missing files, bad JSON, more layers than declared (unless exactly one is), or tensors
            that are missing, unknown, of a wrong shape, or not fp32, fp16 or bf16.
    """
    if num_mtp_layers is not None and num_mtp_layers < 0:
        raise ConfigError(f"num_mtp_layers: expected at least 0, got {num_mtp_layers}")
    checked = read_config(path)
    where, declared = f"checkpoint {checked.directory}", checked.facts.num_mtp_layers
    needed = declared if num_mtp_layers is None else num_mtp_layers
    if needed > declared != 1:
        raise CheckpointError(
            f"{where}: expected at most {declared} requested MTP layers, got {needed}; only a "
            "single layer can be repeated"
        )

    def refuse_in_favour_of_vllm(message: str) -> None:
        raise UnsupportedModelError(f"{where}: {message}; {IN_VLLM}", checked.vllm_command)

    names = sorted(file.name for file in checked.directory.glob("*"))
    others = [name for name in names if name.endswith(_OTHER_WEIGHTS)]
    if others and not any(name.endswith(".safetensors") for name in names):
        refuse_in_favour_of_vllm(f"expected weights in safetensors files, got {listed(others)}")
    stored = read_headers(checked.directory)
    odd = sorted(f"{n} ({each.dtype})" for n, each in stored.items() if each.dtype not in FLOATING)
    if odd:
        refuse_in_favour_of_vllm(
            f"expected tensors of {', '.join(FLOATING)} only, got {len(odd)} of other dtypes: "
            f"{listed(odd)}"
        )
    family, first = checked.family, checked.facts.num_hidden_layers
    owners = {".".join(name.split(".", 3)[:3]) for name in stored}
    for layer in range(first):
        if f"model.layers.{layer}" not in owners:  # before building so many
            raise CheckpointError(
                f"{where}: config.json says num_hidden_layers = {first}, the files have no tensor "
                f"of model.layers.{layer}"
            )
    mtp = {name for name in stored if _is_of_mtp(name, family, first)}
    if needed and not mtp:
        raise CheckpointError(
            f"{where}: config.json declares {declared} MTP layer(s), the files have none of their "
            "tensors (transformers leaves them out when it saves a model): take the files of the "
            f"original checkpoint; {WITHOUT_MTP}",
            f"mtp-plugin generate --model {shlex.quote(str(checked.directory))} --no-mtp",
        )
    depths = range(declared if needed else 0)
    try:
        target = without_storage(checked.config)
        plan = plan_target(target, stored)
        plans = tuple(
            plan_layer(layer, family, num_hidden_layers=first, depth=depth, stored=stored)
            for depth, layer in enumerate(build_layers(target, checked.config, family, len(depths)))
        )
    except MTPPluginError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except Exception as error:  # transformers has no single error type for a bad config
        raise CheckpointError(
            f"{where}: transformers cannot build the model of config.json: "
            f"{describe_error(error)[:LONGEST_REASON]}"
        ) from error
    copies = {
        t.format(layer=first + depth, depth=depth) for t in family.ignorable for depth in depths
    }
    stale = {name for name in stored if name.endswith(_STALE_BUFFER)}
    ignored = {"lm_head.weight"} | stale | copies | (set() if needed else mtp)
    _check_tensors(where, stored, [*plan, *chain(*plans)], ignored)
    return Preflight(**vars(checked), num_mtp_layers=needed, stored=stored, plans=plans)


def _check_tensors(
    where: str, stored: Mapping[str, StoredTensor], plans: Sequence[TensorPlan], ignored: Set[str]
) -> None:
    """Refuse missing and unknown tensors, and those of a wrong shape.

    Args:
        ignored: stored names that may be there in addition to those of ``plans``.
    """
    shapes = {name: plan.source_shape for plan in plans for name in plan.sources}
    missing = sorted(shapes.keys() - stored.keys())
    unknown = sorted(stored.keys() - shapes.keys() - ignored)
    wrong = [
        f"{name}: expected {list(shape)}, got {list(stored[name].shape)}"
        for name, shape in shapes.items()
        if name in stored and stored[name].shape != shape
    ]
    for names, problem in (
        (missing, f"of the {len(shapes)} tensors of config.json are missing"),
        (unknown, "tensor(s) are unknown to the model of config.json"),
        (wrong, "tensor(s) have a wrong shape"),
    ):
        if names:
            raise CheckpointError(f"{where}: {len(names)} {problem}: {listed(names)}")


def _is_of_mtp(name: str, family: MTPFamily, num_hidden_layers: int) -> bool:
    """Whether a checkpoint tensor belongs to the MTP layers."""
    found = re.match(family.owned, name)
    if found is None:
        return False
    layer = found.groupdict().get("layer")
    return layer is None or int(layer) >= num_hidden_layers
