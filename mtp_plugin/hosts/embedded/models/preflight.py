"""Checks that a checkpoint can serve MTP decoding, before any weight is read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from mtp_plugin.errors import (
    CheckpointError,
    ConfigError,
    MTPPluginError,
    UnsupportedModelError,
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
from mtp_plugin.hosts.embedded.models.config_reader import CheckedConfig, read_config
from mtp_plugin.hosts.embedded.models.families import ModelFacts, MTPFamily

FLOATING = ("F32", "F16", "BF16")
WITHOUT_MTP = "to run without MTP, set speculative_config to null (None in Python), or type"
_LAYER = re.compile(r"model\.layers\.(?P<layer>[0-9]{1,9})\.")
_ROUTER = ".mlp.gate.weight"
_OTHER_WEIGHTS = (".bin", ".gguf", ".pt", ".pth")
_STALE_BUFFER = ".rotary_emb.inv_freq"
"""Stored by old converters, computed from the config since."""


@dataclass(frozen=True)
class Preflight:
    """A valid checkpoint, with everything that loading it needs."""

    directory: Path
    facts: ModelFacts
    family: MTPFamily
    config: PreTrainedConfig
    """The transformers config of the target."""
    token_ids: Mapping[str, Any]
    """Known values of `bos_token_id`, `eos_token_id` and `pad_token_id`."""
    num_mtp_layers: int
    """How many MTP layers will run: 0 without drafts, 1 for eagle, K for vanilla."""
    stored: Mapping[str, StoredTensor]
    """Every tensor of the checkpoint by name."""
    plans: tuple[tuple[TensorPlan, ...], ...]
    """Per declared MTP layer, where its tensors come from; empty without drafts."""


def preflight(path: str | Path, *, max_draft_len: int, vanilla: bool) -> Preflight:
    """Check a checkpoint directory from its JSON files and safetensors headers alone.

    Args:
        path: directory in Hugging Face layout.
        max_draft_len: K; 0 checks the target alone.
        vanilla: one MTP layer per depth instead of one layer reused.

    Raises:
        ConfigError: a negative `max_draft_len`.
        UnsupportedModelError: a family, a layer type or quantized weights that do not run here;
            with the command for vLLM.
        CheckpointError: anything else that would make loading fail or draft from invalid weights:
            missing files, bad JSON, too few MTP layers, or tensors that are missing, unknown, of a
            wrong shape, or not fp32, fp16 or bf16.
    """
    if max_draft_len < 0:
        raise ConfigError(f"max_draft_len: expected at least 0, got {max_draft_len}")
    checked = read_config(path)
    declared = checked.facts.num_mtp_layers
    if max_draft_len == 0:
        needed = 0
    elif vanilla:
        needed = max_draft_len
        if needed > declared:
            raise CheckpointError(
                f"checkpoint {checked.directory}: vanilla MTP with max_draft_len = {max_draft_len} "
                f"needs {needed} MTP layers, the checkpoint has {declared}"
            )
    else:
        needed = 1
        if declared == 0:
            raise CheckpointError(
                f"checkpoint {checked.directory}: drafting needs at least 1 MTP layer, "
                f"the checkpoint has 0; {WITHOUT_MTP}",
                _command_without_mtp(checked.directory),
            )
    return _examine_tensors(checked, needed)


def examine(path: str | Path, num_mtp_layers: int | None) -> Preflight:
    """Run `preflight` for a number of MTP layers; None: all that the checkpoint declares.

    Raises:
        ConfigError: a negative number.
        CheckpointError: see `preflight`; also more layers than declared, unless exactly one is.
    """
    if num_mtp_layers is not None and num_mtp_layers < 0:
        raise ConfigError(f"num_mtp_layers: expected at least 0, got {num_mtp_layers}")
    checked = read_config(path)
    declared = checked.facts.num_mtp_layers
    needed = declared if num_mtp_layers is None else num_mtp_layers
    if needed > declared != 1:
        raise CheckpointError(
            f"checkpoint {checked.directory}: expected at most {declared} requested MTP layers, "
            f"got {needed}; only a single layer can be repeated"
        )
    return _examine_tensors(checked, needed)


def _examine_tensors(checked: CheckedConfig, needed: int) -> Preflight:
    """Check the safetensors headers of a checkpoint whose config is valid."""
    where = f"checkpoint {checked.directory}"
    names = sorted(file.name for file in checked.directory.glob("*"))
    others = [name for name in names if name.endswith(_OTHER_WEIGHTS)]
    if others and not any(name.endswith(".safetensors") for name in names):
        raise UnsupportedModelError(
            f"{where}: expected weights in safetensors files, got {listed(others)}; {IN_VLLM}",
            checked.vllm_command,
        )
    stored = read_headers(checked.directory)
    if checked.quantization is not None:
        raise UnsupportedModelError(
            f"{where}: expected weights that are not quantized, got {checked.quantization}; "
            f"{IN_VLLM}",
            checked.vllm_command,
        )
    odd = sorted(
        f"{name} ({tensor.dtype})"
        for name, tensor in stored.items()
        if tensor.dtype not in FLOATING
    )
    if odd:
        raise UnsupportedModelError(
            f"{where}: expected tensors of {', '.join(FLOATING)} only, got {len(odd)} of other "
            f"dtypes: {listed(odd)}; {IN_VLLM}",
            checked.vllm_command,
        )
    check_counts(checked, stored, needed)
    with refused_by_transformers(where):
        target = without_storage(checked.config)
    with named(where):
        plan = plan_target(target, stored)
    _check_target(checked, stored, plan, where)
    plans: tuple[tuple[TensorPlan, ...], ...] = ()
    if needed > 0:
        plans = _plan_mtp(checked, target, stored)
        _check_mtp(checked, stored, plans, where)
    return Preflight(
        directory=checked.directory,
        facts=checked.facts,
        family=checked.family,
        config=checked.config,
        token_ids=checked.token_ids,
        num_mtp_layers=needed,
        stored=stored,
        plans=plans,
    )


def check_counts(
    checked: CheckedConfig, stored: Mapping[str, StoredTensor], num_mtp_layers: int
) -> None:
    """Compare the numbers of layers and experts with the stored tensors, before building modules.

    Args:
        num_mtp_layers: number of layers that will run; if 0, their declared number is not checked.

    Raises:
        CheckpointError: a layer without tensors, more MTP layers than tensors, or a router with a
            different number of experts.
    """
    where, facts = f"checkpoint {checked.directory}", checked.facts
    held = {int(found["layer"]) for found in map(_LAYER.match, stored) if found}
    absent = next((layer for layer in range(facts.num_hidden_layers) if layer not in held), None)
    if absent is not None:
        raise CheckpointError(
            f"{where}: config.json says num_hidden_layers = {facts.num_hidden_layers}, the files "
            f"have no tensor of model.layers.{absent}"
        )
    if num_mtp_layers and facts.num_mtp_layers > len(stored):
        raise CheckpointError(
            f"{where}: config.json says {checked.family.count_key} = {facts.num_mtp_layers}, the "
            f"files have {len(stored)} tensors in all"
        )
    experts: int | None = getattr(checked.config, checked.family.experts_key or "", None)
    for name, tensor in stored.items():
        if experts is not None and name.endswith(_ROUTER) and tensor.shape[:1] != (experts,):
            raise CheckpointError(
                f"{where}: config.json says {checked.family.experts_key} = {experts}, "
                f"{listed([name])} is for {(*tensor.shape, 0)[0]}"
            )


@contextmanager
def named(where: str) -> Iterator[None]:
    """Prefix errors with the checkpoint's path."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None


