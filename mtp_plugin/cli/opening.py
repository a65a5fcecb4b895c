"""What commands begin with: a config or a checkpoint, and the import of what runs it."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mtp_plugin.errors import ConfigError
from mtp_plugin.tools.terminal.console import OutputConsole, progress

if TYPE_CHECKING:
    from mtp_plugin.config import LLMConfig


def import_engine(log: OutputConsole) -> None:
    """Import what runs models, and say that this is waited for."""
    if "mtp_plugin.executor" in sys.modules:
        return
    with progress(log) as tell:
        tell("importing torch and transformers")
        # a fifth of the time would go to Python's collector, now or when it runs again
        collects = gc.isenabled()
        gc.disable()
        try:
            import_module("mtp_plugin.executor")
            from mtp_plugin.executor.gc_freeze import of_process

            of_process.freeze_imports()
        finally:
            if collects:
                gc.enable()


@contextmanager
def errors_of(file: Path | None) -> Iterator[None]:
    """What is found wrong with a config later than when it is read names its file too."""
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
) -> LLMConfig:
    """Read a config, or take a checkpoint as it is; each warning is a line.

    Raises:
        ConfigError: the config cannot be.
        CheckpointError: it is a checkpoint alone, and cannot be asked for its MTP layers.
    """
    if file is None:
        if model is None:
            raise typer.BadParameter("expected --config FILE or --model DIR")
        if plugin_options is not None:
            raise typer.BadParameter("--plugin-options goes with --config alone")
        import_engine(log)
        from mtp_plugin.executor.requested_config import config_of_checkpoint

        return config_of_checkpoint(str(model), {}, log.write_line)
    from mtp_plugin.config import load_config

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = load_config(file, model=model, plugin_options=plugin_options)
    for warning in caught:
        log.write_line(f"warning: {warning.message}")
    return settings
