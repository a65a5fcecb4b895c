"""The YAML file and `MTPDecodingConfig`: what the user wrote, frozen, one line per mistake.

Keys are TensorRT-LLM's LLM arguments (names of its 1.3 line); options of our own live under
``speculative_config.mtp``. What a checkpoint says is kept apart: nothing here is ever written to.
"""

from __future__ import annotations

import difflib
import itertools
import re
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    Union,
    get_args,
    get_origin,
)

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError
from typing_extensions import Self, override

from mtp_plugin.errors import ConfigError

__all__ = [
    "MAX_DRAFT_LEN",
    "CudaGraphConfig",
    "KVCacheConfig",
    "LLMConfig",
    "MTPDecodingConfig",
    "MTPPluginOptions",
    "OtherDecodingConfig",
    "SpeculativeDecodingMode",
    "json_schema",
    "load_config",
    "parse_config",
]

MAX_DRAFT_LEN = 16
MAX_SEED = 2**32 - 1

# a mistake that no single field shows: the key it is reported under, and the sentence
Problem = tuple[str, str]

_DIGITS = re.compile(r"[0-9]+\Z")


class SpeculativeDecodingMode(IntEnum):
    """Which drafter runs; answers what TensorRT-LLM's executor asks of its own enum."""

    NONE = 0
    MTP = 1
    """Vanilla: one MTP layer per depth."""
    MTP_EAGLE_ONE_MODEL = 2
    """Eagle: the first MTP layer reused for every depth, inside the target's forward."""

    @classmethod
    def from_string(cls, name: str | None) -> SpeculativeDecodingMode:
        """The member with this name in any case; ``None`` is `NONE`."""
        if name is None:
            return cls.NONE
        try:
            return cls[name.upper()]
        except KeyError:
            allowed = ", ".join(member.name for member in cls)
            message = f"speculative decoding mode: expected one of {allowed}, got {name!r}"
            raise ConfigError(message) from None

    def is_none(self) -> bool:
        return self is SpeculativeDecodingMode.NONE

    def is_mtp(self) -> bool:
        return not self.is_none()

    def is_mtp_one_model(self) -> bool:
        return self.is_mtp()

    def is_mtp_vanilla(self) -> bool:
        return self is SpeculativeDecodingMode.MTP

    def is_mtp_eagle_one_model(self) -> bool:
        return self is SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL

    def is_mtp_eagle(self) -> bool:
        return self.is_mtp_eagle_one_model()

    def use_one_engine(self) -> bool:
        return self.is_mtp()

    def without_logits(self) -> bool:
        return self.is_mtp()

    def has_spec_decoder(self) -> bool:
        return self.is_mtp()

    def has_spec_drafter(self) -> bool:
        return False

    def has_draft_model(self) -> bool:
        return False

    def need_load_draft_weights(self) -> bool:
        return False

    def needs_kv_cache_rewind(self) -> bool:
        return self.is_mtp()

    def needs_kv_cache_recompute(self) -> bool:
        return False

    def support_overlap_scheduler(self) -> bool:
        return True

    def support_dynamic_draft_len(self) -> bool:
        return self.is_mtp()

    def support_guided_decoder(self) -> bool:
        return True

    def support_capturable_guided_decoder(self) -> bool:
        return self.is_mtp()


