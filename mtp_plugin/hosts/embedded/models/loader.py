"""Loading a checkpoint: the target through transformers, the MTP layers tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

import mtp_plugin.hosts.embedded.attention.bridge  # noqa: F401 - registers the attention functions
from mtp_plugin.checkpoint.files import listed
from mtp_plugin.errors import CheckpointError, ConfigError
from mtp_plugin.hosts.embedded.models.block_layout import build_layers, target_class
from mtp_plugin.hosts.embedded.models.checkpoint_files import indexed_directory, read_tensors
from mtp_plugin.hosts.embedded.models.draft_head import cut_head
from mtp_plugin.hosts.embedded.models.families import DraftTraits, ModelFacts, MTPFamily
from mtp_plugin.hosts.embedded.models.mtp_layer import TransformersAttention
from mtp_plugin.hosts.embedded.models.preflight import Preflight, preflight
from mtp_plugin.infer.language_model import transformers_arguments

Report = Callable[[str], None]
REPORT_SECONDS = 5.0
"""Between two reports of loaded tensors."""


def _ignore(_: str) -> None:
    pass


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
    on_progress: Report = _ignore,
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
    target = _load_target(checked, dtype, attn_implementation, on_progress)
    if torch.device(device).type != "cpu":
        on_progress(f"moving the target to {device}")
    target.to(device)  # type: ignore[arg-type]
    if checked.num_mtp_layers:
        on_progress(f"loading the MTP layers ({checked.num_mtp_layers})")
    layers = _load_mtp_layers(checked, target, dtype, device)
    return LoadedModel(
        target=target.eval().requires_grad_(False),
        mtp_layers=layers.eval().requires_grad_(False),
        facts=checked.facts,
        family=checked.family,
    )


def _load_target(
    checked: Preflight, dtype: torch.dtype, attn_implementation: str, on_progress: Report
) -> PreTrainedModel:
    where = f"checkpoint {checked.directory}"
    try:
        with quiet_transformers(on_progress), indexed_directory(checked.checkpoint) as directory:
            loaded: Any = target_class(checked.config).from_pretrained(
                directory,
                config=checked.config,
                dtype=dtype,
                attn_implementation=attn_implementation,
                generation_config=GenerationConfig(
                    **{
                        key: list(value) if isinstance(value, tuple) else value
                        for key, value in checked.token_ids.items()
                    }
                ),
                use_safetensors=True,
                output_loading_info=True,
                local_files_only=True,
            )
            target, report = loaded
    except ImportError as error:
        raise ConfigError(
            f"attn_implementation: {attn_implementation!r} is refused: {error}"
        ) from error
    except Exception as error:  # transformers has no single error type for a bad checkpoint
        raise CheckpointError(f"{where}: transformers cannot load the target: {error}") from error
    if report["missing_keys"]:
        raise CheckpointError(
            f"{where}: transformers left {len(report['missing_keys'])} target tensor(s) unfilled: "
            f"{listed(sorted(report['missing_keys']))}"
        )
    return target  # type: ignore[no-any-return]


def _load_mtp_layers(
    checked: Preflight, target: PreTrainedModel, dtype: torch.dtype, device: torch.device | str
) -> nn.ModuleList:
    layers = build_layers(target, target.config, checked.family, checked.num_mtp_layers)
    kept_in_fp32 = tuple(getattr(target, "_keep_in_fp32_modules_strict", None) or ())
    for depth, layer in enumerate(layers):
        if depth < len(checked.plans):
            tensors = _read_layer(checked, depth, dtype, kept_in_fp32)
            state = {key: tensor.to(device) for key, tensor in tensors.items()}
        else:
            state = layers[0].state_dict(keep_vars=True)
        layer.load_state_dict(state, assign=True)
    return layers


def _read_layer(
    checked: Preflight, depth: int, dtype: torch.dtype, kept_in_fp32: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    plans = checked.plans[depth]
    tensors = dict(read_tensors(checked.stored, {name for plan in plans for name in plan.sources}))
    return {
        plan.module_key: plan.assemble(tensors).to(
            torch.float32 if any(part in plan.module_key for part in kept_in_fp32) else dtype
        )
        for plan in plans
    }


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


@contextmanager
def quiet_transformers(report: Report = _ignore) -> Iterator[None]:
    """Silence transformers' load report and progress bar: the loader checks the report itself.

    Args:
        report: called with the number of loaded tensors every few seconds.
    """
    level = transformers_logging.get_verbosity()
    bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()

    def make_bar(factory: Callable[..., Any], arguments: tuple[Any, ...], named: Any) -> Any:
        if arguments and isinstance(arguments[0], Collection):
            arguments = (_counted(arguments[0], report), *arguments[1:])
        return factory(*arguments, **named)

    hook = transformers_logging.set_tqdm_hook(make_bar)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(hook)
        transformers_logging.set_verbosity(level)
        if bar:
            transformers_logging.enable_progress_bar()


def _counted(items: Collection[Any], report: Report) -> Iterator[Any]:
    due = perf_counter() + REPORT_SECONDS
    for number, item in enumerate(items, 1):
        yield item
        if perf_counter() >= due:
            due = perf_counter() + REPORT_SECONDS
            report(f"loading weights: {number} of {len(items)} tensors")
