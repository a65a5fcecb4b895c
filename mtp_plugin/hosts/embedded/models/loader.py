"""Loads a checkpoint: its files are checked, then each weight is read into its module.

The path of a weight: `preflight` builds the modules without storage and plans which stored tensors
each of their tensors is made of (`TensorPlan`); `load_model` reads these and assigns them, those of
the target and of the MTP layers alike.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import mtp_plugin.hosts.embedded.attention.bridge  # noqa: F401 - registers the attention functions
from mtp_plugin.checkpoint import FLOATING, Checkpoint, read_checkpoint
from mtp_plugin.checkpoint.check import OTHER_COPIES, OWN_HEAD
from mtp_plugin.checkpoint.families import DraftTraits, MTPFamily
from mtp_plugin.checkpoint.files import StoredTensor, listed
from mtp_plugin.checkpoint.vllm_command import IN_VLLM
from mtp_plugin.errors import (
    CheckpointError,
    ConfigError,
    MTPPluginError,
    UnsupportedModelError,
    describe_error,
    shell_quote,
)
from mtp_plugin.hosts.embedded.models.config_reader import (
    FULL_ATTENTION,
    LONGEST_REASON,
    CheckedConfig,
    ModelFacts,
    read_config,
)
from mtp_plugin.hosts.embedded.models.draft_head import cut_head
from mtp_plugin.hosts.embedded.models.mtp_layer import MTPLayer, TransformersAttention
from mtp_plugin.infer.language_model import transformers_arguments
from mtp_plugin.requests.pacing import paced

_logger = logging.getLogger("mtp_plugin")
WITHOUT_MTP = "to run without MTP, set speculative_config to null (None in Python), or type"
_OTHER_WEIGHTS = (".bin", ".pt", ".pth")
_STALE_BUFFER = ".rotary_emb.inv_freq"
"""Stored by old converters, computed from the config since."""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A target and its MTP layers, in eval mode and without gradients."""

    target: PreTrainedModel
    """A transformers causal language model."""
    mtp_layers: nn.ModuleList
    """`MTPLayer` per depth."""
    facts: ModelFacts
    family: MTPFamily

    @property
    def traits(self) -> DraftTraits:
        """How the MTP head is wired."""
        return self.family.traits

    @property
    def lm_head(self) -> nn.Module:
        """The head that target and MTP layers share."""
        return cast(nn.Module, self.target.get_output_embeddings())

    def draft_head(self, ids: torch.Tensor) -> nn.Module:
        """Return a copy of the rows ``ids`` [V'] of `lm_head`, see `cut_head`.

        Raises:
            ConfigError: the head's rows cannot be selected.
        """
        return cut_head(self.lm_head, ids)

    @property
    def embed_tokens(self) -> nn.Module:
        """The embedding that target and MTP layers share."""
        return self.target.get_input_embeddings()

    def forward_target(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attn_metadata: TransformersAttention,
    ) -> torch.Tensor:
        """Compute hidden states of the flat rows of a batch; logits are `lm_head(states[rows])`.

        Args:
            input_ids: [T].
            position_ids: [1, T].
            attn_metadata: gives the keyword arguments of the transformers modules.

        Returns:
            [T, H], after the final norm.
        """
        decoder: Any = self.target.get_decoder()
        output = decoder(
            input_ids=input_ids[None],
            position_ids=position_ids,
            **transformers_arguments(**attn_metadata.model_kwargs()),
        )
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    def keep_experts_on_device(self) -> None:
        """Select an experts implementation of transformers that does not synchronize with the host.

        The grouped product does not in bf16; in other dtypes it reads offsets back, which a CUDA
        graph cannot capture. The batched product gathers each token's experts instead.
        """
        weight = next(self.lm_head.parameters())
        if weight.dtype is torch.bfloat16:
            return
        for module in (self.target, *self.mtp_layers.modules()):
            config: Any = getattr(module, "config", None)
            if getattr(config, "_experts_implementation", None) is not None:
                config._experts_implementation = "batched_mm"

    def set_attn_implementation(self, name: str) -> None:
        """Choose the attention function of the target and of every MTP layer.

        Raises:
            ConfigError: transformers knows no attention function of that name.
        """
        check_attention(name)
        self.target.set_attn_implementation(name)
        for module in self.mtp_layers.modules():
            config = getattr(module, "config", None)
            if config is not None:
                config._attn_implementation = name


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attn_implementation: str = "sdpa",
    num_mtp_layers: int | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> LoadedModel:
    """Load a target and its MTP layers from a checkpoint directory.

    Args:
        path: directory in Hugging Face layout with safetensors.
        dtype: fp32, fp16 or bf16; every tensor is cast, whatever it is stored in, but those that
            transformers keeps in fp32.
        device: where the modules end up.
        attn_implementation: name of an attention function registered with transformers.
        num_mtp_layers: how many MTP layers to load; None: all. More than the checkpoint has is
            possible where it has exactly one: the further layers share its tensors by reference
            and differ only in the KV pool that they address.
        on_progress: called with a line for each phase, and every few seconds while tensors are
            read.

    Raises:
        CheckpointError: see `preflight`.
        UnsupportedModelError: see `preflight`.
        ConfigError: a dtype or attention function that cannot be used.
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ConfigError(f"dtype: expected float32, float16 or bfloat16, got {dtype}")
    check_attention(attn_implementation)
    checked = preflight(path, num_mtp_layers)
    target = uninitialized_target(checked.config, dtype, attn_implementation)
    target.generation_config = GenerationConfig(
        **{k: list(v) if isinstance(v, tuple) else v for k, v in checked.token_ids.items()}
    )
    report = paced(on_progress)

    def dtype_of(key: str) -> torch.dtype:
        is_kept = any(part in key for part in target._keep_in_fp32_modules_strict or ())
        return torch.float32 if is_kept else dtype

    target.load_state_dict(
        _read_module(checked.stored, checked.target_plans, dtype_of, report),
        strict=False,  # a tied head may be left out
        assign=True,
    )
    _tie_head(target, checked)
    if torch.device(device).type != "cpu":
        on_progress(f"moving the target to {device}")
    target.to(device)  # type: ignore[arg-type]
    if checked.num_mtp_layers:
        on_progress(f"loading the MTP layers ({checked.num_mtp_layers})")
        others = checked.checkpoint.other_copies
        if others:
            _logger.warning("%s: %s: %s", checked.directory, listed(others), OTHER_COPIES)
    layers = build_layers(target, target.config, checked.family, checked.num_mtp_layers)
    for depth, layer in enumerate(layers):
        if depth < len(checked.plans):
            read = _read_module(checked.stored, checked.plans[depth], dtype_of, report)
            state = {key: tensor.to(device) for key, tensor in read.items()}
        else:
            state = layers[0].state_dict(keep_vars=True)
        layer.load_state_dict(state, assign=True)
    return LoadedModel(
        target=target.eval().requires_grad_(False),
        mtp_layers=layers.eval().requires_grad_(False),
        facts=checked.facts,
        family=checked.family,
    )


def _tie_head(target: PreTrainedModel, checked: Preflight) -> None:
    """Tie the head where the config says so, as transformers does: not to other values."""
    name = "lm_head.weight"
    if target.config.tie_word_embeddings and name in checked.stored:
        embedding: Any = target.get_input_embeddings()
        if not torch.equal(embedding.weight, target.get_parameter(name)):
            target.config.tie_word_embeddings = False
            _logger.warning("%s: %s, %s", checked.directory, name, OWN_HEAD)
    target.tie_weights()


def check_attention(name: str) -> None:
    """Refuse an attention function that transformers does not know.

    Raises:
        ConfigError: naming those it knows.
    """
    known = ["eager", *sorted(ALL_ATTENTION_FUNCTIONS.valid_keys())]
    if name not in known:
        raise ConfigError(
            f"attn_implementation: expected a function registered with transformers "
            f"({', '.join(known)}), got {name!r}"
        )


@dataclass(frozen=True)
class TensorPlan:
    """How one tensor of a module is made of checkpoint tensors."""

    module_key: str
    """Key in the module's state dict."""
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    """Checkpoint names: one, or one (two for gate and up) per expert in the order of experts."""
    source_shape: tuple[int, ...]
    fuse: Literal["copy", "experts", "gate_up_experts"]

    def assemble(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The module's tensor [shape] from the checkpoint's."""
        parts = [stored[name] for name in self.sources]
        if self.fuse == "copy":
            return parts[0]
        if self.fuse == "gate_up_experts":
            parts = [torch.cat(pair, dim=0) for pair in zip(parts[::2], parts[1::2], strict=True)]
        return torch.stack(parts)

    def take_apart(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors from the module's; undoes `assemble`."""
        if self.fuse == "copy":
            return {self.sources[0]: tensor.clone()}
        parts = list(tensor)
        if self.fuse == "gate_up_experts":
            parts = [half for part in parts for half in part.chunk(2, dim=0)]
        return {name: part.clone() for name, part in zip(self.sources, parts, strict=True)}


@dataclass(frozen=True)
class Preflight(CheckedConfig):
    """A valid checkpoint, with everything that loading it needs."""

    num_mtp_layers: int
    """How many MTP layers will run: 0 without drafts, 1 for eagle, K for vanilla."""
    checkpoint: Checkpoint
    target_plans: tuple[TensorPlan, ...]
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
    try:
        target = without_storage(checked.config)
        target_plans = plan_target(target, stored)
        layers = build_layers(target, checked.config, checked.family, declared if needed else 0)
        plans = plan_layers(layers, checked.family, checked.config, stored)
    except MTPPluginError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except Exception as error:  # transformers has no single error type for a bad config
        raise CheckpointError(
            f"{where}: transformers cannot build the model of config.json: "
            f"{describe_error(error)[:LONGEST_REASON]}"
        ) from error
    every = [*target_plans, *(plan for layer in plans for plan in layer)]
    _check_tensors(checkpoint, {n: p.source_shape for p in every for n in p.sources}, needed > 0)
    return Preflight(
        **vars(checked),
        num_mtp_layers=needed,
        checkpoint=checkpoint,
        target_plans=target_plans,
        plans=plans,
    )


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
            f"mtp-plugin generate --model {shell_quote(checkpoint.directory)} --no-mtp",
        )


