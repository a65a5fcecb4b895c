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
    host: Annotated[  # noqa: ARG001 - handled before any package of the extra is imported
        str | None,
        typer.Option(
            "--host",
            metavar="ENGINE",
            help="tensorrt_llm or vllm: only check whether the installed engine is supported; no "
            "other option is accepted with it.",
        ),
    ] = None,
) -> None:
    """Check whether a config and its checkpoint can run, without loading weights.

    Exit code 1: there are problems.
    """
    import_engine(messages())
    from mtp_plugin.config import LLMConfig
    from mtp_plugin.tools.terminal.doctor import Diagnosis, examine, show_diagnosis

    choices: list[str] = []
    try:
        diagnosis = examine(load(config, messages(), model, plugin_options, choices.append))
    except ConfigError as error:
        diagnosis = Diagnosis([("config", str(config or model))], str(error).splitlines())
    except CheckpointError:
        # examine() reports the problems of the checkpoint
        diagnosis = examine(LLMConfig(model=str(model)))
    if not diagnosis.problems:
        for choice in choices:
            messages().write_line(choice)
    show_diagnosis(diagnosis, output())
    raise typer.Exit(diagnosis.exit_code)
