"""``mtp-plugin generate``."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Annotated

import typer

from mtp_plugin.cli.flags import (
    AsJson,
    ConfigFile,
    Device,
    DraftLength,
    Dtype,
    Graphs,
    ModelArgument,
    NoMTP,
    PluginOptions,
    PromptFile,
    Prompts,
    RequestFlags,
    SameModel,
    draft_length,
    grid_of,
    one_model,
    with_request_flags,
)
from mtp_plugin.cli.opening import engine_options, errors_of, finish, import_engine, load
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
    num_prompts: Annotated[
        int | None,
        typer.Option(
            "--num-prompts",
            metavar="N",
            min=1,
            max=100_000,
            help="The first N prompts; if there are fewer, also random excerpts of them, or random "
            "token ids if there are none.",
        ),
    ] = None,
    *,
    request: RequestFlags,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare/--no-compare",
            help="Also decode without MTP, to compare the speed and every output token, with its "
            "log-probabilities if requested.",
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
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="NAME=VALUES",
            help="Compare all combinations of k=0,3 and batch=1,8 and dtype=float32,bfloat16 in "
            "one table, without the texts; may be given repeatedly.",
        ),
    ] = None,
    tie_tolerance: Annotated[
        float,
        typer.Option(
            "--tie-tolerance",
            metavar="ULPS",
            help="bfloat16 and float16: logits this many units in the last place apart, at the "
            "higher one's magnitude, are a tie. In float32 only sampled tokens within the rounding "
            "of the noise are ties; 0: no ties.",
        ),
    ] = 4.0,
    dtype: Dtype = None,
    device: Device = None,
    graphs: Graphs = None,
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

    The reference decodes each prompt alone, without MTP and without the executor. In half precision
    a token may differ if two logits are equal up to rounding; such ties are counted.

    Exit code 1: the output differs from decoding without MTP, or cannot be written. 2: a named
    error.
    """
    from mtp_plugin.tools.terminal.prompts import read_prompts

    log = messages()
    model = one_model(model, model_option)
    draft_len, combinations = draft_length(k, no_mtp), grid_of(grid or [])
    if not tie_tolerance >= 0:
        raise typer.BadParameter(f"--tie-tolerance: expected at least 0 ulps, got {tie_tolerance}")
    if model is not None:
        Thread(target=_read_ahead, args=(Path(model),), daemon=True).start()
    choices: list[str] = []
    settings = load(
        config,
        log,
        model,
        plugin_options,
        choices.append,
        draft_len=draft_len,
        overrides=engine_options(dtype, device, graphs),
    )
    if model is None:
        Thread(target=_read_ahead, args=(Path(settings.model),), daemon=True).start()
    prompts = read_prompts(
        prompt or (),
        prompt_file,
        Path(settings.model),
        log.write_line,
        optional=num_prompts is not None,
    )
    params = request.params(max_new_tokens=128)
    with errors_of(config):
        import_engine(log)
        from mtp_plugin.tools.terminal.generating import Generation

        generation = Generation(
            prompts,
            params,
            log,
            None if as_json else output(),
            num_prompts,
            combinations,
            marks=marks,
            compare=compare,
            compare_drafts=compare_drafts,
            tie_ulps=tie_tolerance,
        )
        generation.run(settings, choices)
    finish(generation, as_json=as_json)


def _read_ahead(checkpoint: Path) -> None:
    """Have the system read the weights while Python imports modules; loading reports errors."""
    with suppress(OSError, ValueError, AttributeError):
        for file in filter(Path.is_file, checkpoint.glob("*.safetensors")):
            with file.open("rb") as weights:
                os.posix_fadvise(weights.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