@contextmanager
def refused_by_transformers(where: str) -> Iterator[None]:
    """Convert any exception of transformers' constructors into a `CheckpointError`."""
    try:
        yield
    except MTPPluginError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{where}: transformers cannot build the model of config.json: "
            f"{type(error).__name__}: {error}"
        ) from error


def _plan_mtp(
    checked: CheckedConfig, target: PreTrainedModel, stored: Mapping[str, StoredTensor]
) -> tuple[tuple[TensorPlan, ...], ...]:
    declared = checked.facts.num_mtp_layers
    with refused_by_transformers(f"checkpoint {checked.directory}"):
        layers = build_layers(target, checked.config, checked.family, num_layers=declared)
    with named(f"checkpoint {checked.directory}"):
        return tuple(
            plan_layer(
                layer,
                checked.family,
                num_hidden_layers=checked.facts.num_hidden_layers,
                depth=depth,
                stored=stored,
            )
            for depth, layer in enumerate(layers)
        )


def _command_without_mtp(directory: Path) -> str:
    return f"mtp-plugin generate --model {shlex.quote(str(directory))} --no-mtp"


def _check_target(
    checked: CheckedConfig,
    stored: Mapping[str, StoredTensor],
    plans: tuple[TensorPlan, ...],
    where: str,
) -> None:
    _check_present(stored, plans, "the target", where)
    known = {name for plan in plans for name in plan.sources} | {"lm_head.weight"}
    unknown = sorted(
        name
        for name in stored
        if name not in known
        and not name.endswith(_STALE_BUFFER)
        and not owned_by_mtp(name, checked.family, checked.facts.num_hidden_layers)
    )
    if unknown:
        raise CheckpointError(
            f"{where}: {len(unknown)} tensor(s) are unknown to a target of family "
            f"{checked.family.model_type}: {listed(unknown)}"
        )
    _check_shapes(stored, plans, "target", where)