class FrozenDict(dict[Any, Any]):
    """A dict that refuses to change after it was made, and that hashes."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a config is frozen: build a new one instead of changing this mapping")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[Any, Any]]]:
        return FrozenDict, (dict(self),)

    def __copy__(self) -> FrozenDict:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenDict:
        return self


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return FrozenDict({key: _freeze(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(item) for item in value)
    return value


def _thaw(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _thaw(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_thaw(item) for item in value]
    return value


def _tuple_from_list(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _int_keys(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    # JSON knows text keys only
    by_int = {int(k) if isinstance(k, str) and _DIGITS.match(k) else k: v for k, v in value.items()}
    return by_int if len(by_int) == len(value) else value


PositiveInt = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0, le=1)]
Rates = Annotated[tuple[Rate, ...], BeforeValidator(_tuple_from_list)]


def _rate_tag(value: Any) -> str | None:
    """Whether one rate is meant or a list of them; None: neither."""
    if isinstance(value, (list, tuple)):
        return "<list>"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return "<number>" if is_number else None


SyntheticAcceptance = Annotated[
    Annotated[Rate, Tag("<number>")] | Annotated[Rates, Tag("<list>")], Discriminator(_rate_tag)
]


def _switch_tag(value: Any) -> str | None:
    """Whether a switch is set or left to the machine; None: neither."""
    if isinstance(value, bool):
        return "<flag>"
    return "<auto>" if isinstance(value, str) and value == "auto" else None


Switch = Annotated[
    Annotated[Literal["auto"], Tag("<auto>")] | Annotated[bool, Tag("<flag>")],
    Discriminator(_switch_tag),
]


def _ids_tag(value: Any) -> str | None:
    """Whether ids are counted or listed in a file; None: neither."""
    if isinstance(value, int) and not isinstance(value, bool):
        return "<count>"
    return "<path>" if isinstance(value, str) else None


Text = Annotated[str, Field(min_length=1)]
DraftVocab = Annotated[
    Annotated[PositiveInt, Tag("<count>")] | Annotated[Text, Tag("<path>")],
    Discriminator(_ids_tag),
]
_FORMS: Mapping[Any, Any] = {
    "<number>": Rate,
    "<list>": Rates,
    "<count>": PositiveInt,
    "<path>": Text,
    "<auto>": Literal["auto"],
    "<flag>": bool,
}
BatchSizes = Annotated[tuple[PositiveInt, ...], BeforeValidator(_tuple_from_list)]
DraftLenSchedule = Annotated[
    dict[PositiveInt, Annotated[int, Field(ge=0, le=MAX_DRAFT_LEN)]], BeforeValidator(_int_keys)
]


class _ConfigModel(BaseModel):
    """Frozen, strict about types and keys; every mistake surfaces as one `ConfigError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    renamed: ClassVar[Mapping[str, str]] = {}
    """Keys of other versions and engines -> what to write instead."""

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _config_error(type(self), error, type(self).__name__) from None

    # nested mappings are then validated in place, so that their mistakes keep the whole key path
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    @override
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        source = (options.get("context") or {}).get("source", cls.__name__)
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise _config_error(cls, error, source) from None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        _raise_problems(list(self._problems()))
        return self

    def _problems(self) -> Iterator[Problem]:
        """Mistakes that only show when several fields are read together."""
        return iter(())


class MTPPluginOptions(_ConfigModel):
    """``speculative_config.mtp``: options that TensorRT-LLM does not have."""

    verification: Literal["coupled", "rejection", "block", "synthetic"] = Field(
        default="coupled",
        description="how sampled requests verify drafts; coupled: one noise for both; "
        "synthetic: a coin decides, for benchmarks only",
    )
    synthetic_acceptance: SyntheticAcceptance | None = Field(
        default=None,
        description="synthetic: list: share of steps that accept drafts 1..i; number: rate of each",
    )
    synthetic_seed: int = Field(
        default=0, ge=0, le=MAX_SEED, description="synthetic: seed of the coins"
    )
    draft_sampling: Literal["coupled", "plain", "greedy"] = Field(
        default="coupled", description="how drafts are drawn for sampled requests"
    )
    draft_window: Literal["exact", "trtllm"] = Field(
        default="exact",
        description="rows a generation feeds to vanilla layers: K+1 (exact) or K (trtllm)",
    )
    chain: Literal["output", "target_shift", "none"] | None = Field(
        default=None,
        description="states that depth d >= 2 of vanilla reads; null: from the model family",
    )
    draft_vocab: DraftVocab | None = Field(
        default=None,
        description="ids that may be drafted; N: 0..N-1, in the order of byte-pair merges roughly "
        "the most frequent; path: of a JSON list, relative: from the YAML file's folder; null: all",
    )
    keep_warm: bool = Field(
        default=True,
        description="keep filling the draft KV while fewer than max_draft_len are drafted",
    )
    gate_margin: float = Field(
        default=0.1,
        ge=0,
        le=MAX_DRAFT_LEN,
        description="the gate drafts more again from this far above the threshold on",
    )
    gate_probe_interval: int = Field(
        default=256,
        ge=1,
        description="steps until the gate tries to draft more again; each failed try doubles them",
    )
    gate_max_probe_interval: int = Field(
        default=4096, ge=1, description="most steps between two tries of the gate"
    )
    kernels: Literal["auto", "triton", "reference"] = Field(
        default="auto",
        description="implementation of the ops; auto: Triton where the device has it",
    )
    check_metadata: bool = Field(
        default=False, description="debug: rebuild the attention metadata every step and compare"
    )
    begin_thinking_phase: str | None = Field(
        default=None, min_length=1, description="text of the token that begins the thinking phase"
    )
    end_thinking_phase: str | None = Field(
        default=None, min_length=1, description="text of the token that ends the thinking phase"
    )

    @override
    def _problems(self) -> Iterator[Problem]:
        by_residual = self.verification in ("rejection", "block")
        allowed = ("plain", "greedy") if by_residual else ("coupled", "greedy")
        if self.draft_sampling not in allowed:
            yield (
                "draft_sampling",
                f"{self.draft_sampling!r} cannot be verified by {self.verification!r} "
                f"verification; expected one of {', '.join(allowed)}",
            )
        if self.begin_thinking_phase and self.begin_thinking_phase == self.end_thinking_phase:
            yield (
                "end_thinking_phase",
                f"must differ from begin_thinking_phase, both are {self.end_thinking_phase!r}",
            )
        if self.gate_max_probe_interval < self.gate_probe_interval:
            yield (
                "gate_max_probe_interval",
                f"expected at least gate_probe_interval ({self.gate_probe_interval}), got "
                f"{self.gate_max_probe_interval}",
            )
        yield from self._synthetic_problems()

    def _synthetic_problems(self) -> Iterator[Problem]:
        rates = self.synthetic_acceptance
        if not self.is_synthetic:
            for name in ("synthetic_acceptance", "synthetic_seed"):
                value = getattr(self, name)
                if value != type(self).model_fields[name].default:
                    yield (
                        name,
                        f"{_got(value)} would be ignored; expected verification: synthetic beside "
                        "it",
                    )
            return
        if rates is None:
            yield (
                "synthetic_acceptance",
                f"expected {_expected(SyntheticAcceptance)} beside verification: synthetic, got "
                "null",
            )
        elif isinstance(rates, tuple):
            for i, (before, rate) in enumerate(itertools.pairwise(rates), 1):
                if rate > before:
                    yield (
                        f"synthetic_acceptance.{i}",
                        f"expected at most the rate before it ({before}), got {rate}",
                    )

    @property
    def is_synthetic(self) -> bool:
        """Whether a coin accepts the drafts, so that the text is not the model's."""
        return self.verification == "synthetic"

    def acceptance_shares(self, draft_len: int) -> tuple[float, ...]:
        """Synthetic verification: the share of steps that accept drafts 1..i, for i = 1..K.

        Raises:
            ConfigError: no rates, or not one per draft.
        """
        rates = self.synthetic_acceptance
        if isinstance(rates, tuple) and len(rates) == draft_len:
            return rates
        if rates is None or isinstance(rates, tuple):
            raise ConfigError(f"synthetic_acceptance: {_rates_problem(draft_len, rates)}")
        return tuple(rates**i for i in range(1, draft_len + 1))


def _rates_problem(draft_len: int, rates: tuple[float, ...] | None) -> str:
    return (
        f"expected {draft_len} {'rate' if draft_len == 1 else 'rates'}, one per draft "
        f"(max_draft_len), got {'null' if rates is None else len(rates)}"
    )


def _as_in_the_file(schema: dict[str, Any]) -> None:
    schema["required"] = ["decoding_type"]
    schema["properties"]["num_nextn_predict_layers"] = {
        "anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_DRAFT_LEN}, {"type": "null"}],
        "default": None,
        "deprecated": True,
        "description": "older name of max_draft_len",
    }


class MTPDecodingConfig(_ConfigModel):
    """``speculative_config`` with ``decoding_type: MTP``.

    K is `max_draft_len`; the older ``num_nextn_predict_layers`` is read with a warning, and both
    with different values are an error: neither wins. Without either, K is None until `resolve`.
    """

    model_config = ConfigDict(json_schema_extra=_as_in_the_file)

    renamed: ClassVar[Mapping[str, str]] = {
        "num_draft_tokens": "write max_draft_len",
        "num_speculative_tokens": "write max_draft_len",
        "max_total_draft_tokens": "write max_draft_len (drafts are linear)",
        "num_nextn_predict_layers_from_model_config": "the checkpoint is asked; leave it out",
        "mtp_eagle_one_model": "MTP always runs in one engine; leave it out",
        "BEGIN_THINKING_PHASE_TOKEN": "write begin_thinking_phase_token",
        "END_THINKING_PHASE_TOKEN": "write end_thinking_phase_token",
        "use_rejection_sampling": "write mtp: {verification: rejection, draft_sampling: plain}",
        "allow_advanced_sampling": "sampling is always on; leave it out",
        "acceptance_rate_window_size": "write acceptance_window",
        "acceptance_rate_threshold": "write acceptance_length_threshold (a length, not a rate)",
    }

    decoding_type: Literal["MTP"] = Field(
        default="MTP", description="name of this plugin in the registry"
    )
    max_draft_len: int | None = Field(
        default=None,
        ge=1,
        le=MAX_DRAFT_LEN,
        description="K, drafts per step; null: 1 (eagle) or the number of MTP layers (vanilla)",
    )
    use_mtp_vanilla: bool = Field(
        default=False,
        description="false: first MTP layer reused (eagle); true: one MTP layer per depth",
    )
    use_relaxed_acceptance_for_thinking: bool = Field(
        default=False, description="accept near-best drafts of greedy requests while they think"
    )
    relaxed_topk: int = Field(
        default=1, ge=1, description="relaxed: a draft is among this many most probable tokens"
    )
    relaxed_delta: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="relaxed: and within this much of the highest probability",
    )
    begin_thinking_phase_token: int | None = Field(
        default=None,
        ge=0,
        description="id of the token that begins thinking; null: from the tokenizer",
    )
    end_thinking_phase_token: int | None = Field(
        default=None,
        ge=0,
        description="id of the token that ends thinking; null: from the tokenizer",
    )
    draft_len_schedule: DraftLenSchedule | None = Field(
        default=None, description="up to this batch size -> so many drafts; beyond the last key 0"
    )
    max_concurrency: int | None = Field(
        default=None, ge=1, description="no drafts while the batch is larger than this"
    )
    acceptance_window: int | None = Field(
        default=None,
        ge=1,
        description="steps of requests over which the gate averages the acceptance length",
    )
    acceptance_length_threshold: float | None = Field(
        default=None,
        gt=1,
        le=MAX_DRAFT_LEN + 1,
        description="the gate drafts less under this average; 1 is decoding without drafts",
    )
    mtp: MTPPluginOptions = Field(
        default_factory=MTPPluginOptions,
        description="options that TensorRT-LLM does not have",
    )

    if TYPE_CHECKING:
        # the older name is not a field
        def __init__(self, /, **data: Any) -> None: ...

    @property
    def num_nextn_predict_layers(self) -> int | None:
        """K under TensorRT-LLM's older name."""
        return self.max_draft_len

    @property
    def draft_len(self) -> int:
        """K as a plain integer.

        Raises:
            ConfigError: K was not given and `resolve` has not run.
        """
        if self.max_draft_len is None:
            raise ConfigError(
                "max_draft_len: not known yet; expected a value in the config, or resolve() with "
                "the checkpoint's number of MTP layers first"
            )
        return self.max_draft_len

    @property
    def spec_dec_mode(self) -> SpeculativeDecodingMode:
        if self.use_mtp_vanilla:
            return SpeculativeDecodingMode.MTP
        return SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL

    def resolve(self, num_mtp_layers: int) -> Self:
        """The same config with K filled in: as given, else 1 (eagle) or one per layer (vanilla).

        Raises:
            ConfigError: the checkpoint has no MTP layer, or too few of them for vanilla, or an
                option is given that the mode does not read.
        """
        if num_mtp_layers < 1:
            raise ConfigError(
                f"speculative_config: expected a checkpoint with MTP layers, got {num_mtp_layers}"
            )
        draft_len = self.max_draft_len or (num_mtp_layers if self.use_mtp_vanilla else 1)
        if self.use_mtp_vanilla and draft_len > num_mtp_layers:
            raise ConfigError(
                f"max_draft_len: {draft_len} is more than the checkpoint's {num_mtp_layers} MTP "
                f"{'layer' if num_mtp_layers == 1 else 'layers'}, and vanilla needs one per draft; "
                f"expected at most {num_mtp_layers}, or use_mtp_vanilla: false"
            )
        for key, message in self.mode_problems():
            raise ConfigError(f"{key}: {message}")
        return self.model_validate({**self.model_dump(), "max_draft_len": draft_len})

    def draft_len_for(self, batch_size: int) -> int:
        """Drafts per request in a batch of this size, by the schedule or the concurrency limit."""
        if self.max_concurrency is not None:
            return self.draft_len if batch_size <= self.max_concurrency else 0
        if self.draft_len_schedule is None:
            return self.draft_len
        reached = (k for limit, k in self.draft_len_schedule.items() if batch_size <= limit)
        return next(reached, 0)

    def mode_problems(self) -> Iterator[Problem]:
        """Options that eagle would ignore: a mistake where the mode chooses the worker."""
        if self.use_mtp_vanilla:
            return
        needs = "is for vanilla only; expected use_mtp_vanilla: true beside it"
        if self.mtp.draft_window != "exact":
            yield "mtp.draft_window", f"{self.mtp.draft_window!r} {needs}"
        if self.mtp.chain in ("target_shift", "none"):
            yield "mtp.chain", f"{self.mtp.chain!r} {needs}"

    @model_validator(mode="before")
    @classmethod
    def _read_older_name(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, Mapping) or "num_nextn_predict_layers" not in data:
            return data
        data = dict(data)
        older, current = data.pop("num_nextn_predict_layers"), data.get("max_draft_len")
        if older is None:
            return data
        if type(older) is not int or not 1 <= older <= MAX_DRAFT_LEN:
            allowed = _expected(_find(cls, ["max_draft_len"])[1])
            problem = f"expected {allowed}, got {_got(older)}"
            _raise_problems([("num_nextn_predict_layers", problem)])
        if current is not None and current != older:
            problem = (
                f"{_got(current)} contradicts num_nextn_predict_layers (its older name), which is "
                f"{older}; expected max_draft_len alone"
            )
            _raise_problems([("max_draft_len", problem)])
        message = "num_nextn_predict_layers is the older name of max_draft_len; write max_draft_len"
        if info.context and "source" in info.context:
            # a file's author sees it too, not only the developer
            source = f"{info.context['source']}: speculative_config."
            warnings.warn(source + message, FutureWarning, stacklevel=5)
        else:
            warnings.warn(message, DeprecationWarning, stacklevel=4)
        return {**data, "max_draft_len": older}

    @field_validator("draft_len_schedule", mode="after")
    @classmethod
    def _sort_schedule(cls, schedule: dict[int, int] | None) -> dict[int, int] | None:
        return None if schedule is None else FrozenDict(sorted(schedule.items()))

    @override
    def _problems(self) -> Iterator[Problem]:
        yield from self._schedule_problems()
        yield from self._thinking_problems()
        yield from self._verification_problems()
        yield from self._gate_problems()

    def _schedule_problems(self) -> Iterator[Problem]:
        key, schedule, draft_len = "draft_len_schedule", self.draft_len_schedule, self.max_draft_len
        if schedule is None:
            return
        if self.max_concurrency is not None:
            yield key, "expected either draft_len_schedule or max_concurrency, got both"
        if not schedule:
            yield key, "expected at least one batch size, got an empty mapping"
            return
        if draft_len is None:
            yield key, "expected max_draft_len beside it, got null"
            return
        smallest = min(schedule)
        if schedule[smallest] != draft_len:
            yield (
                key,
                f"expected the smallest batch size ({smallest}) to draft max_draft_len "
                f"({draft_len}), got {schedule[smallest]}",
            )
        for batch_size, scheduled in schedule.items():
            if batch_size != smallest and scheduled > draft_len:
                yield (
                    f"{key}.{batch_size}",
                    f"expected at most max_draft_len ({draft_len}), got {scheduled}",
                )

    def _verification_problems(self) -> Iterator[Problem]:
        if not self.mtp.is_synthetic:
            return
        if self.use_relaxed_acceptance_for_thinking:
            yield (
                "mtp.verification",
                "'synthetic' asks the target nothing; expected "
                "use_relaxed_acceptance_for_thinking: false beside it",
            )
        rates, draft_len = self.mtp.synthetic_acceptance, self.max_draft_len
        if isinstance(rates, tuple) and draft_len is not None and len(rates) != draft_len:
            yield "mtp.synthetic_acceptance", _rates_problem(draft_len, rates)

    def _gate_problems(self) -> Iterator[Problem]:
        window, threshold = self.acceptance_window, self.acceptance_length_threshold
        if (window is None) != (threshold is None):
            given, other = "acceptance_window", "acceptance_length_threshold"
            if window is None:
                given, other = other, given
            yield given, f"expected {other} beside it: the gate needs both"
        elif threshold is None:
            for name in ("gate_margin", "gate_probe_interval", "gate_max_probe_interval"):
                value = getattr(self.mtp, name)
                if value != type(self.mtp).model_fields[name].default:
                    yield (
                        f"mtp.{name}",
                        f"{_got(value)} would be ignored; expected acceptance_window and "
                        "acceptance_length_threshold beside it",
                    )
        elif (
            self.max_draft_len is not None
            and threshold + self.mtp.gate_margin > self.max_draft_len + 1
        ):
            yield (
                "acceptance_length_threshold",
                f"expected at most max_draft_len + 1 ({self.max_draft_len + 1}) with "
                f"mtp.gate_margin ({self.mtp.gate_margin}) on top, or a closed gate could never "
                f"open; got {threshold}",
            )

    def _thinking_problems(self) -> Iterator[Problem]:
        begin, end = self.begin_thinking_phase_token, self.end_thinking_phase_token
        if begin is not None and begin == end:
            yield (
                "end_thinking_phase_token",
                f"must differ from begin_thinking_phase_token, both are {end}",
            )
        for name in ("begin_thinking_phase", "end_thinking_phase"):
            if getattr(self, f"{name}_token") is not None and getattr(self.mtp, name) is not None:
                yield f"{name}_token", f"expected either {name}_token or mtp.{name}, got both"
        if self.use_relaxed_acceptance_for_thinking:
            return
        relaxed: list[tuple[_ConfigModel, str, str]] = [
            (self, "", "relaxed_topk"),
            (self, "", "relaxed_delta"),
            (self, "", "begin_thinking_phase_token"),
            (self, "", "end_thinking_phase_token"),
            (self.mtp, "mtp.", "begin_thinking_phase"),
            (self.mtp, "mtp.", "end_thinking_phase"),
        ]
        for model, path, name in relaxed:
            value = getattr(model, name)
            if value != type(model).model_fields[name].default:
                yield (
                    path + name,
                    f"{_got(value)} would be ignored; expected "
                    "use_relaxed_acceptance_for_thinking: true beside it",
                )


def _open_to_options(schema: dict[str, Any]) -> None:
    schema["required"] = ["decoding_type"]
    del schema["properties"]["options"]
    schema["properties"]["decoding_type"]["not"] = {"const": "MTP"}
    schema["additionalProperties"] = True


class OtherDecodingConfig(_ConfigModel):
    """A ``speculative_config`` of another plugin: kept as written, checked by that plugin."""

    model_config = ConfigDict(json_schema_extra=_open_to_options)

    decoding_type: str = Field(min_length=1, description="name of a registered plugin")
    options: dict[str, Any] = Field(description="every other key of the mapping")

    def __init__(self, /, decoding_type: str, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(**{**(options or {}), "decoding_type": decoding_type})

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        options = {key: value for key, value in data.items() if key != "decoding_type"}
        return {"decoding_type": data.get("decoding_type"), "options": options}

    @field_validator("options", mode="after")
    @classmethod
    def _freeze_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        frozen: dict[str, Any] = _freeze(options)
        return frozen

    @model_serializer
    def _as_written(self) -> dict[str, Any]:
        options: dict[str, Any] = _thaw(self.options)
        return {"decoding_type": self.decoding_type, **options}


class KVCacheConfig(_ConfigModel):
    """``kv_cache_config``: the paged KV cache of target and MTP layers."""

    tokens_per_block: int = Field(default=32, ge=1, description="tokens per KV block")
    max_tokens: int | None = Field(
        default=None, ge=1, description="tokens in the whole cache; null: from free memory"
    )
    free_gpu_memory_fraction: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="share of the free device memory that the cache may take",
    )
    enable_block_reuse: bool = Field(
        default=False,
        description="share blocks of equal prefixes; true is refused, it is not built yet",
    )

    @override
    def _problems(self) -> Iterator[Problem]:
        if self.enable_block_reuse:
            yield "enable_block_reuse", "KV block reuse is not built yet; expected false, got true"


class CudaGraphConfig(_ConfigModel):
    """``cuda_graph_config``: for which batch sizes a step is captured."""

    batch_sizes: BatchSizes | None = Field(
        default=None,
        description="batch sizes to capture, kept ascending; null: chosen up to the largest",
    )
    max_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="largest batch size to capture; null: the top-level max_batch_size",
    )
    enable_padding: bool = Field(
        default=False,
        description="pad a batch up to the next captured size instead of running eagerly",
    )

    @field_validator("batch_sizes", mode="after")
    @classmethod
    def _sort_sizes(cls, sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return None if sizes is None else tuple(sorted(sizes))

    @property
    def largest(self) -> int | None:
        """The largest batch size named here."""
        return self.batch_sizes[-1] if self.batch_sizes else self.max_batch_size

    @override
    def _problems(self) -> Iterator[Problem]:
        sizes = self.batch_sizes
        if sizes is None:
            return
        if not sizes:
            yield "batch_sizes", "expected at least one batch size, got an empty list"
        twice = sorted({size for size in sizes if sizes.count(size) > 1})
        if twice:
            yield "batch_sizes", f"expected every size once, got {_join(twice)} more than once"
        if self.max_batch_size is not None:
            yield "batch_sizes", "expected either batch_sizes or max_batch_size, got both"


def _decoding_tag(value: Any) -> str | None:
    """Which model checks a ``speculative_config``; None: the mapping does not say."""
    if isinstance(value, OtherDecodingConfig):
        return "<other>"
    if not isinstance(value, Mapping):
        return "<mtp>"
    decoding_type = value.get("decoding_type")
    if decoding_type is None:
        return None
    ours = not isinstance(decoding_type, str) or decoding_type.casefold() == "mtp"
    return "<mtp>" if ours else "<other>"


SpeculativeConfig = Annotated[
    Annotated[MTPDecodingConfig, Tag("<mtp>")] | Annotated[OtherDecodingConfig, Tag("<other>")],
    Discriminator(_decoding_tag),
]
_TAGGED: Mapping[Any, type[_ConfigModel]] = {
    "<mtp>": MTPDecodingConfig,
    "<other>": OtherDecodingConfig,
}


class LLMConfig(_ConfigModel):
    """The YAML file of the embedded executor."""

    renamed: ClassVar[Mapping[str, str]] = {
        "enable_overlap_scheduler": "write disable_overlap_scheduler with the opposite value",
        "use_overlap_scheduler": "write disable_overlap_scheduler with the opposite value",
        "use_cuda_graph": "write cuda_graph_config: {} (graphs) or null (none)",
        "cuda_graph_batch_sizes": "write cuda_graph_config: {batch_sizes: _}",
        "cuda_graph_max_batch_size": "write cuda_graph_config: {max_batch_size: _}",
        "cuda_graph_padding_enabled": "write cuda_graph_config: {enable_padding: _}",
        "kv_cache_free_gpu_memory_fraction": "write kv_cache_config: {free_gpu_memory_fraction: _}",
        "model_dir": "write model",
        "model_path": "write model",
        "max_input_len": "write max_seq_len (prompt plus output)",
        "max_model_len": "write max_seq_len",
        "max_num_seqs": "write max_batch_size",
        "max_num_batched_tokens": "write max_num_tokens",
        "torch_dtype": "write dtype",
    }

    model: str = Field(
        min_length=1, description="checkpoint directory; relative: from the YAML file's folder"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="type of weights and KV cache; auto: the checkpoint's, float32 on CPU",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="where the model runs; auto: CUDA when present"
    )
    max_batch_size: int = Field(default=8, ge=1, description="requests in one step at most")
    max_num_tokens: int = Field(default=2048, ge=1, description="tokens in one step at most")
    max_seq_len: int | None = Field(
        default=None,
        ge=1,
        description="prompt plus output of a request at most; null: from the model",
    )
    kv_cache_config: KVCacheConfig = Field(
        default_factory=KVCacheConfig, description="the paged KV cache"
    )
    attn_backend: Literal["auto", "sdpa", "triton"] = Field(
        default="auto",
        description="attention over the cache; auto: Triton where device and heads have it",
    )
    fused_layers: Switch = Field(
        default="auto",
        description="run the layers in fewer, fused launches where recognised; auto: on CUDA",
    )
    cuda_graph_config: CudaGraphConfig | None = Field(
        default=None, description="captured batch sizes; null: no CUDA graphs"
    )
    disable_overlap_scheduler: bool = Field(
        default=False, description="true: the host waits for each step before it prepares the next"
    )
    enable_chunked_prefill: bool = Field(
        default=True, description="split prompts that do not fit into max_num_tokens"
    )
    speculative_config: SpeculativeConfig | None = Field(
        default=None, description="the drafter, chosen by decoding_type; null: plain decoding"
    )

    def resolve(self, num_mtp_layers: int) -> Self:
        """The same config with K filled in from the checkpoint (`MTPDecodingConfig.resolve`)."""
        if not isinstance(self.speculative_config, MTPDecodingConfig):
            return self
        resolved = self.speculative_config.resolve(num_mtp_layers)
        return self.model_validate({**dict(self), "speculative_config": resolved})

    @override
    def _problems(self) -> Iterator[Problem]:
        spec = self.speculative_config
        draft_len = 0
        if isinstance(spec, MTPDecodingConfig):
            draft_len = spec.max_draft_len or 0
            for key, message in spec.mode_problems():
                yield f"speculative_config.{key}", message
        least = self.max_batch_size * (draft_len + 1)
        if self.max_num_tokens < least:
            with_drafts = f" times max_draft_len + 1 ({draft_len + 1})" if draft_len else ""
            yield (
                "max_num_tokens",
                f"expected at least max_batch_size ({self.max_batch_size}){with_drafts}"
                f"{f', which is {least}' if draft_len else ''}, got {self.max_num_tokens}",
            )
        graphs = self.cuda_graph_config
        if graphs is None:
            return
        if self.device == "cpu":
            yield "cuda_graph_config", "expected null with device: cpu"
        if graphs.largest is not None and graphs.largest > self.max_batch_size:
            name = "max_batch_size" if graphs.batch_sizes is None else "batch_sizes"
            yield (
                f"cuda_graph_config.{name}",
                f"expected at most max_batch_size ({self.max_batch_size}), got {graphs.largest}",
            )


def load_config(path: str | Path) -> LLMConfig:
    """Read a YAML file; relative paths in it are taken from the file's folder.

    Raises:
        ConfigError: one line per mistake: file, key path, what came, what is allowed.
    """
    source = str(path)
    data = _read_yaml(Path(path), source)
    config = parse_config(data, source)
    folder = Path(path).parent
    found: dict[str, Any] = {"model": _found_from(folder, config.model)}
    spec = config.speculative_config
    if isinstance(spec, MTPDecodingConfig) and isinstance(spec.mtp.draft_vocab, str):
        listed = {"draft_vocab": _found_from(folder, spec.mtp.draft_vocab)}
        options = spec.mtp.model_copy(update=listed)
        found["speculative_config"] = spec.model_copy(update={"mtp": options})
    return config.model_copy(update=found)


def _found_from(folder: Path, path: str) -> str:
    """The path as seen from a folder, where it is relative."""
    given = Path(path).expanduser()
    return str(given if given.is_absolute() else (folder / given).resolve())


def parse_config(mapping: Mapping[str, Any], source: str = "<mapping>") -> LLMConfig:
    """The same checks and messages for a mapping; relative paths stay as they are."""
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{source}: expected a mapping of keys to values, got {_got(mapping)}")
    return LLMConfig.model_validate(mapping, context={"source": source})


def json_schema() -> dict[str, Any]:
    """The JSON schema of the YAML file."""
    return LLMConfig.model_json_schema()


# --- reading YAML ---


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice and reads 1e-3 as a number."""

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            identity = (key.tag, key.value)
            if identity in lines:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key.value!r} was already given on line {lines[identity]}",
                    problem_mark=key.start_mark,
                )
            lines[identity] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+\Z"),
    list("-+0123456789"),
)


def _read_yaml(path: Path, source: str) -> Mapping[str, Any]:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        raise ConfigError(f"{source}: no such file; expected a YAML file") from None
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: expected UTF-8 text, got other bytes: {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        told = ": ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{source}: {line}{told}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        told = " ".join(str(error).split())
        raise ConfigError(f"{source}: not valid YAML: {told}") from None
    if data is None:
        raise ConfigError(f"{source}: the file is empty; expected a mapping with the key 'model'")
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: expected a mapping of keys to values, got {_got(data)}")
    return data


# --- wording of mistakes ---


def _raise_problems(problems: list[Problem]) -> None:
    if problems:
        raise PydanticCustomError("problems", "problems", {"problems": problems})


def _config_error(model: type[_ConfigModel], error: ValidationError, source: str) -> ConfigError:
    lines = [
        f"{source}: {key}: {message}" if key else f"{source}: {message}"
        for details in error.errors(include_url=False)
        for key, message in _problems_of(model, details)
    ]
    return ConfigError("\n".join(lines))


def _problems_of(root: type[_ConfigModel], details: ErrorDetails) -> Iterator[Problem]:
    """What pydantic found, as (dotted key path, sentence)."""
    steps = details["loc"]
    path = ".".join(_spelled(step) for step in steps if step not in ("[key]", *_TAGGED, *_FORMS))
    match details["type"]:
        case "problems":
            for key, message in details["ctx"]["problems"]:
                yield f"{path}.{key}" if path else key, message
        case "union_tag_not_found" if steps[-1] == "speculative_config":
            expected = "expected 'MTP' or the name of another plugin"
            yield f"{path}.decoding_type", f"required key is missing; {expected}"
        case "extra_forbidden":
            owner, _ = _find(root, steps[:-1])
            yield path, f"unknown key; {_advice(owner, str(steps[-1]))}"
        case "invalid_key":
            owner, _ = _find(root, steps[:-1])
            yield path, f"expected a key that is text; {_advice(owner, '')}"
        case "missing":
            yield path, f"required key is missing; expected {_expected(_find(root, steps)[1])}"
        case _:
            expected = _expected(_find(root, steps)[1])
            yield path, f"expected {expected}, got {_got(details['input'])}"


def _spelled(step: int | str) -> str:
    return str(step) if str(step) and str(step).isprintable() else repr(step)


def _find(root: type[_ConfigModel], steps: Sequence[Any]) -> tuple[type[_ConfigModel], Any]:
    """The model that a path leads to, and the annotation of what stands there."""
    owner: type[_ConfigModel] = root
    annotation: Any = root
    for step in steps:
        if step in _TAGGED:
            owner = _TAGGED[step]
        elif step in _FORMS:
            annotation = _FORMS[step]
        elif step in owner.model_fields:
            field = owner.model_fields[step]
            annotation = Annotated[field.annotation, field]
            owner = next(_models_in(annotation), owner)
        elif step != "[key]":
            # an item of a list or a mapping
            annotation = _item(annotation, is_key=steps[-1] == "[key]")
    return owner, annotation


def _models_in(annotation: Any) -> Iterator[type[_ConfigModel]]:
    if isinstance(annotation, type) and issubclass(annotation, _ConfigModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _item(annotation: Any, *, is_key: bool) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is tuple:
        return arguments[0]
    if origin is dict:
        return arguments[0] if is_key else arguments[1]
    inner = next((a for a in arguments if a is not type(None)), annotation)
    return annotation if inner is annotation else _item(inner, is_key=is_key)


def _expected(annotation: Any, constraints: tuple[Any, ...] = ()) -> str:
    """The allowed values of an annotation, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        found = (m.metadata if isinstance(m, FieldInfo) else [m] for m in arguments[1:])
        return _expected(arguments[0], (*constraints, *(one for each in found for one in each)))
    if type(None) in arguments:
        inner = next(a for a in arguments if a is not type(None))
        return f"{_expected(inner, constraints)} or null"
    if arguments and origin in (Union, UnionType):
        # what looks alike is said once
        return " or ".join(dict.fromkeys(_expected(a, constraints) for a in arguments))
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + _join(arguments)
    if origin is tuple:
        return f"a list (each item {_expected(arguments[0])})"
    if origin is dict:
        key, value = map(_expected, arguments)
        return f"a mapping (each key {key}, each value {value})"
    limits = {
        name: getattr(constraint, name)
        for constraint in constraints
        for name in ("ge", "gt", "le", "min_length")
        if hasattr(constraint, name)
    }
    if annotation is str:
        return "text that is not empty" if limits else "text"
    names = {bool: "true or false", int: "an integer", float: "a number"}
    return names.get(annotation, "a mapping") + _range(limits)


def _range(limits: Mapping[str, Any]) -> str:
    if "ge" in limits and "le" in limits:
        return f" from {limits['ge']} to {limits['le']}"
    if "ge" in limits:
        return f" of at least {limits['ge']}"
    if "gt" in limits:
        return f" above {limits['gt']}" + (f", at most {limits['le']}" if "le" in limits else "")
    return ""


def _got(value: Any) -> str:
    """What came, spelled as YAML spells it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def _join(values: Iterable[Any]) -> str:
    return ", ".join(repr(value) for value in values)


def _advice(owner: type[_ConfigModel], key: str) -> str:
    """What to write instead of an unknown key."""
    if key in owner.renamed:
        return owner.renamed[key]
    homes = dict(reversed(list(_homes(LLMConfig))))
    if key in homes:
        return f"it belongs {f'under {homes[key]}' if homes[key] else 'at the top level'}"
    known = list(owner.model_fields)
    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}"


def _homes(model: type[_ConfigModel], path: str = "") -> Iterator[tuple[str, str]]:
    """Every key of the file with the path of the mapping that it belongs to, outermost first."""
    for name in model.model_fields:
        yield name, path
    for name, field in model.model_fields.items():
        inner = next(_models_in(field.annotation), None)
        if inner is not None:
            yield from _homes(inner, f"{path}.{name}" if path else name)
