"""``mtp-plugin bench``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mtp_plugin.cli.flags import ConfigFile, ModelFolder, PluginOptions, numbers
from mtp_plugin.cli.opening import errors_of, import_engine, load
from mtp_plugin.tools.terminal.console import INTERRUPTED, messages, output, progress


def command(
    config: ConfigFile = None,
    model: ModelFolder = None,
    plugin_options: PluginOptions = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="A prompt; may be given repeatedly."),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt-file", metavar="FILE", help=".txt: one prompt; .json: a list."),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", "-n", metavar="N", min=1, help="Tokens per request."),
    ] = 64,
    k: Annotated[
        int | None,
        typer.Option("--k", metavar="K", min=1, help="Draft length. Default: the config's."),
    ] = None,
    batch_size: Annotated[
        str, typer.Option("--batch-size", metavar="N,N", help="Batch sizes to measure.")
    ] = "1,8",
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="NAME", help="float32, bfloat16, float16 or auto."),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="cpu, cuda or auto.")
    ] = None,
    graphs: Annotated[
        bool | None,
        typer.Option(
            "--graphs/--no-graphs",
            help="CUDA graphs. Default: the config's; of a checkpoint alone, used on a GPU.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
) -> None:
    """Measure a checkpoint: tokens per second with and without MTP, and acceptance of drafts.

    Requests are greedy and generate the same number of tokens. Tokens per second include the
    prompts; they are medians of 3 runs that follow a warm-up run. Numbers are printed only if the
    output with MTP is identical to the output without it; in half precision, differences that
    rounding explains are counted as ties. Without a prompt, prompts come from prompts.json in the
    parent folder of the checkpoint, or are random token ids.

    Exit code 1: outputs differ, or the output cannot be written. 2: a named error.
    """
    from mtp_plugin.tools.terminal import parity_options
    from mtp_plugin.tools.terminal.prompts import prompts_for_comparison
    from mtp_plugin.tools.terminal.read_ahead import read_ahead

    batch_sizes = tuple(dict.fromkeys(numbers(batch_size, "--batch-size")))
    if not batch_sizes:
        raise typer.BadParameter("expected at least one size", param_hint="--batch-size")
    log = messages()
    choices: list[str] = []
    # with these options, the default use of graphs is neither chosen nor reported
    options = {"cuda_graph_config": None} if graphs is not None or device == "cpu" else {}
    settings = load(config, log, model, plugin_options, choices.append, options)
    texts = prompts_for_comparison(prompt or (), prompt_file, Path(settings.model))
    read_ahead(settings.model)
    import_engine(log)
    from mtp_plugin.hosts.embedded.models import read_config
    from mtp_plugin.tools.bench import run_bench, show

    out = output()
    try:
        with errors_of(config), progress(log) as show_progress:
            settings = parity_options.on(settings, dtype=dtype, device=device, graphs=graphs)
            (settings,) = parity_options.combinations(
                settings,
                read_config(settings.model).facts.num_mtp_layers,
                workers=(),
                ks=() if k is None else (k,),
                batch_sizes=(max(batch_sizes),),
            )
            for choice in choices:
                log.write_line(choice)
            report = run_bench(settings, texts, batch_sizes, max_new_tokens, show_progress)
    except KeyboardInterrupt:
        log.write_line("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        out.write_line(json.dumps(report.as_dict(), indent=2))
    else:
        show(report, out)
    raise typer.Exit(report.exit_code)
