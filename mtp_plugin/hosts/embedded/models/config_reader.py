"""Reads and validates a checkpoint's config files before anything is built.

transformers checks the types of its own keys. The checks here are of what it accepts but cannot
run: numbers out of range, sizes that do not go together, token ids outside the vocabulary. It gets
the keys of its config class alone, so that no key makes it act.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from mtp_plugin.checkpoint import vllm_command_of
from mtp_plugin.checkpoint.families import MTPFamily, family_of
from mtp_plugin.checkpoint.files import (
    CONFIG_FILE,
    GENERATION_FILE,
    check_kind,
    checkpoint_directory,
    read_json,
)
from mtp_plugin.checkpoint.vllm_command import IN_VLLM
from mtp_plugin.config.messages import got, join, spelled
from mtp_plugin.errors import CheckpointError, UnsupportedModelError, describe_error

FULL_ATTENTION = "full_attention"
_REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_READ_HERE = (
    "model_type", "dtype", "torch_dtype", "rope_parameters", "rope_scaling", "rope_theta",
    "partial_rotary_factor", "scoring_func", "topk_method", "moe_layer_freq", *_TOKEN_IDS,
)  # fmt: skip
"""Keys of any family that do not reach transformers as they are."""
_UNREAD = ("num_mtp_layers", "output_router_logits", "pretraining_tp", "router_aux_loss_coef")


def _limits(low: float, high: float, keys: str) -> dict[str, tuple[float, float]]:
    return dict.fromkeys(keys.split(), (low, high))


LIMITS: dict[str, tuple[float, float]] = {
    **_limits(1, 2**24, "vocab_size max_position_embeddings original_max_position_embeddings"),
    **_limits(1, 2**16, "num_attention_heads num_key_value_heads"),
    **_limits(1, 2**16, "n_routed_experts num_experts num_experts_per_tok n_group topk_group"),
    **_limits(1, 2**20, "head_dim qk_rope_head_dim"),
    **_limits(1, 1000, "num_hidden_layers"),
    **_limits(0, 64, "num_nextn_predict_layers"),
    **_limits(1e-30, 1.0, "rms_norm_eps partial_rotary_factor"),
    **_limits(0.0, 100.0, "attention_dropout initializer_range"),
    **_limits(1e-6, 1e6, "routed_scaling_factor low_freq_factor high_freq_factor"),
    **_limits(1e-3, 1e6, "attention_factor beta_fast beta_slow"),
    **_limits(0.0, 1e3, "mscale mscale_all_dim"),
    **_limits(1.0, 1e6, "factor"),
    **_limits(1.01, 1e15, "rope_theta"),
}
"""Range of numbers of `config.json` that neither transformers nor the shapes of the stored tensors
confirm; integers where the limits are."""

_DTYPES = ("float32", "float16", "bfloat16")
CHOICES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu",
                   "relu", "relu2", "mish", "tanh", "sigmoid"),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    # longrope depends on the longest sequence of a batch
    "rope_type": ("default", "dynamic", "linear", "llama3", "yarn"),
    "dtype": _DTYPES,
    "torch_dtype": _DTYPES,
}  # fmt: skip
"""Values of keys whose other values do not run here."""

LONGEST_REASON = 400
"""Characters of an error of transformers that messages show; it quotes whole values."""

Problem = tuple[str, str]
"""(key, message)."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts from a checkpoint's JSON files."""

    model_type: str
    architecture: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    num_mtp_layers: int
    """Number of MTP layers the config declares (D)."""
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    """From generation_config.json, else from config.json; empty if neither has them."""
    dtype: torch.dtype
    """The config's dtype; default float32."""


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
    unread: tuple[str, ...]
    """Keys of `config.json` that nothing reads, like those by which transformers would act."""


def read_config(path: str | Path) -> CheckedConfig:
    """Read the config files of a checkpoint directory; all but `config.json` may be missing.

    Raises:
        CheckpointError: no directory, no config, bad JSON, an adapter, or values that are missing,
            of a wrong kind, out of range or that do not go together: a line for each.
        UnsupportedModelError: a model family or a layer type that does not run here.
    """
    directory = checkpoint_directory(path)
    check_kind(directory)
    raw = read_json(directory / CONFIG_FILE)
    generation = directory / GENERATION_FILE
    try:
        return check_config(
            raw, read_json(generation) if generation.is_file() else {}, directory / CONFIG_FILE
        )
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{error}; {IN_VLLM}", vllm_command_of(directory, raw)
        ) from None


