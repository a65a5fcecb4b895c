"""``speculative_config``: MTP with its checks, or what another plugin will check."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from typing_extensions import Self, override

from mtp_plugin.config import host_keys
from mtp_plugin.config.frozen import FrozenDict, freeze, thaw
from mtp_plugin.config.messages import got
from mtp_plugin.config.mode import SpeculativeDecodingMode
from mtp_plugin.config.mtp import MTPPluginOptions, rates_problem
from mtp_plugin.config.schema import ConfigModel, Problem, add_host_keys
from mtp_plugin.config.values import (
    MAX_DRAFT_LEN,
    DraftLenSchedule,
    PositiveInt,
    RelaxedTopK,
    Text,
    TokenId,
)
from mtp_plugin.errors import ConfigError, expect_int, format_value

_logger = logging.getLogger("mtp_plugin")


def _as_in_the_file(schema: dict[str, Any], model: type[ConfigModel]) -> None:
    add_host_keys(schema, model)
    schema["required"] = ["decoding_type"]
    schema["properties"]["num_nextn_predict_layers"] = {
        "anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_DRAFT_LEN}, {"type": "null"}],
        "default": None,
        "deprecated": True,
        "description": "older name of max_draft_len",
    }


class MTPDecodingConfig(ConfigModel):
    """``speculative_config`` with ``decoding_type: MTP``.

    K is `max_draft_len`; the older ``num_nextn_predict_layers`` is read with a warning, and both
    with different values are an error: neither wins. Without either, K is None until `resolve`.
    """

    model_config = ConfigDict(json_schema_extra=_as_in_the_file)

    host_keys = host_keys.SPECULATIVE

    aliases: ClassVar[Mapping[str, str]] = {
        "num_nextn_predict_layers": "max_draft_len",
        "num_speculative_tokens": "max_draft_len",
    }

    renamed: ClassVar[Mapping[str, str]] = {
        "num_draft_tokens": "write max_draft_len",
        "num_speculative_tokens_per_batch_size": "write draft_len_schedule: {batch size limit: K}",
        "max_total_draft_tokens": "write max_draft_len (drafts are linear)",
        "num_nextn_predict_layers_from_model_config": "read from the checkpoint; leave it out",
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
        default=False,
        description="accept drafts near the argmax in the thinking phase of greedy requests",
    )
    relaxed_topk: RelaxedTopK = Field(
        default=1, description="relaxed: a draft is among this many most probable tokens"
    )
    relaxed_delta: float = Field(
        default=0.0, ge=0, description="relaxed: and within this much of the highest probability"
    )
    begin_thinking_phase_token: TokenId | None = Field(
        default=None,
        description="id of the token that begins thinking; null: from the tokenizer",
    )
    end_thinking_phase_token: TokenId | None = Field(
        default=None,
        description="id of the token that ends thinking; null: from the tokenizer",
    )
    draft_len_schedule: DraftLenSchedule | None = Field(
        default=None,
        description="batch size limit -> draft tokens per request; 0 above the last limit",
    )
    max_concurrency: PositiveInt | None = Field(
        default=None, description="no draft tokens while the batch is larger than this"
    )
    acceptance_window: PositiveInt | None = Field(
        default=None,
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

        Warns through the logger ``mtp_plugin`` of relaxed acceptance that relaxes nothing, and of a
        schedule that TensorRT-LLM 1.2 reads differently.

        Raises:
            ConfigError: the checkpoint has no MTP layer, or too few of them for vanilla, or an
                option is given that the mode does not read.
        """
        num_mtp_layers = expect_int("num_mtp_layers", num_mtp_layers, error=ConfigError)
        if num_mtp_layers < 1:
            raise ConfigError(
                f"speculative_config: expected a checkpoint with MTP layers, got {num_mtp_layers}; "
                "null (--no-mtp on the command line) decodes without MTP"
            )
        draft_len = self.max_draft_len or (num_mtp_layers if self.use_mtp_vanilla else 1)
        if self.use_mtp_vanilla and draft_len > num_mtp_layers:
            raise ConfigError(
                f"max_draft_len: {draft_len} is more than the checkpoint's {num_mtp_layers} MTP "
                f"{'layer' if num_mtp_layers == 1 else 'layers'}, and vanilla needs one per draft; "
                f"expected at most {num_mtp_layers}, or use_mtp_vanilla: false"
            )
        problems = [f"{key}: {message}" for key, message in self.mode_problems()]
        if problems:
            raise ConfigError("\n".join(problems))
        _warn_if_nothing_is_relaxed(
            self.use_relaxed_acceptance_for_thinking, self.relaxed_topk, self.relaxed_delta
        )
        if self.draft_len_schedule is not None:
            _warn_of_older_schedule(tuple(self.draft_len_schedule.items()))
        return self.model_validate({**self.model_dump(), "max_draft_len": draft_len})

    def draft_len_for(self, batch_size: int) -> int:
        """Drafts per request in a batch of this size, by the schedule or the concurrency limit."""
        batch_size = expect_int("batch_size", batch_size, 0, error=ConfigError)
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
        needs = "is for vanilla only; expected use_mtp_vanilla: true with it"
        if self.mtp.draft_window != "exact":
            yield "mtp.draft_window", f"{self.mtp.draft_window!r} {needs}"
        if self.mtp.chain in ("target_shift", "none"):
            yield "mtp.chain", f"{self.mtp.chain!r} {needs}"

    @classmethod
    @override
    def _prepare(cls, data: dict[Any, Any], info: ValidationInfo) -> Iterator[Problem]:
        decoding_type = data.get("decoding_type")
        if isinstance(decoding_type, str) and decoding_type.casefold() == "mtp":
            data["decoding_type"] = "MTP"
        yield from _read_draft_sample_method(data)
        older = data.get("num_nextn_predict_layers")
        contradictions = list(super()._prepare(data, info))
        yield from contradictions
        if older is not None and not contradictions:
            message = (
                "num_nextn_predict_layers is the older name of max_draft_len; write max_draft_len"
            )
            if info.context and "source" in info.context:
                # a file's author sees it too, not only the developer
                source = f"{info.context['source']}: speculative_config."
                warnings.warn(source + message, FutureWarning, stacklevel=7)
            else:
                warnings.warn(message, DeprecationWarning, stacklevel=5)
        total, draft_len = data.get("max_total_draft_tokens"), data.get("max_draft_len")
        if type(total) is int and type(draft_len) is int:
            del data["max_total_draft_tokens"]
            if total != draft_len:
                yield (
                    "max_total_draft_tokens",
                    f"expected max_draft_len ({got(draft_len)}), as drafts are linear, or no such "
                    f"key, got {got(total)}",
                )

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
        key, schedule = "draft_len_schedule", self.draft_len_schedule
        if schedule is None:
            return
        if self.max_concurrency is not None:
            yield key, "expected either draft_len_schedule or max_concurrency, got both"
        draft_len = self.max_draft_len
        if draft_len is None:
            yield key, "expected max_draft_len with it, got null"
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
                "'synthetic' does not verify with the target; expected "
                "use_relaxed_acceptance_for_thinking: false with it",
            )
        rates, draft_len = self.mtp.synthetic_acceptance, self.max_draft_len
        if isinstance(rates, tuple) and draft_len is not None and len(rates) != draft_len:
            yield "mtp.synthetic_acceptance", rates_problem(draft_len, rates)

    def _gate_problems(self) -> Iterator[Problem]:
        window, threshold = self.acceptance_window, self.acceptance_length_threshold
        if self.mtp.adaptive_draft_len and (window, threshold) != (None, None):
            yield (
                "mtp.adaptive_draft_len",
                "expected either this or the gate (acceptance_window and "
                "acceptance_length_threshold), got both",
            )
        if (window is None) != (threshold is None):
            given, other = "acceptance_window", "acceptance_length_threshold"
            if window is None:
                given, other = other, given
            yield given, f"expected {other} too: the gate needs both"
        elif threshold is None:
            yield from self.mtp.ignored(
                "gate_margin",
                "gate_probe_interval",
                "gate_max_probe_interval",
                needs="acceptance_window and acceptance_length_threshold",
                path="mtp.",
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


def _read_draft_sample_method(data: dict[Any, Any]) -> Iterator[Problem]:
    """Read vLLM's key as ``mtp.draft_sampling`` where drafts decide which output is sampled."""
    value, options = data.get("draft_sample_method"), data.get("mtp")
    if isinstance(options, MTPPluginOptions):
        options = options.model_dump()
    if not isinstance(options, Mapping) or value not in ("greedy", "probabilistic"):
        return
    methods = options.get("verification")
    named = [methods] if isinstance(methods, str) else methods
    if not isinstance(named, (list, tuple)) or not {"rejection", "block"}.intersection(named):
        return
    del data["draft_sample_method"]
    ours = "plain" if value == "probabilistic" else value
    given = options.get("draft_sampling")
    if given not in (None, ours):
        yield (
            "draft_sample_method",
            f"{got(value)} is mtp: {{draft_sampling: {ours}}}, but mtp.draft_sampling: "
            f"{got(given)} is given as well",
        )
    data["mtp"] = {**options, "draft_sampling": ours}


@functools.cache  # a config is resolved more than once
def _warn_if_nothing_is_relaxed(relaxes: bool, topk: int, delta: float) -> None:
    """Warn instead of raising, because TensorRT-LLM takes these values."""
    if (topk > 1 and delta > 0) if relaxes else (topk, delta) == (1, 0):
        return
    _logger.warning(
        "use_relaxed_acceptance_for_thinking relaxes nothing unless it is true, relaxed_topk is "
        "above 1 and relaxed_delta is above 0"
    )


@functools.lru_cache(maxsize=8)
def _warn_of_older_schedule(schedule: tuple[tuple[int, int], ...]) -> None:
    """Warn of a schedule in the form of TensorRT-LLM 1.2, whose keys are the smallest batch sizes:
    one has to be 1, and only there a last value of 0 is needed."""
    if schedule[0][0] != 1 or schedule[-1][1] != 0:
        return
    older = {size - 1: k for (_, k), (size, _) in pairwise(schedule)}
    differs = [
        (last, k, older[last])
        for (size, _), (_, k), last in zip(schedule, schedule[1:], older, strict=False)
        if last > size and k != older[last]
    ]
    if not differs:
        return
    _logger.warning(
        "draft_len_schedule: %s: keys are read as in TensorRT-LLM 1.3, up to this batch size, so "
        "%d requests draft %d tokens each; TensorRT-LLM 1.2 reads them as from this batch size on, "
        "so they draft %d; if that is meant, write %s",
        format_value(dict(schedule)),
        *differs[0],
        format_value(older),
    )


def _open_to_options(schema: dict[str, Any]) -> None:
    schema["required"] = ["decoding_type"]
    del schema["properties"]["options"]
    schema["properties"]["decoding_type"]["not"] = {"const": "MTP"}
    schema["additionalProperties"] = True


class OtherDecodingConfig(ConfigModel):
    """A ``speculative_config`` of another plugin: kept as written, checked by that plugin."""

    model_config = ConfigDict(json_schema_extra=_open_to_options)

    decoding_type: Text = Field(description="name of a registered plugin")
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
        frozen: dict[str, Any] = freeze(options)
        return frozen

    @model_serializer
    def _as_written(self) -> dict[str, Any]:
        options: dict[str, Any] = thaw(self.options)
        return {"decoding_type": self.decoding_type, **options}


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


def is_mtp(mapping: Mapping[Any, Any]) -> bool:
    """Whether a ``speculative_config`` is checked as MTP's."""
    return _decoding_tag(mapping) == "<mtp>"


SpeculativeConfig = Annotated[
    Annotated[MTPDecodingConfig, Tag("<mtp>")] | Annotated[OtherDecodingConfig, Tag("<other>")],
    Discriminator(
        _decoding_tag,
        custom_error_type="problem",
        custom_error_message="required key decoding_type is missing; expected 'MTP' or the name "
        "of another plugin",
    ),
]