def _check_tensors(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], with_mtp: bool
) -> None:
    """Refuse missing and unknown tensors, and those of a wrong shape.

    Args:
        shapes: those that are needed, by name.
    """
    stored = checkpoint.tensors
    missing = sorted(shapes.keys() - stored.keys())
    ignored = {"lm_head.weight"} | (checkpoint.copies if with_mtp else checkpoint.mtp.keys())
    unknown = sorted(stored.keys() - shapes.keys() - ignored)
    unknown = [name for name in unknown if not name.endswith(_STALE_BUFFER)]
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
            raise CheckpointError(
                f"checkpoint {checkpoint.directory}: {len(names)} {problem}: {listed(names)}"
            )


def without_storage(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the target on the meta device: classes, names and shapes without weights."""
    with torch.device("meta"):
        return cast(PreTrainedModel, AutoModelForCausalLM.from_config(config))


def uninitialized_target(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    attn_implementation: str,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """Build the target without initializing its weights, whose memory is not touched.

    Raises:
        ConfigError: the attention function needs a package that is missing.
    """
    try:
        with torch.device(device), no_init_weights():
            target = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attn_implementation
            )
    except ImportError as error:
        raise ConfigError(
            f"attn_implementation: {attn_implementation!r} is refused: {error}"
        ) from error
    return cast(PreTrainedModel, target)


def build_layers(
    target: PreTrainedModel, config: PreTrainedConfig, family: MTPFamily, num_layers: int
) -> nn.ModuleList:
    """Build MTP layers of the target's classes, without storage.

    The blocks take the indices after the target's layers, because that index addresses the KV
    pools; so everything that is listed per layer grows by `num_layers` full-attention entries.

    Args:
        target: gives the classes of layer and norm, and the rotary embedding to share.
        config: the target's full config.
    """
    decoder: Any = target.get_decoder()
    extended = copy.deepcopy(config)
    for key, value in family.block_config.items():
        setattr(extended, key, copy.copy(value))
    if getattr(config, "layer_types", None) is not None:
        extended.layer_types = [*config.layer_types, *[FULL_ATTENTION] * num_layers]
    extended.num_hidden_layers = config.num_hidden_layers + num_layers
    with torch.device("meta"):
        return nn.ModuleList(
            MTPLayer(
                extended,
                block_class=type(decoder.layers[-1]),
                norm_class=type(decoder.norm),
                layer_idx=config.num_hidden_layers + depth,
                traits=family.traits,
                rotary=decoder.rotary_emb,
            )
            for depth in range(num_layers)
        )


def plan_target(target: PreTrainedModel, stored: Collection[str]) -> tuple[TensorPlan, ...]:
    """Map each tensor of the target to its checkpoint tensors; a tied head may have none."""
    tied = target.config.tie_word_embeddings and "lm_head.weight" not in stored
    plans = _plan_tensors(target, lambda key: key, stored)
    return tuple(plan for plan in plans if not (tied and plan.module_key == "lm_head.weight"))


def plan_layers(
    layers: Iterable[nn.Module],
    family: MTPFamily,
    config: PreTrainedConfig,
    stored: Collection[str],
) -> tuple[tuple[TensorPlan, ...], ...]:
    """Map each tensor of each MTP layer to its checkpoint tensors."""
    first = config.num_hidden_layers
    return tuple(
        tuple(_plan_tensors(layer, lambda key: family.stored_name(key, first, depth), stored))  # noqa: B023
        for depth, layer in enumerate(layers)
    )


def _plan_tensors(
    module: nn.Module, name_of: Callable[[str], str], stored: Collection[str]
) -> Iterator[TensorPlan]:
    """Map each tensor of a module to its checkpoint tensors.

    Experts are one tensor in the module; checkpoints store them one by one, or fused where `stored`
    has the fused name.

    Raises:
        CheckpointError: more experts than `stored` has.
    """
    for key, tensor in module.state_dict().items():
        name = name_of(key)
        shape = tuple(tensor.shape)
        experts, _, projection = name.rpartition(".")
        if name in stored or not experts.endswith(".experts"):
            yield TensorPlan(key, shape, (name,), shape, "copy")
            continue
        is_pair = projection == "gate_up_proj"
        halves = ("gate_proj", "up_proj") if is_pair else (projection,)
        last = f"{experts}.{shape[0] - 1}.{halves[0]}.weight"
        if stored and last not in stored:
            raise CheckpointError(f"expected {shape[0]} experts in {experts}, there is no {last}")
        sources = tuple(
            f"{experts}.{expert}.{half}.weight" for expert in range(shape[0]) for half in halves
        )
        source_shape = (shape[1] // len(halves), *shape[2:])
        yield TensorPlan(
            key, shape, sources, source_shape, "gate_up_experts" if is_pair else "experts"
        )


def _read_module(
    stored: Mapping[str, StoredTensor],
    plans: Sequence[TensorPlan],
    dtype_of: Callable[[str], torch.dtype],
    report: Callable[[str], None],
) -> dict[str, torch.Tensor]:
    """Return the tensors of a module by key, on the CPU; files are mapped, not copied."""
    names = [name for plan in plans for name in plan.sources]
    tensors = {}
    for number, (name, tensor) in enumerate(read_tensors(stored, names), 1):
        tensors[name] = tensor
        report(f"loading weights: {number} of {len(names)} tensors")
    return {p.module_key: p.assemble(tensors).to(dtype_of(p.module_key)) for p in plans}


def read_tensors(
    stored: Mapping[str, StoredTensor], names: Iterable[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors, on the CPU, file by file.

    Raises:
        CheckpointError: one cannot be read.
    """
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(stored[name].file, []).append(name)
    for file, in_file in by_file.items():
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                for name in in_file:
                    yield name, opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: a tensor cannot be read: {error}") from error