def check_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any], where: Path
) -> CheckedConfig:
    """Check the content of the config files of a checkpoint.

    Args:
        raw, generation: of `config.json` and of `generation_config.json`.
        where: path of `config.json`, for messages.

    Raises:
        CheckpointError, UnsupportedModelError: see `read_config`.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{where}: model_type: expected text, got {got(model_type)}")
    family = family_of(model_type)
    passed = passed_keys(family)
    values = {key: raw[key] for key in raw if key in passed}
    rope_key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    given = raw.get(rope_key)
    rope = {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else {}
    older = rope.pop("type", "default")
    rope.setdefault("rope_type", older)
    problems = [(key, "required key is missing") for key in _REQUIRED if raw.get(key) is None]
    if raw.get("rope_parameters") and raw.get("rope_scaling"):
        problems.append(("rope_scaling", "expected either it or rope_parameters, got both"))
    problems += _range_problems({key: raw[key] for key in raw if key in (*_READ_HERE, *passed)})
    problems += _range_problems({f"{rope_key}.{spelled(key)}": rope[key] for key in rope})
    _refuse(where, problems)
    ids = _token_ids(raw, raw["vocab_size"], where)
    theta = rope.pop("rope_theta", raw.get("rope_theta"))
    rope["rope_theta"] = 10000.0 if theta is None else theta
    share = rope.pop("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if share is not None and family.partial_rotary:
        rope["partial_rotary_factor"] = values["partial_rotary_factor"] = share
    elif share not in (None, 1):
        message = f"expected 1 in family {family.model_type}, got {share}"
        _refuse(where, [("partial_rotary_factor", message)])
    config = _transformers_config(family, values, rope, ids, where)
    _refuse(where, _relations(config))
    layer_types = getattr(config, "layer_types", None) or []
    odd = [kind for kind in layer_types if kind != FULL_ATTENTION]
    if odd:
        raise UnsupportedModelError(
            f"checkpoint {where.parent}: expected only {FULL_ATTENTION} layers, got layer types "
            f"{', '.join(sorted(map(spelled, set(odd))))} ({len(odd)} of {len(layer_types)} layers)"
        )
    generated = _token_ids(generation, config.vocab_size, where.with_name(GENERATION_FILE))
    ids.update({key: value for key, value in generated.items() if value is not None})
    declared = raw.get(family.count_key) if family.count_key else None
    facts = ModelFacts(
        model_type=family.model_type,
        architecture=(config.architectures or ("",))[0],
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_hidden_layers=config.num_hidden_layers,
        num_mtp_layers=family.default_count if declared is None else declared,
        max_position_embeddings=config.max_position_embeddings,
        eos_token_ids=ids.get("eos_token_id") or (),
        dtype=getattr(torch, raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )
    known = {*passed, *_READ_HERE, "transformers_version"}
    return CheckedConfig(
        directory=where.parent,
        facts=facts,
        family=family,
        config=config,
        token_ids=ids,
        vllm_command=vllm_command_of(where.parent, raw),
        unread=tuple(spelled(key) for key in raw if key not in known),
    )


def passed_keys(family: MTPFamily) -> frozenset[str]:
    """Return the keys of `config.json` that transformers gets unchanged."""
    own = {field.name for field in fields(CONFIG_MAPPING[family.target_type])}
    own -= {field.name for field in fields(PreTrainedConfig)}
    own |= {"architectures", "full_attention_interval", "head_dim", family.count_key or ""}
    if "qk_rope_head_dim" in own:  # heads of two parts have no single width
        own.remove("head_dim")
    return frozenset(own.difference(_READ_HERE, _UNREAD))


def _range_problems(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield wrong choices and numbers out of range, by path; transformers refuses a wrong null."""
    for path, value in values.items():
        key = path.rpartition(".")[2]
        if value is None:
            continue
        if key in CHOICES:
            if value not in CHOICES[key]:
                one_of = "one of " if len(CHOICES[key]) > 1 else ""
                yield path, f"expected {one_of}{join(CHOICES[key])}, got {got(value)}"
        elif key in LIMITS:
            low, high = LIMITS[key]
            kinds = (int,) if isinstance(low, int) else (int, float)
            if type(value) not in kinds or not low <= value <= high:
                kind = "an integer" if isinstance(low, int) else "a number"
                yield path, f"expected {kind} from {low} to {high}, got {got(value)}"
        elif key in ("rope_parameters", "rope_scaling") and not isinstance(value, Mapping):
            yield path, f"expected a mapping or null, got {got(value)}"
        elif path != key and key != "truncate":
            yield path, "unknown key"


