"""The base class of config sections: frozen pydantic models that report errors by key path."""

from __future__ import annotations

import difflib
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails
from typing_extensions import Self, override

from mtp_plugin.config.host_keys import HostKey
from mtp_plugin.config.messages import got, key_path, message_of, problem
from mtp_plugin.errors import ConfigError, shell_quote

_logger = logging.getLogger("mtp_plugin")

# (dotted key path, message)
Problem = tuple[str, str]

MAX_PROBLEMS = 20
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


class ConfigModel(BaseModel):
    """A frozen config section, strict about types and keys.

    All problems of the values of a file are reported in one `ConfigError`, combinations of the
    keys of a section once its values are valid.
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
    """The model of the whole file, in which misplaced keys are looked up."""

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _config_error(type(self), error, type(self).__name__) from None

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
    def _check(
        cls, data: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        if not isinstance(data, Mapping):
            return handler(data)
        data = dict(data)
        cls._raise(list(cls._prepare(data, info)))
        model = handler(data)
        cls._raise(model._problems())
        return model

    @classmethod
    def _raise(cls, problems: Iterable[Problem]) -> None:
        errors = [
            InitErrorDetails(type=problem(text), loc=tuple(path.split(".")), input=None)
            for path, text in problems
        ]
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)

    @classmethod
    def _prepare(cls, data: dict[Any, Any], info: ValidationInfo) -> Iterator[Problem]:
        """Rewrite a mapping in place before its fields are validated, and yield its problems."""
        report_set_aside(cls, drop_host_keys(cls, data), info)
        for alias in [key for key in data if key in cls.aliases]:
            name, value = cls.aliases[alias], data.pop(alias)
            if value is not None and data.get(name) is None:
                data[name] = value
            elif value is not None and (data[name] != value or type(data[name]) is not type(value)):
                yield (
                    alias,
                    f"{got(value)} is {name} under another name, and {name}: {got(data[name])} is "
                    f"given as well",
                )

    def _problems(self) -> Iterator[Problem]:
        """Yield the problems of combinations of valid values."""
        return iter(())

    def ignored(self, *names: str, needs: str, path: str = "") -> Iterator[Problem]:
        """Yield the named options that differ from their default, as they have no effect."""
        for name in names:
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                yield f"{path}{name}", f"{got(value)} would be ignored; expected {needs} with it"


def drop_host_keys(model: type[ConfigModel], data: dict[Any, Any]) -> list[str]:
    """Remove other engines' keys without effect from a mapping, and return their names."""
    keys = model.host_keys
    names = [name for name, value in data.items() if name in keys and keys[name].accepts(value)]
    for name in names:
        del data[name]
    return names


def report_set_aside(model: type[ConfigModel], names: Sequence[str], info: ValidationInfo) -> None:
    """Log one line that names dropped keys, if any."""
    if names:
        source = (info.context or {}).get("source", model.__name__)
        _logger.warning("%s: set aside, as they change no output: %s", source, ", ".join(names))


def _config_error(model: type[ConfigModel], error: ValidationError, source: str) -> ConfigError:
    lines: list[str] = []
    rest = deque(error.errors(include_url=False))
    is_for_several_gpus = any(map(_needs_several_gpus, rest))
    while rest and len(lines) < MAX_PROBLEMS:
        found = _problems_of(model, rest.popleft())
        lines += [f"{source}: {key}: {text}" if key else f"{source}: {text}" for key, text in found]
    hidden = len(lines) - MAX_PROBLEMS + len(rest)
    if hidden > 0:
        lines[MAX_PROBLEMS:] = [f"{source}: and {hidden} more problems"]
    check = None
    if is_for_several_gpus:
        lines.append(
            f"{source}: this is for several GPUs: use `trtllm-serve` with this package's adapter, "
            "or vLLM with its plugin"
        )
        if Path(source).is_file():
            lines[-1] += "; check the file for TensorRT-LLM"
            check = f"mtp-plugin doctor --host tensorrt_llm --config {shell_quote(source)}"
    return ConfigError("\n".join(lines), next_command=check)


def _needs_several_gpus(details: ErrorDetails) -> bool:
    name, value = key_path(details["loc"][-1:]), details["input"]
    sizes = ("parallel_size", "tp_size", "dp_size", "pp_size", "ep_size")
    return name.endswith(sizes) and type(value) is int and value > 1


def _problems_of(root: type[ConfigModel], details: ErrorDetails) -> Iterator[Problem]:
    """Yield what pydantic found; for an unknown key, what to write instead."""
    location = details["loc"]
    path = key_path(location)
    if details["type"] != "extra_forbidden":
        yield path, message_of(details)
        return
    owner, name, value = _owner(root, location), str(location[-1]), details["input"]
    host_key = None if name in owner.renamed else owner.host_keys.get(name)
    if host_key is None or host_key.accepts(value):
        yield path, f"unknown key; {_advice(owner, name)}"
    elif isinstance(value, Mapping) and host_key.inside is not None:
        yield from ((f"{path}.{inner}", text) for inner, text in host_key.refused(value))
    else:
        yield path, host_key.message(value)


def _owner(model: type[ConfigModel], location: Sequence[int | str]) -> type[ConfigModel]:
    """Return the model to which the last key of a location belongs."""
    for step in location[:-1]:
        field = model.model_fields.get(str(step))
        if field is not None:
            model = next(_models_in(field.annotation), model)
    return model


def _models_in(annotation: Any) -> Iterator[type[ConfigModel]]:
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _advice(owner: type[ConfigModel], key: str) -> str:
    """Suggest what to write instead of an unknown key."""
    if key in owner.renamed:
        return owner.renamed[key]
    sections = dict(reversed(list(_keys_with_section(ConfigModel.outermost))))
    if key in sections:
        return f"it belongs {f'under {sections[key]}' if sections[key] else 'at the top level'}"
    known = list(owner.model_fields)
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    return f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}"


def _keys_with_section(model: type[ConfigModel], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield every key of the file with the path of its section, outermost first."""
    for name in model.model_fields:
        yield name, path
    for name, field in model.model_fields.items():
        inner = next(_models_in(field.annotation), None)
        if inner is not None:
            yield from _keys_with_section(inner, f"{path}.{name}" if path else name)
