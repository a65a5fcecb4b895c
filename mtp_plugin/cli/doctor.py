"""``mtp-plugin doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from mtp_plugin.cli.flags import ConfigFile, ModelFolder, PluginOptions
from mtp_plugin.cli.opening import import_engine, load
from mtp_plugin.errors import CheckpointError, ConfigError
from mtp_plugin.tools.terminal.console import messages, output


def command(
    config: ConfigFile = None,
    model: ModelFolder = None,
    plugin_options: PluginOptions = None,
    host: Annotated[  # noqa: ARG001 - asked before any package of the extra is imported
        str | None,
        typer.Option(
            "--host",
            metavar="ENGINE",
            help="tensorrt_llm: look at that engine alone; no other option goes with it.",
        ),
    ] = None,
) -> None:
    """Say, without loading weights, whether a config and its checkpoint will run.

    Exit code 1: they will not.
    """
    import_engine(messages())
    from mtp_plugin.config import LLMConfig
    from mtp_plugin.tools.terminal.doctor import Diagnosis, examine, show_diagnosis

    try:
        diagnosis = examine(load(config, messages(), model, plugin_options))
    except ConfigError as error:
        diagnosis = Diagnosis([("config", str(config or model))], str(error).splitlines())
    except CheckpointError:
        # it cannot be asked how to draft; what is wrong with it is told as with any other
        diagnosis = examine(LLMConfig(model=str(model)))
    show_diagnosis(diagnosis, output())
    raise typer.Exit(diagnosis.exit_code)
