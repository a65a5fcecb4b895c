"""The base class of config sections: frozen pydantic models that report all errors by key path."""

from __future__ import annotations

import difflib
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError
from typing_extensions import Self, override

from mtp_plugin.config.host_keys import HostKey
from mtp_plugin.config.messages import expected, got, spelled
from mtp_plugin.errors import ConfigError

# (dotted key path, message)
Problem = tuple[str, str]

_Model = TypeVar("_Model", bound="ConfigModel")

REPORTED: Any = object()
"""Replaces a value whose problem has been reported."""

MAX_PROBLEMS = 100
"""Maximum number of lines of an error message."""


def add_host_keys(schema: dict[str, Any], model: type[ConfigModel]) -> None:
    """Add the accepted TensorRT-LLM keys to a model's JSON schema."""
    keys = schema.setdefault("properties", {})
    for name, key in model.host_keys.items():
        ours, theirs = keys.get(name), key.schema()
        if ours is None:
            keys[name] = theirs
        else:
            shared = {part: ours.pop(part) for part in ("default", "description") if part in ours}
            keys[name] = {"anyOf": [ours, theirs], **shared}


class _FieldReportedError(AttributeError):
    """A check read a field that has no value because its problem has been reported."""


class ConfigModel(BaseModel):
    """A frozen config section, strict about types and keys.

    All problems of a file are reported in one `ConfigError`.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra=add_host_keys,
    )

    renamed: ClassVar[Mapping[str, str]] = {}
    """Keys of other versions and engines -> the key to write instead."""

    aliases: ClassVar[Mapping[str, str]] = {}
    """Keys of other engines -> the key here with the same meaning."""

    host_keys: ClassVar[Mapping[str, HostKey]] = {}
    """TensorRT-LLM keys without effect, with their accepted values."""

    outermost: ClassVar[type[ConfigModel]]
    """The model of the whole file (`whole_file`)."""

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _config_error(type(self), error, type(self).__name__) from None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise _FieldReportedError(name)
            return super().__getattr__(name)

    # pydantic then validates nested mappings itself, so that errors have the whole key path
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    @override
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        source = (options.get("context") or {}).get("source", cls.__name__)
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise _config_error(cls, error, source) from None

    @model_validator(mode="wrap")
    @classmethod
    def _report_all(
        cls, data: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        """Validate keys, values and combinations, and report all problems in one error.

        Combinations are checked on a model without the invalid fields; checks that read such a
        field are skipped.
        """
        if not isinstance(data, Mapping):
            return handler(data)
        data = dict(data)
        problems = [*cls._rename(data), *cls._prepare(data, info)]
        errors: list[ErrorDetails] = []
        try:
            model: Self | None = cls._without_reported(data, handler)
        except ValidationError as error:
            errors = error.errors(include_url=False)
            model = cls._valid_part(data, errors, handler)
        if model is not None:
            for check in model._checks():
                with suppress(_FieldReportedError):
                    problems.extend(check)
        if model is not None and not errors:
            raise_problems(problems)
            return model
        raise ValidationError.from_exception_data(
            cls.__name__, [*map(_to_init_error, errors), *_line_errors(problems)]
        )

    @classmethod
    def _rename(cls, data: dict[Any, Any]) -> Iterator[Problem]:
        """Move the values of aliases to our keys, and yield those that contradict ours."""
        for alias in [key for key in data if key in cls.aliases]:
            name, value = cls.aliases[alias], data.pop(alias)
            if data.setdefault(name, value) != value:
                yield (
                    alias,
                    f"{got(value)} is {name} under another name, and {name}: {got(data[name])} is "
                    f"given as well",
                )

    @classmethod
    def _prepare(cls, data: dict[Any, Any], info: ValidationInfo) -> Iterator[Problem]:  # noqa: ARG003
        """Rewrite a mapping in place before its fields are validated, and yield its problems.

        A value with a problem is replaced by `REPORTED`.
        """
        for key, value in data.items():
            # arithmetic with longer integers may take long
            if isinstance(value, int) and value.bit_length() > 64:
                data[key] = REPORTED
                yield spelled(key), f"expected an integer of at most 64 bits, got {got(value)}"

    @classmethod
    def _without_reported(
        cls, data: Mapping[Any, Any], handler: ModelWrapValidatorHandler[Self]
    ) -> Self:
        """Build the model without the fields that have a reported problem."""
        reported = [key for key, value in data.items() if value is REPORTED]
        known = {key: value for key, value in data.items() if value is not REPORTED}
        required = {
            name: "?"
            for name in reported
            if name in cls.model_fields and cls.model_fields[name].is_required()
        }
        model = handler({**known, **required})
        for name in reported:
            vars(model).pop(name, None)
        return model

    @classmethod
    def _valid_part(
        cls,
        data: Mapping[Any, Any],
        errors: Sequence[ErrorDetails],
        handler: ModelWrapValidatorHandler[Self],
    ) -> Self | None:
        """Build the model without invalid fields, nested ones too; None on failure."""
        valid = dict(data)
        for details in errors:
            keys = details["ctx"]["problems"] if details["type"] == "problems" else [("", "")]
            for key, _ in keys:
                _mark(cls, valid, [*details["loc"], *(key.split(".") if key else ())])
        try:
            return cls._without_reported(valid, handler)
        except ValidationError:
            return None

    def _checks(self) -> Iterator[Iterator[Problem]]:
        """Return the checks of field combinations; each yields the problems of one subject."""
        return iter(())


def whole_file(model: type[_Model]) -> type[_Model]:
    """Register the model of the whole file, in which misplaced keys are looked up."""
    ConfigModel.outermost = model
    return model


def drop_host_keys(model: type[ConfigModel], data: dict[Any, Any]) -> list[str]:
    """Remove TensorRT-LLM keys without effect from a mapping, and return their names."""
    keys = model.host_keys
    names = [name for name, value in data.items() if name in keys and keys[name].accepts(value)]
    for name in names:
        del data[name]
    return names


def allowed(root: type[ConfigModel], steps: Sequence[Any]) -> str:
    """Describe the values that a path under a model accepts."""
    return expected(_find(root, steps)[1])


def raise_problems(problems: list[Problem]) -> None:
    """Fail the running validation if there are problems."""
    if problems:
        raise _custom_error(problems)


def _custom_error(problems: Sequence[Problem]) -> PydanticCustomError:
    return PydanticCustomError("problems", "problems", {"problems": problems})


def _line_errors(problems: Sequence[Problem]) -> list[InitErrorDetails]:
    return [InitErrorDetails(type=_custom_error(problems), input=None)] if problems else []


def _to_init_error(details: ErrorDetails) -> InitErrorDetails:
    kind: str | PydanticCustomError = details["type"]
    context = details.get("ctx", {})
    if kind == "problems":
        kind = _custom_error(context["problems"])
    return InitErrorDetails(type=kind, loc=details["loc"], input=details["input"], ctx=context)


def _mark(model: type[ConfigModel], data: dict[Any, Any], path: Sequence[Any]) -> None:
    """Replace the value at a path by `REPORTED`, down to a field of the innermost model."""
    tags = _tags(ConfigModel.outermost)
    step, *rest = [step for step in path if step not in tags]
    key = next((key for key in data if str(key) == str(step)), step)
    field = model.model_fields.get(key) if isinstance(key, str) else None
    inner = next(_models_in(field.annotation), None) if field is not None else None
    if inner is not None and rest and rest != ["[key]"] and isinstance(data[key], Mapping):
        data[key] = dict(data[key])
        _mark(inner, data[key], rest)
    else:
        data[key] = REPORTED


def _config_error(model: type[ConfigModel], error: ValidationError, source: str) -> ConfigError:
    found = error.errors(include_url=False)
    is_short = sum(details["type"] == "extra_forbidden" for details in found) > 1
    problems = (problem for details in found for problem in _problems_of(model, details, is_short))
    lines = [
        f"{source}: {key}: {message}" if key else f"{source}: {message}"
        for key, message in itertools.islice(problems, MAX_PROBLEMS)
    ]
    if next(problems, None) is not None:
        lines.append(f"{source}: and more; only the first {MAX_PROBLEMS} problems are listed")
    return ConfigError("\n".join(lines))


def _problems_of(
    root: type[ConfigModel], details: ErrorDetails, is_short: bool = False
) -> Iterator[Problem]:
    """Yield what pydantic found, as (dotted key path, sentence).

    Args:
        is_short: do not list the known keys for an unknown one.
    """
    steps = details["loc"]
    not_in_file = ("[key]", *_tags(ConfigModel.outermost))
    path = ".".join(spelled(step) for step in steps if step not in not_in_file)
    match details["type"]:
        case "problems":
            for key, message in details["ctx"]["problems"]:
                yield ".".join(part for part in (path, key) if part), message
        case "union_tag_not_found" if steps[-1] == "speculative_config":
            named = "expected 'MTP' or the name of another plugin"
            yield f"{path}.decoding_type", f"required key is missing; {named}"
        case "extra_forbidden":
            owner, _ = _find(root, steps[:-1])
            refused = list(_key_problems(owner, str(steps[-1]), path, details["input"]))
            advice = _advice(owner, str(steps[-1]))
            is_list = is_short and advice.startswith("expected one of ")
            yield from refused or [(path, "unknown key" if is_list else f"unknown key; {advice}")]
        case "invalid_key":
            owner, _ = _find(root, steps[:-1])
            yield path, f"expected a key that is text; {_advice(owner, '')}"
        case "missing":
            yield path, f"required key is missing; expected {allowed(root, steps)}"
        case _:
            yield path, f"expected {allowed(root, steps)}, got {got(details['input'])}"


def _find(root: type[ConfigModel], steps: Sequence[Any]) -> tuple[type[ConfigModel], Any]:
    """Return the model that owns a path, and the annotation of the path's value."""
    tags = _tags(ConfigModel.outermost)
    owner: type[ConfigModel] = root
    annotation: Any = root
    for step in steps:
        if step in tags:
            model = next(_models_in(tags[step]), None)
            owner, annotation = (model, annotation) if model else (owner, tags[step])
        elif step in owner.model_fields:
            field = owner.model_fields[step]
            annotation = Annotated[field.annotation, field]
            owner = next(_models_in(annotation), owner)
        elif step != "[key]":
            # an item of a list or a mapping
            annotation = _item(annotation, is_key=steps[-1] == "[key]")
    return owner, annotation