def _transformers_config(
    family: MTPFamily,
    values: Mapping[str, Any],
    rope: Mapping[str, Any],
    ids: Mapping[str, Any],
    where: Path,
) -> PreTrainedConfig:
    """Build the transformers config of a target from checked values."""
    passed = {
        # its classes refuse an integer for a float
        key: float(value) if value is not None and _is_float(key) else value
        for key, value in values.items()
        if value is not None or key not in ("head_dim", "attention_dropout", family.count_key)
    }
    passed |= {key: list(i) if isinstance(i, tuple) else i for key, i in ids.items()}
    passed["num_key_value_heads"] = (
        values.get("num_key_value_heads") or values["num_attention_heads"]
    )
    passed["rope_parameters"] = {k: float(v) if _is_float(k) else v for k, v in rope.items()}
    try:
        return CONFIG_MAPPING[family.target_type].from_dict(passed)
    except Exception as error:  # transformers has no single error type for a bad config
        raise CheckpointError(
            f"{where}: expected a {family.model_type} config, transformers says: "
            f"{describe_error(error)[:LONGEST_REASON]}"
        ) from error


def _is_float(key: str) -> bool:
    return isinstance(LIMITS.get(key, (0,))[0], float)


def _relations(config: Any) -> Iterator[Problem]:
    """Yield the sizes that do not go together, where no shape of a stored tensor shows it."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    latent: int | None = getattr(config, "qk_rope_head_dim", None)
    if latent is not None and kv_heads != heads:
        yield (
            "num_key_value_heads",
            f"expected as many as num_attention_heads, {heads}, got {kv_heads}",
        )
    elif heads % kv_heads:
        yield (
            "num_key_value_heads",
            f"expected a divisor of num_attention_heads, which is {heads}, got {kv_heads}",
        )
    width = latent or getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters
    rotated = int(width * rope.get("partial_rotary_factor", 1.0))
    if rotated < 2 or rotated % 2:
        yield (
            "partial_rotary_factor",
            f"expected an even number of at least 2 rotated of the {width} values of a head, got "
            f"{rotated}",
        )
    if rope.get("high_freq_factor", 2) <= rope.get("low_freq_factor", 1):
        yield (
            "rope_parameters.high_freq_factor",
            f"expected above low_freq_factor, which is {rope['low_freq_factor']}, got "
            f"{rope['high_freq_factor']}",
        )
    experts = getattr(config, "n_routed_experts", None) or getattr(config, "num_experts", None)
    if experts is None:
        return
    groups, chosen = getattr(config, "n_group", None) or 1, getattr(config, "topk_group", None) or 1
    size, rest = divmod(experts, groups)
    is_small = size < 2 and hasattr(config, "n_group")
    if rest or is_small or chosen > groups or config.num_experts_per_tok > chosen * size:
        yield (
            "num_experts_per_tok",
            f"expected experts from topk_group of n_group equal groups of at least 2, got "
            f"{config.num_experts_per_tok} from {chosen} of {groups} groups of {experts} experts",
        )


def _token_ids(content: Mapping[str, Any], vocab_size: int, where: Path) -> dict[str, Any]:
    """Return the token ids that a file has, stop ids as a tuple."""
    ids: dict[str, Any] = {}
    for key in (key for key in _TOKEN_IDS if key in content):
        given, is_eos = content[key], key == "eos_token_id"
        # released configs write -1 where there is no padding
        if given is None or (given == -1 and not is_eos):
            ids[key] = None
            continue
        several = given if is_eos and isinstance(given, list) else [given]
        for one in several:
            if type(one) is not int or not 0 <= one < vocab_size:
                message = f"expected ids below vocab_size, {vocab_size}, got {got(one)}"
                raise CheckpointError(f"{where}: {key}: {message}")
        ids[key] = tuple(several) if is_eos else given
    return ids


def _refuse(where: Path, problems: Iterable[Problem]) -> None:
    problems = list(problems)
    if not problems:
        return
    others = {"hidden_act", "scoring_func", "topk_method", "moe_layer_freq", "rope_type"}
    is_other_kind = all(key.rpartition(".")[2] in others for key, _ in problems)
    kind = UnsupportedModelError if is_other_kind else CheckpointError
    raise kind("\n".join(f"{where}: {key}: {reason}" for key, reason in problems))
