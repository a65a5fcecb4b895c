"""Reads and validates a checkpoint's config files before anything is built."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from transformers import CONFIG_MAPPING, PreTrainedConfig

from mtp_plugin.config.messages import got, spelled
from mtp_plugin.errors import CheckpointError, UnsupportedModelError
from mtp_plugin.extras import IN_VLLM, vllm_command
from mtp_plugin.hosts.embedded.models.block_layout import FULL_ATTENTION
from mtp_plugin.hosts.embedded.models.checkpoint_files import (
    checkpoint_directory,
    listed,
    read_json,
)
from mtp_plugin.hosts.embedded.models.config_schema import (
    SCHEMAS,
    DecoderConfig,
    GenerationConfig,
    beyond,
)
from mtp_plugin.hosts.embedded.models.families import (
    FAMILIES,
    NOT_RUNNABLE,
    SEPARATE_DRAFTERS,
    ModelFacts,
    MTPFamily,
    family_of,
)
from mtp_plugin.hosts.embedded.models.rope_schema import Problem, problems_of

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
ADAPTER_FILE = "adapter_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_SETTINGS = "tokenizer_config.json"
QUANTIZATION_FILE = "hf_quant_config.json"
"""Written by NVIDIA's ModelOpt."""

ACTING_KEYS = frozenset(
    {
        "attn_implementation",
        "auto_map",
        "base_model_ep_plan",
        "base_model_pp_plan",
        "base_model_tp_plan",
        "compile_config",
        "custom_generate",
        "custom_pipelines",
        "experts_implementation",
        "fusion_config",
        "per_layer_config",
        "return_dict",
        "transformers_weights",
        "trust_remote_code",
        "use_kernels",
    }
)
"""Keys by which transformers would act, in addition to all that begin with `_`."""
_UNTOLD = frozenset({"quantization_config", "transformers_version"})
_KIND_KEYS = frozenset({"hidden_act", "moe_layer_freq", "rope_type", "scoring_func", "topk_method"})
"""Their other values are of models that do not run here, rather than mistakes."""
_COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Number of MTP layers, in any family."""


@dataclass(frozen=True)
class CheckedConfig:
    """Validated content of a checkpoint's config files."""

    directory: Path
    facts: ModelFacts
    family: MTPFamily
    config: PreTrainedConfig
    """The transformers config of the target, made of checked values alone."""
    token_ids: Mapping[str, Any]
    """`bos_token_id`, `eos_token_id` and `pad_token_id` where they are known."""
    vllm_command: str
    """The command that serves the checkpoint in vLLM."""
    quantization: str | None
    """Name of the method of quantized weights, which do not run; None: they are not quantized."""
    stripped: tuple[str, ...]
    """`FILE: KEY` of each key by which transformers would do something by itself."""
    unread: tuple[str, ...]
    """Keys of `config.json` that nothing reads."""

    @property
    def stripped_line(self) -> str | None:
        """Description of the stripped keys; None: nothing was stripped."""
        if not self.stripped:
            return None
        return f"left out, as transformers would act on them: {listed(self.stripped, 20)}"


def read_config(path: str | Path) -> CheckedConfig:
    """Read the config files of a checkpoint directory; all but `config.json` may be missing.

    Raises:
        CheckpointError: no directory, no config, bad JSON, an adapter, or values that are missing,
            of a wrong kind, out of range or that do not go together: a line for each.
        UnsupportedModelError: a model family or a layer type that does not run here.
    """
    directory = checkpoint_directory(path)
    where = directory / CONFIG_FILE
    raw = read_json(where, allow_infinity=True)
    generation_file = directory / GENERATION_FILE
    generation = read_json(generation_file) if generation_file.is_file() else {}
    settings_file = directory / TOKENIZER_SETTINGS
    has_settings = settings_file.is_file() and (directory / TOKENIZER_FILE).is_file()
    settings = read_json(settings_file) if has_settings else {}
    if (directory / ADAPTER_FILE).exists():
        raise CheckpointError(
            f"checkpoint {directory}: expected a whole checkpoint, {ADAPTER_FILE} makes it an "
            f"adapter of another one"
        )
    command = _vllm_command(directory, raw)
    with _served_by(command):
        schema, facts, token_ids = _check(raw, generation, where, generation_file)
        family = family_of(facts.model_type)
        config = transformers_config(schema, family, where)
        _check_layer_types(config, directory)
    acting = [key for key in raw if _acts(key)]
    return CheckedConfig(
        directory=directory,
        facts=facts,
        family=family,
        config=config,
        token_ids=token_ids,
        vllm_command=command,
        quantization=_quantization_method(raw, directory),
        stripped=(
            *(f"{CONFIG_FILE}: {spelled(key)}" for key in acting),
            *(f"{GENERATION_FILE}: {spelled(key)}" for key in generation if _acts(key)),
            *(f"{TOKENIZER_SETTINGS}: {spelled(key)}" for key in settings if _acts(key)),
        ),
        unread=tuple(
            spelled(key)
            for key in raw
            if key not in acting and key not in type(schema).model_fields and key not in _UNTOLD
        ),
    )