@functools.cache
def _tags(model: type[ConfigModel]) -> Mapping[Any, Any]:
    """Return all tags of the unions in a model -> the annotation of each."""
    return dict(_tagged_in(model))


def _tagged_in(annotation: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        for field in annotation.model_fields.values():
            yield from _tagged_in(field.annotation)
    for argument in get_args(annotation):
        if isinstance(argument, Tag):
            yield argument.tag, annotation
        yield from _tagged_in(argument)


def _models_in(annotation: Any) -> Iterator[type[ConfigModel]]:
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
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


def _key_problems(owner: type[ConfigModel], key: str, path: str, value: Any) -> Iterator[Problem]:
    """Yield the problem of a TensorRT-LLM key whose value is not accepted."""
    host_key = owner.host_keys.get(key)
    if host_key is None or key in owner.renamed or host_key.accepts(value):
        return
    if isinstance(value, Mapping) and host_key.inside is not None:
        yield from ((f"{path}.{inner}", problem) for inner, problem in host_key.refused(value))
    else:
        yield path, host_key.sentence(value)


def _advice(owner: type[ConfigModel], key: str) -> str:
    """Suggest what to write instead of an unknown key."""
    if key in owner.renamed:
        return owner.renamed[key]
    sections = dict(reversed(list(_keys_with_section(ConfigModel.outermost))))
    if key in sections:
        return f"it belongs {f'under {sections[key]}' if sections[key] else 'at the top level'}"
    known = list(owner.model_fields)
    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}"


def _keys_with_section(model: type[ConfigModel], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield every key of the file with the path of its section, outermost first."""
    for name in model.model_fields:
        yield name, path
    for name, field in model.model_fields.items():
        inner = next(_models_in(field.annotation), None)
        if inner is not None:
            yield from _keys_with_section(inner, f"{path}.{name}" if path else name)
