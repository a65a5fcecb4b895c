"""Schemas of the RoPE parameters in a checkpoint's config, and their base class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from typing_extensions import override

from mtp_plugin.config.messages import got, join, spelled

Problem = tuple[str, str]
"""(key, message)."""

MAX_POSITIONS = 2**24
Factor = Annotated[float, Field(ge=1, le=1e6)]
Share = Annotated[float, Field(gt=0, le=1)]
Positions = Annotated[int, Field(ge=1, le=MAX_POSITIONS)]


class CheckpointModel(BaseModel):
    """A section of a checkpoint's config, strict about types; unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    def problems(self) -> Iterator[Problem]:
        """Yield the problems of combinations of keys."""
        return iter(())


class Rope(CheckpointModel):
    """RoPE without scaling."""

    model_config = ConfigDict(extra="forbid")

    rope_type: str = "default"
    rope_theta: Annotated[float, Field(gt=1, le=1e15)] | None = None
    partial_rotary_factor: Share | None = None


class ScaledRope(Rope):
    factor: Factor


class YarnRope(Rope):
    factor: Factor
    original_max_position_embeddings: Positions | None = None
    attention_factor: Annotated[float, Field(gt=0, le=1e3)] | None = None
    beta_fast: Annotated[float, Field(gt=0, le=1e6)] | None = None
    beta_slow: Annotated[float, Field(gt=0, le=1e6)] | None = None
    mscale: Annotated[float, Field(ge=0, le=1e3)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0, le=1e3)] | None = None
    truncate: bool = True

    @override
    def problems(self) -> Iterator[Problem]:
        fast, slow = self.beta_fast or 32, self.beta_slow or 1
        if fast < slow:
            yield "beta_fast", f"expected at least beta_slow, which is {slow}, got {fast}"


class Llama3Rope(Rope):
    factor: Factor
    low_freq_factor: Annotated[float, Field(gt=0, le=1e6)]
    high_freq_factor: Annotated[float, Field(gt=0, le=1e6)]
    original_max_position_embeddings: Positions

    @override
    def problems(self) -> Iterator[Problem]:
        if self.high_freq_factor <= self.low_freq_factor:
            yield (
                "high_freq_factor",
                f"expected above low_freq_factor, which is {self.low_freq_factor}, "
                f"got {self.high_freq_factor}",
            )


ROPE_TYPES: dict[str, type[Rope]] = {
    "default": Rope,
    # scales only positions past the model's maximum, which no request reaches
    "dynamic": ScaledRope,
    "linear": ScaledRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
}
"""Supported RoPE types. longrope is not: it depends on the longest sequence of a batch."""
ROPE_MODELS = {model.__name__: model for model in ROPE_TYPES.values()}


def problems_of(model: type[CheckpointModel], error: ValidationError) -> Iterator[Problem]:
    """Convert pydantic errors to problems, each reported once."""
    found = (_problem(model, details) for details in error.errors(include_url=False))
    yield from dict.fromkeys(found)


def _problem(model: type[CheckpointModel], details: ErrorDetails) -> Problem:
    steps = details["loc"]
    key = ".".join(spelled(step) for step in steps if step not in ("[key]",))
    field = model.model_fields.get(str(steps[0]))
    if field is None:
        return key, f"unknown key; expected one of {', '.join(model.model_fields)}"
    wanted = field.description or expected(Annotated[field.annotation, field])
    if details["type"] == "missing":
        return key, f"required key is missing; expected {wanted}"
    return key, f"expected {wanted}, got {got(details['input'])}"


def expected(annotation: Any, constraints: tuple[Any, ...] = ()) -> str:
    """The allowed values of an annotation, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        found = (m.metadata if isinstance(m, FieldInfo) else [m] for m in arguments[1:])
        return expected(arguments[0], (*constraints, *(one for each in found for one in each)))
    if type(None) in arguments:
        inner = next(a for a in arguments if a is not type(None))
        return f"{expected(inner, constraints)} or null"
    if arguments and origin in (Union, UnionType):
        # what looks alike is said once
        return " or ".join(dict.fromkeys(expected(a, constraints) for a in arguments))
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + join(arguments)
    if origin is tuple:
        return f"a list (each item {expected(arguments[0])})"
    if origin is dict:
        key, value = map(expected, arguments)
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