def read_facts(path: str | Path) -> ModelFacts:
    """What a checkpoint says about itself.

    Raises:
        CheckpointError: see `read_config`.
        UnsupportedModelError: see `read_config`.
    """
    return read_config(path).facts


def facts_from_config(config: dict[str, Any], *, where: Path) -> ModelFacts:
    """Facts of a config that was already read.

    Raises:
        CheckpointError: values that are missing, of a wrong kind, out of range or that do not go
            together.
        UnsupportedModelError: a model family that does not run here.
    """
    return _check(config, {}, where, where)[1]


def transformers_config(schema: DecoderConfig, family: MTPFamily, where: Path) -> PreTrainedConfig:
    """Return the transformers config of a target, built from validated values only."""
    values = {**schema.for_transformers(), "model_type": family.target_model_type}
    try:
        return CONFIG_MAPPING[family.target_model_type].from_dict(values)
    except Exception as error:  # transformers has no single error type for a bad config
        raise CheckpointError(
            f"{where}: expected a {family.model_type} config, transformers says: {error}"
        ) from error


def _check(
    raw: dict[str, Any], generation: dict[str, Any], where: Path, generation_file: Path
) -> tuple[DecoderConfig, ModelFacts, dict[str, Any]]:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{where}: model_type: expected text, got {got(model_type)}")
    family = family_of(model_type)
    try:
        schema = SCHEMAS[model_type].model_validate(raw)
    except ValidationError as error:
        raise _refusal(where, list(problems_of(SCHEMAS[model_type], error))) from None
    problems = list(schema.problems())
    if problems:
        raise _refusal(where, problems)
    try:
        generated = GenerationConfig.model_validate(generation)
    except ValidationError as error:
        raise _refusal(generation_file, list(problems_of(GenerationConfig, error))) from None
    ids: dict[str, Any] = {}
    for key in GenerationConfig.model_fields:
        given = getattr(generated, key)
        problems += beyond(key, given, schema.vocab_size)
        ids[key] = getattr(schema, key) if given is None else given
    if problems:
        raise _refusal(generation_file, problems)
    return schema, _facts(schema, family, ids["eos_token_id"] or ()), ids


def _facts(schema: DecoderConfig, family: MTPFamily, eos: tuple[int, ...]) -> ModelFacts:
    declared = None if family.count_key is None else getattr(schema, family.count_key)
    return ModelFacts(
        model_type=family.model_type,
        architecture=(schema.architectures or ("",))[0],
        hidden_size=schema.hidden_size,
        vocab_size=schema.vocab_size,
        num_hidden_layers=schema.num_hidden_layers,
        num_mtp_layers=family.default_count if declared is None else declared,
        max_position_embeddings=schema.max_position_embeddings,
        eos_token_ids=eos,
        dtype=getattr(torch, schema.dtype or schema.torch_dtype or "float32"),
    )


def _check_layer_types(config: PreTrainedConfig, directory: Path) -> None:
    layer_types = getattr(config, "layer_types", None) or []
    odd = sorted({spelled(kind) for kind in layer_types if kind != FULL_ATTENTION})
    if odd:
        count = sum(kind != FULL_ATTENTION for kind in layer_types)
        raise UnsupportedModelError(
            f"checkpoint {directory}: expected only {FULL_ATTENTION} layers, got layer types "
            f"{', '.join(odd)} ({count} of {len(layer_types)} layers)"
        )


@contextmanager
def _served_by(command: str) -> Iterator[None]:
    """Add the command that serves a model in vLLM to refusals of the model."""
    try:
        yield
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{error}; {IN_VLLM}", command) from None


def _vllm_command(directory: Path, raw: Mapping[str, Any]) -> str:
    """Return `vllm_command` for a config of any family."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        model_type = ""  # refused later
    if model_type in SEPARATE_DRAFTERS:
        return vllm_command("TARGET", drafter=directory)
    sections = (section for section in (raw, raw.get("text_config")) if isinstance(section, dict))
    given = [section[key] for section in sections for key in _COUNT_KEYS if key in section]
    family = FAMILIES.get(model_type)
    presumed = int(model_type in NOT_RUNNABLE) if family is None else family.default_count
    layers = max((n for n in given if isinstance(n, int)), default=presumed)
    # vLLM refuses 3 drafts by 2 layers
    return vllm_command(directory, min(layers, 2) if layers in (0, 2) else 3)


def _quantization_method(raw: Mapping[str, Any], directory: Path) -> str | None:
    settings, key = raw.get("quantization_config"), "quant_method"
    if settings is None and (directory / QUANTIZATION_FILE).is_file():
        settings, key = read_json(directory / QUANTIZATION_FILE).get("quantization"), "quant_algo"
    if settings is None:
        return None
    method = settings.get(key) if isinstance(settings, dict) else None
    return method if isinstance(method, str) else "a method without a name"


def _acts(key: str) -> bool:
    return key in ACTING_KEYS or key.startswith("_")


def _refusal(where: Path, problems: Collection[Problem]) -> CheckpointError:
    is_other_kind = all(key.rpartition(".")[2] in _KIND_KEYS for key, _ in problems)
    kind = UnsupportedModelError if is_other_kind else CheckpointError
    return kind("\n".join(f"{where}: {key}: {reason}" for key, reason in problems))
