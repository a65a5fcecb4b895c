"""``mtp-plugin generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtp_plugin.cli.flags import (
    AsJson,
    ConfigFile,
    DraftLength,
    ModelArgument,
    NoMTP,
    PluginOptions,
    PromptFile,
    Prompts,
    RequestFlags,
    SameModel,
    draft_length,
    one_model,
    with_request_flags,
)
from mtp_plugin.cli.opening import errors_of, finish, import_engine, load
from mtp_plugin.tools.terminal.console import messages, output


@with_request_flags
def command(
    model: ModelArgument = None,
    model_option: SameModel = None,
    config: ConfigFile = None,
    plugin_options: PluginOptions = None,
    k: DraftLength = None,
    no_mtp: NoMTP = False,
    prompt: Prompts = None,
    prompt_file: PromptFile = None,
    *,
    request: RequestFlags,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare/--no-compare",
            help="Also decode without MTP, to compare the speed and every output token.",
        ),
    ] = True,
    compare_drafts: Annotated[
        bool,
        typer.Option(
            "--compare-drafts/--no-compare-drafts",
            help="Also decode the first four prompts with the same drafts but without the "
            "executor, to compare outputs and acceptance length.",
        ),
    ] = False,
    marks: Annotated[
        bool | None,
        typer.Option(
            "--marks/--no-marks",
            help="Put accepted drafts between « and » where the output has no colors. Default: "
            "only in a terminal.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Generate text and compare with decoding without MTP.

    All prompts run as one batch. The first unfinished output streams live, with accepted drafts in
    color; the others follow in order. Without a prompt, standard input is read if it is a pipe,
    else prompts.json in the parent directory of the checkpoint.

    Exit code 1: the output differs from decoding without MTP, or cannot be written. 2: a named
    error.
    """
    from mtp_plugin.tools.terminal.prompts import read_prompts
    from mtp_plugin.tools.terminal.read_ahead import read_ahead

    log = messages()
    model = one_model(model, model_option)
    draft_len = draft_length(k, no_mtp)
    if model is not None:
        read_ahead(model)
    choices: list[str] = []
    settings = load(config, log, model, plugin_options, choices.append, draft_len=draft_len)
    if model is None:
        read_ahead(settings.model)
    prompts = read_prompts(prompt or (), prompt_file, Path(settings.model), log.write_line)
    params = request.params(max_new_tokens=128)
    with errors_of(config):
        import_engine(log)
        from mtp_plugin.tools.terminal.generating import GenerateOptions, run_generate

        options = GenerateOptions(
            prompts, params, marks=marks, compare=compare, compare_drafts=compare_drafts
        )
        report = run_generate(settings, options, None if as_json else output(), log, choices)
    finish(report, as_json=as_json)
