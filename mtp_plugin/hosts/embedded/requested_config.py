"""Reads the arguments of `LLM`: a checkpoint with options, a YAML file, a mapping or a config."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mtp_plugin.checkpoint.files import TOKENIZER_FILE, download_command
from mtp_plugin.config import (
    CudaGraphConfig,
    LLMConfig,
    MTPDecodingConfig,
    load_config,
    parse_config,
)
from mtp_plugin.errors import ConfigError, format_value
from mtp_plugin.hosts.embedded.models import LoadedModel, read_config
from mtp_plugin.hosts.embedded.models.tokenizer_files import read_tokenizer_of
from mtp_plugin.hosts.embedded.resolved_config import resolve_device

MAX_DEFAULT_DRAFT_LEN = 3
"""Maximum of the default draft length K."""

_SOURCES = "a checkpoint's folder, a YAML file, a mapping or an LLMConfig"


@dataclass(frozen=True)
class RequestedConfig:
    """Validated arguments of `LLM`."""

    config: LLMConfig
    model: LoadedModel | None
    """A loaded model to share; None: load the config's checkpoint."""
    file: str | None
    """The config's YAML file, for messages."""


def read_requested_config(
    config: LLMConfig | Mapping[str, Any] | str | Path | None,
    model: LoadedModel | str | Path | None,
    options: Mapping[str, Any],
    report: Callable[[str], None] | None,
) -> RequestedConfig:
    """Read the arguments of `LLM`.

    Args:
        config, model: arguments of `LLM`.
        options: keys of `LLMConfig`; only with a checkpoint's folder.
        report: called with a line for each default that `config_of_checkpoint` chooses; None: the
            lines go to standard error.

    Raises:
        ConfigError: missing, conflicting or invalid arguments.
        CheckpointError: the checkpoint's config cannot be read.
    """
    if report is not None and not callable(report):
        raise ConfigError(
            f"on_progress: expected a function of a line of text, got {format_value(report)}"
        )
    loaded = model if isinstance(model, LoadedModel) else None
    folder = model if isinstance(model, (str, Path)) else None
    if model is not None and loaded is None and folder is None:
        raise ConfigError(
            f"model: expected a checkpoint's folder or a LoadedModel, got {_kind(model)}"
        )
    if config is None and folder is None:
        extra = "" if loaded is None else " in addition to the loaded model"
        raise ConfigError(f"config: expected {_SOURCES}{extra}, got nothing")
    if config is None or (isinstance(config, (str, Path)) and is_folder(config)):
        if config is not None and folder is not None:
            raise ConfigError(f"model: expected one checkpoint's folder, got {config} and {folder}")
        path = folder if config is None else config
        read = config_of_checkpoint(str(path), options, report or _to_standard_error)
        return RequestedConfig(read, loaded, None)
    if isinstance(config, (str, Path)):
        _check_file(config)
        read, file = load_config(config, model=folder), str(config)
    else:
        read, file = _parsed(config, folder), None
    if options:
        raise ConfigError(
            f"{', '.join(options)}: expected in {_name_of(config)}; keyword options are accepted "
            f"with a checkpoint's folder only"
        )
    return RequestedConfig(read, loaded, file)


def config_of_checkpoint(
    path: str, options: Mapping[str, Any], report: Callable[[str], None]
) -> LLMConfig:
    """Return the config of a checkpoint's folder, with options named as in `LLMConfig`.

    The default ``speculative_config`` drafts with the first MTP layer (eagle). Its draft length is
    the number of MTP layers, at most `MAX_DEFAULT_DRAFT_LEN`, and such that a step of
    ``max_batch_size`` requests fits ``max_num_tokens``. The default ``cuda_graph_config`` of a GPU
    captures all batch sizes. ``report`` is called with a line about each of them.

    Raises:
        ConfigError: an invalid option.
        CheckpointError: the checkpoint's config cannot be read.
    """
    config = parse_config({"model": _expanded(path), **options}, "LLM")
    given = config.model_fields_set  # vLLM's enforce_eager gives cuda_graph_config
    chosen: dict[str, Any] = {}
    if "speculative_config" not in given:
        chosen["speculative_config"] = default_drafting(config, report)
    drafting = config.speculative_config
    # a drafter of another package need not support graphs
    is_ours = drafting is None or isinstance(drafting, MTPDecodingConfig)
    on_gpu = resolve_device(config.device).type == "cuda"
    if "cuda_graph_config" not in given and on_gpu and is_ours:
        report("cuda_graph_config: none given: steps run in CUDA graphs")
        chosen["cuda_graph_config"] = CudaGraphConfig(enable_padding=True)
    return config.model_validate({**dict(config), **chosen})


