"""Load a config or a checkpoint for a command, and import the executor."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import typer

from mtp_plugin.errors import ConfigError, one_line
from mtp_plugin.tools.terminal.console import INTERRUPTED, OutputConsole, output, progress

if TYPE_CHECKING:
    from mtp_plugin.config import LLMConfig


class ShownReport(Protocol):
    """Results of a command."""

    @property
    def exit_code(self) -> int: ...
    def as_dict(self) -> dict[str, Any]: ...
    def show(self, console: OutputConsole, /) -> None: ...


def finish(report: ShownReport, *, as_json: bool) -> NoReturn:
    """Print the results of a command, as one JSON document or as text, and exit."""
    out = output()
    if as_json:
        out.write_line(json.dumps(report.as_dict(), indent=2))
    else:
        report.show(out)
    raise typer.Exit(report.exit_code)


def engine_options(dtype: str | None, device: str | None, graphs: bool | None) -> dict[str, Any]:
    """Return the keys of `LLMConfig` that these flags set."""
    given: dict[str, Any] = {"dtype": dtype, "device": device}
    given = {name: value for name, value in given.items() if value is not None}
    if graphs is not None:
        given["cuda_graph_config"] = {"enable_padding": True} if graphs else None
    elif device == "cpu":
        given["cuda_graph_config"] = None
    return given


def import_engine(log: OutputConsole) -> None:
    """Import the executor and show that the import is in progress."""
    if "mtp_plugin.hosts.embedded.llm" in sys.modules:
        return
    with progress(log) as show_progress:
        show_progress("importing torch and transformers")
        # garbage collection would take a fifth of the time, now or at its next run
        collects = gc.isenabled()
        gc.disable()
        try:
            with _exit_at_interrupt(log):
                import_module("mtp_plugin.hosts.embedded.llm")
            from mtp_plugin.hosts.embedded.gc_freeze import of_process

            of_process.freeze_imports()
        finally:
            if collects:
                gc.enable()


@contextmanager
def _exit_at_interrupt(log: OutputConsole) -> Iterator[None]:
    """End the process at Ctrl-C: torch swallows any exception while it imports numpy."""

    def interrupted(*_: object) -> NoReturn:
        if log.is_terminal:
            log.show_cursor()
        os.write(2, b"\ninterrupted\n" if log.is_terminal else b"interrupted\n")
        os._exit(INTERRUPTED)

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def errors_of(file: Path | None) -> Iterator[None]:
    """Add the file name to errors that are found after the config was read."""
    try:
        yield
    except ConfigError as error:
        if file is None:
            raise
        raise ConfigError(f"{file}: {error}") from error


def load(
    file: Path | None,
    log: OutputConsole,
    model: Path | None = None,
    plugin_options: Path | None = None,
    report: Callable[[str], None] | None = None,
    *,
    draft_len: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> LLMConfig:
    """Read a config file, or derive a config from a checkpoint; each warning is one line.

    Args:
        report: receives the lines about defaults for a checkpoint without a config file; default:
            written to ``log``.
        draft_len: drafts per step instead of the config's; 0: decode without MTP.
        overrides: keys of `LLMConfig` with values instead of the config's.

    Raises:
        ConfigError: the config is invalid.
        CheckpointError: there is no config file, and the checkpoint's config cannot be read.
    """
    if file is None:
        if model is None:
            raise typer.BadParameter("expected --config FILE or --model DIR")
        if plugin_options is not None:
            raise typer.BadParameter("--plugin-options goes with --config alone")
        import_engine(log)
        from mtp_plugin.hosts.embedded.requested_config import config_of_checkpoint

        given = dict(overrides or {})
        if draft_len is not None:
            given["speculative_config"] = _drafting(draft_len)
        return config_of_checkpoint(str(model), given, report or log.write_line)
    from mtp_plugin.config import load_config

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = load_config(file, model=model, plugin_options=plugin_options)
    for warning in caught:
        log.write_line(f"warning: {one_line(warning.message)}")
    given = dict(overrides or {})
    if draft_len is not None:
        given["speculative_config"] = _drafting(draft_len, settings.speculative_config)
    if not given:
        return settings
    return settings.model_validate({**dict(settings), **given}, context={"source": str(file)})


def _drafting(draft_len: int, config: Any = None) -> dict[str, Any] | None:
    """Return a ``speculative_config`` of MTP with so many drafts; other keys are those given."""
    from mtp_plugin.config import MTPDecodingConfig

    if draft_len == 0:
        return None
    given = config.model_dump() if isinstance(config, MTPDecodingConfig) else {}
    changed = {"max_draft_len": draft_len, "draft_len_schedule": None}
    return {"decoding_type": "MTP", **given, **changed}
