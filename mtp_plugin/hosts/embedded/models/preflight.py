"""Checks that a checkpoint can serve MTP decoding, before any weight is read."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from mtp_plugin.checkpoint import FLOATING, Checkpoint, read_checkpoint
from mtp_plugin.checkpoint.files import StoredTensor, listed
from mtp_plugin.checkpoint.vllm_command import IN_VLLM
from mtp_plugin.errors import (
    CheckpointError,
    ConfigError,
    MTPPluginError,
    UnsupportedModelError,
    describe_error,
)
from mtp_plugin.hosts.embedded.models.block_layout import (
    TensorPlan,
    build_layers,
    plan_layer,
    plan_target,
    without_storage,
)
from mtp_plugin.hosts.embedded.models.config_reader import (
    LONGEST_REASON,
    CheckedConfig,
    read_config,
)

WITHOUT_MTP = "to run without MTP, set speculative_config to null (None in Python), or type"
_OTHER_WEIGHTS = (".bin", ".pt", ".pth")
_STALE_BUFFER = ".rotary_emb.inv_freq"
"""Stored by old converters, computed from the config since."""


@dataclass(frozen=True)
class Preflight(CheckedConfig):
    """A valid checkpoint, with everything that loading it needs."""

    num_mtp_layers: int
    """How many MTP layers will run: 0 without drafts, 1 for eagle, K for vanilla."""
    checkpoint: Checkpoint
    plans: tuple[tuple[TensorPlan, ...], ...]
    """Per declared MTP layer, where its tensors come from; empty without drafts."""

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        """Every tensor of the checkpoint by name."""
        return self.checkpoint.tensors


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

    def refuse_in_favour_of_vllm(message: str) -> None:
        raise UnsupportedModelError(f"{where}: {message}; {IN_VLLM}", checked.vllm_command)

    names = sorted(file.name for file in checked.directory.glob("*"))
    others = [name for name in names if name.endswith(_OTHER_WEIGHTS)]
    if others and not any(name.endswith(".safetensors") for name in names):
        refuse_in_favour_of_vllm(f"expected weights in safetensors files, got {listed(others)}")
    checkpoint = read_checkpoint(checked.directory)
    stored = checkpoint.tensors
    odd = sorted(f"{n} ({each.dtype})" for n, each in stored.items() if each.dtype not in FLOATING)
    if odd:
        refuse_in_favour_of_vllm(
            f"expected tensors of {', '.join(FLOATING)} only, got {len(odd)} of other dtypes: "
            f"{listed(odd)}"
        )
    _refuse_problems(checkpoint, with_mtp=needed > 0)
    if needed > declared != 1:
        raise CheckpointError(
            f"{where}: expected at most {declared} requested MTP layers, got {needed}; only a "
            "single layer can be repeated"
        )
    family, first = checked.family, checked.facts.num_hidden_layers
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
    ignored = {"lm_head.weight"} | stale | copies | (set() if needed else checkpoint.mtp.keys())
    _check_tensors(where, stored, [*plan, *chain(*plans)], ignored)
    return Preflight(**vars(checked), num_mtp_layers=needed, checkpoint=checkpoint, plans=plans)


def check_declared(path: str | Path) -> None:
    """Refuse a checkpoint with MTP layers that its config does not declare.

    Raises:
        CheckpointError: these, or files that cannot be read.
    """
    checkpoint = read_checkpoint(path)
    if checkpoint.found and not checkpoint.declared:
        _refuse_problems(checkpoint, with_mtp=True)


def _refuse_problems(checkpoint: Checkpoint, *, with_mtp: bool) -> None:
    where = f"checkpoint {checkpoint.directory}"
    for problem in checkpoint.problems:
        if problem.is_of_vllm or (problem.is_of_mtp and not with_mtp):
            continue
        if not problem.is_of_mtp:
            raise CheckpointError(f"{where}: {problem.text}")
        raise CheckpointError(
            f"{where}: {problem.text}; {WITHOUT_MTP}",
            f"mtp-plugin generate --model {shlex.quote(str(checkpoint.directory))} --no-mtp",
        )


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
