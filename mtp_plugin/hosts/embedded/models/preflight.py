"""Checks that a checkpoint can serve MTP decoding, before any weight is read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
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
_LAYER = re.compile(r"model\.layers\.(?P<layer>[0-9]{1,9})\.")
_ROUTER = ".mlp.gate.weight"
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

    def refuse_in_favour_of_vllm(message: str) -> None:
        raise UnsupportedModelError(f"{where}: {message}; {IN_VLLM}", checked.vllm_command)

    names = sorted(file.name for file in checked.directory.glob("*"))
    others = [name for name in names if name.endswith(_OTHER_WEIGHTS)]
    if others and not any(name.endswith(".safetensors") for name in names):
        refuse_in_favour_of_vllm(f"expected weights in safetensors files, got {listed(others)}")
    stored = read_headers(checked.directory)
    if checked.quantization is not None:
        refuse_in_favour_of_vllm(
            f"expected weights that are not quantized, got {checked.quantization}"
        )
    odd = sorted(f"{n} ({each.dtype})" for n, each in stored.items() if each.dtype not in FLOATING)
    if odd:
        refuse_in_favour_of_vllm(
            f"expected tensors of {', '.join(FLOATING)} only, got {len(odd)} of other dtypes: "
            f"{listed(odd)}"
        )
    check_counts(checked, stored, needed)
    family, first = checked.family, checked.facts.num_hidden_layers
    mtp = {name for name in stored if owned_by_mtp(name, family, first)}
    plans: tuple[tuple[TensorPlan, ...], ...] = ()
    with _errors_of(where):
        target = without_storage(checked.config)
        plan = plan_target(target, stored)
    ignored = {"lm_head.weight", *(name for name in stored if name.endswith(_STALE_BUFFER))}
    _check_tensors(stored, plan, ignored | mtp, "the target", checked)
    if needed > 0:
        if not mtp:
            raise CheckpointError(
                f"{where}: config.json declares {_layers_of(checked)}, the files have none of "
                "their tensors (transformers leaves them out when it saves a model): take the "
                f"files of the original checkpoint; {WITHOUT_MTP}",
                _command_without_mtp(checked.directory),
            )
        with _errors_of(where):
            layers = build_layers(target, checked.config, family, checked.facts.num_mtp_layers)
            plans = tuple(
                plan_layer(layer, family, num_hidden_layers=first, depth=depth, stored=stored)
                for depth, layer in enumerate(layers)
            )
        flat = tuple(plan for layer in plans for plan in layer)
        copies = {
            template.format(layer=first + depth, depth=depth)
            for template in family.ignorable
            for depth in range(len(plans))
        }
        _check_tensors(stored, flat, copies | (stored.keys() - mtp), _layers_of(checked), checked)
    return Preflight(**vars(checked), num_mtp_layers=needed, stored=stored, plans=plans)


def _layers_of(checked: CheckedConfig) -> str:
    return f"{checked.facts.num_mtp_layers} MTP layer(s)"


def _check_tensors(
    stored: Mapping[str, StoredTensor],
    plans: tuple[TensorPlan, ...],
    ignored: Set[str],
    owner: str,
    checked: CheckedConfig,
) -> None:
    """Refuse missing and unknown tensors of a module, and those of a wrong shape.

    Args:
        ignored: stored names that may be there in addition to those of ``plans``.
    """
    where = f"checkpoint {checked.directory}"
    expected = {name for plan in plans for name in plan.sources}
    missing = sorted(expected - stored.keys())
    if missing:
        raise CheckpointError(
            f"{where}: expected {len(expected)} tensors of {owner}, {len(missing)} are missing: "
            f"{listed(missing)}"
        )
    unknown = sorted(stored.keys() - expected - ignored)
    if unknown:
        raise CheckpointError(
            f"{where}: {len(unknown)} tensor(s) are unknown to {owner} of family "
            f"{checked.family.model_type}: {listed(unknown)}"
        )
    wrong = [
        f"{name}: expected {list(plan.source_shape)}, got {list(stored[name].shape)}"
        for plan in plans
        for name in plan.sources
        if stored[name].shape != plan.source_shape
    ]
    if wrong:
        raise CheckpointError(
            f"{where}: {len(wrong)} tensor(s) of {owner} have a wrong shape: {listed(wrong)}"
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
def _errors_of(where: str) -> Iterator[None]:
    """Convert any exception of transformers' constructors into a `CheckpointError`."""
    try:
        yield
    except MTPPluginError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except Exception as error:
        raise CheckpointError(
            f"{where}: transformers cannot build the model of config.json: "
            f"{describe_error(error)[:LONGEST_REASON]}"
        ) from error


def _command_without_mtp(directory: Path) -> str:
    return f"mtp-plugin generate --model {shlex.quote(str(directory))} --no-mtp"


def owned_by_mtp(name: str, family: MTPFamily, num_hidden_layers: int) -> bool:
    """Whether a checkpoint tensor belongs to the MTP layers."""
    found = re.match(family.owned, name)
    if found is None:
        return False
    layer = found.groupdict().get("layer")
    return layer is None or int(layer) >= num_hidden_layers
