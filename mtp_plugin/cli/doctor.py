"""``mtp-plugin doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtp_plugin.cli.flags import (
    ConfigFile,
    DraftLength,
    ModelArgument,
    NoMTP,
    PluginOptions,
    SameModel,
    draft_length,
    one_model,
)
from mtp_plugin.cli.opening import import_engine, load
from mtp_plugin.errors import CheckpointError, ConfigError, shell_quote
from mtp_plugin.tools.terminal.console import messages, output


def command(
    model: ModelArgument = None,
    model_option: SameModel = None,
    config: ConfigFile = None,
    plugin_options: PluginOptions = None,
    k: DraftLength = None,
    no_mtp: NoMTP = False,
    host: Annotated[  # noqa: ARG001 - handled before any package of the extra is imported
        str | None,
        typer.Option(
            "--host",
            metavar="ENGINE",
            help="sglang, tensorrt_llm or vllm: check whether the installed engine is supported; "
            "with MODEL, also what it will do with the checkpoint; tensorrt_llm with --config: "
            "whether it serves the file. No other option is accepted.",
        ),
    ] = None,
) -> None:
    """Check whether a config and its checkpoint can run, without loading weights.

    `mtp-plugin doctor -- vllm serve ...`, and the same with sglang serve, python -m
    sglang.launch_server or docker run, says whether this command starts with the plugin, what is
    refused and what it lacks. Variables of the environment may come first; nothing is started.

    The last line is the command to type next. Exit code 1: there are problems.
    """
    model = one_model(model, model_option)
    import_engine(messages())
    from mtp_plugin.config import LLMConfig
    from mtp_plugin.tools.terminal.doctor import Diagnosis, examine, show_diagnosis

    choices: list[str] = []
    try:
        draft_len = draft_length(k, no_mtp)
        settings = load(
            config, messages(), model, plugin_options, choices.append, draft_len=draft_len
        )
        diagnosis = examine(settings)
    except ConfigError as error:
        diagnosis = Diagnosis([("config", str(config or model))])
        diagnosis.add_problem(error)
    except CheckpointError:
        # examine() reports the problems of the checkpoint
        diagnosis = examine(LLMConfig(model=str(model)))
    if not diagnosis.problems:
        for choice in choices:
            messages().write_line(choice)
    arguments = _arguments(config, model, plugin_options, k, no_mtp)
    show_diagnosis(diagnosis, output(), arguments)
    raise typer.Exit(diagnosis.exit_code)


def _arguments(
    config: Path | None,
    model: Path | None,
    plugin_options: Path | None,
    k: int | None,
    no_mtp: bool,
) -> str:
    """Return the options that were given, for the next command."""
    given = {"--config": config, "--model": model, "--plugin-options": plugin_options, "--k": k}
    words = [
        word
        for option, value in given.items()
        if value is not None
        for word in (option, str(value))
    ]
    return " ".join(map(shell_quote, [*words, *(["--no-mtp"] if no_mtp else [])]))