def _check_mtp(
    checked: CheckedConfig,
    stored: Mapping[str, StoredTensor],
    plans: tuple[tuple[TensorPlan, ...], ...],
    where: str,
) -> None:
    family, facts = checked.family, checked.facts
    flat = tuple(plan for layer in plans for plan in layer)
    owner = f"{facts.num_mtp_layers} MTP layer(s)"
    if not any(owned_by_mtp(name, family, facts.num_hidden_layers) for name in stored):
        raise CheckpointError(
            f"{where}: config.json declares {owner}, the files have none of their tensors "
            f"(transformers leaves them out when it saves a model): take the files of the original "
            f"checkpoint; {WITHOUT_MTP}",
            _command_without_mtp(checked.directory),
        )
    _check_present(stored, flat, owner, where)
    known = {name for plan in flat for name in plan.sources} | {
        template.format(layer=facts.num_hidden_layers + depth, depth=depth)
        for template in family.ignorable
        for depth in range(facts.num_mtp_layers)
    }
    unknown = sorted(
        name
        for name in stored
        if name not in known and owned_by_mtp(name, family, facts.num_hidden_layers)
    )
    if unknown:
        raise CheckpointError(
            f"{where}: {len(unknown)} tensor(s) are unknown to the {owner} of family "
            f"{family.model_type}: {listed(unknown)}"
        )
    _check_shapes(stored, flat, "MTP", where)


def _check_present(
    stored: Mapping[str, StoredTensor], plans: tuple[TensorPlan, ...], owner: str, where: str
) -> None:
    expected = {name for plan in plans for name in plan.sources}
    missing = sorted(expected - stored.keys())
    if missing:
        raise CheckpointError(
            f"{where}: expected {len(expected)} tensors of {owner}, {len(missing)} are missing: "
            f"{listed(missing)}"
        )


def _check_shapes(
    stored: Mapping[str, StoredTensor], plans: tuple[TensorPlan, ...], kind: str, where: str
) -> None:
    wrong = [
        f"{name}: expected {list(plan.source_shape)}, got {list(stored[name].shape)}"
        for plan in plans
        for name in plan.sources
        if stored[name].shape != plan.source_shape
    ]
    if wrong:
        raise CheckpointError(
            f"{where}: {len(wrong)} {kind} tensor(s) have a wrong shape: {listed(wrong)}"
        )


def owned_by_mtp(name: str, family: MTPFamily, num_hidden_layers: int) -> bool:
    """Whether a checkpoint tensor belongs to the MTP layers."""
    found = re.match(family.owned, name)
    if found is None:
        return False
    layer = found.groupdict().get("layer")
    return layer is None or int(layer) >= num_hidden_layers