def default_drafting(config: LLMConfig, report: Callable[[str], None]) -> MTPDecodingConfig | None:
    """Return the default ``speculative_config`` of a checkpoint, see `config_of_checkpoint`.

    Raises:
        CheckpointError: the checkpoint's config cannot be read.
    """
    layers = read_config(config.model).facts.num_mtp_layers
    fitting = config.max_num_tokens // config.max_batch_size - 1
    draft_len = min(layers, MAX_DEFAULT_DRAFT_LEN, fitting)
    of_layers = f"{layers} MTP {'layer' if layers == 1 else 'layers'}"
    if layers == 0:
        report("speculative_config: none given, no MTP layers: decoding without drafts")
    elif draft_len == 0:
        report(
            f"speculative_config: none given, max_num_tokens {config.max_num_tokens} has no room "
            f"for drafts of {config.max_batch_size} requests: decoding without drafts"
        )
    else:
        report(
            f"speculative_config: none given, {of_layers}: drafting with max_draft_len "
            f"{draft_len} (eagle)"
        )
    return MTPDecodingConfig(max_draft_len=draft_len) if draft_len else None


def is_folder(path: str | Path) -> bool:
    """Whether a path is a folder (a checkpoint) and not a YAML file.

    Raises:
        ConfigError: the operating system refuses the path.
    """
    given = Path(_expanded(path))
    try:
        return given.is_dir()
    except OSError as error:
        raise ConfigError(f"{format_value(str(path))}: {error.strerror}") from None


def _expanded(path: str | Path) -> str:
    try:
        return str(Path(path).expanduser()) if str(path) else ""
    except RuntimeError as error:
        raise ConfigError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{format_value(str(path))}: {error.strerror}") from None


def _check_file(path: str | Path) -> None:
    """Refuse a path that neither exists nor has the suffix of a YAML file."""
    try:
        if Path(path).suffix.lower() in (".yaml", ".yml") or Path(path).exists():
            return
    except OSError as error:
        raise ConfigError(f"{format_value(str(path))}: {error.strerror}") from None
    command = download_command(path)
    advice = "" if command is None else "; download the model"
    raise ConfigError(
        f"{path}: expected a checkpoint's folder or a YAML file, there is neither (nothing is "
        f"fetched from a hub){advice}",
        command,
    )


def _parsed(config: LLMConfig | Mapping[str, Any], folder: str | Path | None) -> LLMConfig:
    update = {} if folder is None else {"model": _expanded(folder)}
    if isinstance(config, LLMConfig):
        return _validated({**vars(config), **update})
    if isinstance(config, Mapping):
        return parse_config({**config, **update})
    raise ConfigError(f"config: expected {_SOURCES}, got {_kind(config)}")


def _validated(values: Mapping[str, Any]) -> LLMConfig:
    """Validate the attributes of a config, since `model_construct` does not."""
    checked = {
        # a host engine may use a subclass of a section
        name: type(value).model_validate(
            value.model_dump(warnings=False), context={"source": f"LLMConfig: {name}"}
        )
        if isinstance(value, BaseModel)
        else value
        for name, value in values.items()
    }
    return parse_config(checked, "LLMConfig")


def _name_of(config: object) -> str:
    return str(config) if isinstance(config, (str, Path)) else f"the {_kind(config)}"


def _kind(value: object) -> str:
    return type(value).__name__


def load_requested_tokenizer(tokenizer: Any) -> Any:
    """Load the tokenizer if ``tokenizer`` is a folder's path; return anything else unchanged.

    Raises:
        ConfigError: the folder has no tokenizer.
        CheckpointError: the tokenizer cannot be loaded.
    """
    if not isinstance(tokenizer, (str, Path)):
        return tokenizer
    folder = Path(_expanded(tokenizer))
    try:
        exists = bool(str(tokenizer)) and (folder / TOKENIZER_FILE).is_file()
    except OSError:
        exists = False
    if not exists:
        raise ConfigError(
            f"tokenizer: expected a folder with {TOKENIZER_FILE}, "
            f"got {format_value(str(tokenizer))}"
        )
    return read_tokenizer_of(folder)


def _to_standard_error(line: str) -> None:
    if sys.stderr is not None:
        # a closed terminal must not stop the caller
        with suppress(OSError):
            sys.stderr.write(f"{line}\n")
