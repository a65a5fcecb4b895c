"""``mtp-plugin parity``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mtp_plugin.cli.flags import ParityRequest, names, numbers, with_flags_of
from mtp_plugin.cli.opening import errors_of, import_engine, load
from mtp_plugin.tools.terminal.console import INTERRUPTED, messages, output, progress


@with_flags_of(ParityRequest)
def command(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="YAML file.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", "-m", metavar="DIR", help="A checkpoint, instead of a YAML file."),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="A prompt; may be given repeatedly."),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt-file", metavar="FILE", help=".txt: one prompt; .json: a list."),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            "--num-prompts",
            metavar="N",
            min=1,
            max=100_000,
            help="Use the first N prompts; if there are fewer, also random excerpts of them.",
        ),
    ] = None,
    *,
    request: ParityRequest,
    worker: Annotated[
        str | None,
        typer.Option(
            "--worker", metavar="NAME,NAME", help="eagle, vanilla or both. Default: the config's."
        ),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(
            "--k",
            metavar="N,N",
            help="Draft lengths. Default: the config's; without a config file the number of MTP "
            "layers, at most 3.",
        ),
    ] = None,
    batch_size: Annotated[
        str | None,
        typer.Option(
            "--batch-size", metavar="N,N", help="Requests per step. Default: the config's."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="NAME", help="float32, bfloat16, float16 or auto."),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="cpu, cuda or auto.")
    ] = None,
    graphs: Annotated[
        bool | None,
        typer.Option("--graphs/--no-graphs", help="CUDA graphs. Default: the config's."),
    ] = None,
    tie_tolerance: Annotated[
        float | None,
        typer.Option(
            "--tie-tolerance",
            metavar="ULPS",
            help="bfloat16 and float16: logits this many units in the last place apart, at the "
            "higher one's magnitude, are a tie. Default: 4. In float32 only sampled tokens within "
            "the rounding of the noise are ties; 0: no ties.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
) -> None:
    """Compare the executor's output with MTP to non-speculative decoding, token by token.

    The reference decodes one request at a time without MTP and without the executor. Several
    workers, draft lengths and batch sizes run one after the other, each with all prompts. Without a
    prompt, prompts come from prompts.json in the parent folder of the checkpoint, or are random
    token ids.

    In half precision a token may differ if two logits are equal up to rounding. Such ties are
    counted and shown, and the reference continues from the executor's token. For sampled tokens,
    scores with their noise and distances from truncation thresholds are compared. Requested
    log-probabilities are compared, too.

    Exit code 1: a difference that is not a tie, or the output cannot be written. 2: a named error.
    """
    from mtp_plugin.config import LLMConfig, MTPDecodingConfig
    from mtp_plugin.tools.terminal import parity_options
    from mtp_plugin.tools.terminal.prompts import prompts_for_comparison
    from mtp_plugin.tools.terminal.read_ahead import read_ahead

    if (config is None) == (model is None):
        raise typer.BadParameter("expected either --config or --model")
    # check these before slow imports
    workers = names(worker, (parity_options.EAGLE, parity_options.VANILLA), "--worker")
    ks, batch_sizes = numbers(k, "--k"), numbers(batch_size, "--batch-size")
    if tie_tolerance is not None and not tie_tolerance >= 0:
        raise typer.BadParameter(
            f"expected at least 0 ulps, got {tie_tolerance:g}", param_hint="--tie-tolerance"
        )
    params = request.params(max_new_tokens=64)

    log = messages()
    if config is not None:
        settings = load(config, log)
    else:
        settings = LLMConfig(model=str(model), speculative_config=MTPDecodingConfig())
    settings = parity_options.on(settings, dtype=dtype, device=device, graphs=graphs)
    parity_options.check_combinations(settings, workers=workers, ks=ks, batch_sizes=batch_sizes)
    texts = prompts_for_comparison(prompt or (), prompt_file, Path(settings.model))

    read_ahead(settings.model)
    import_engine(log)
    from mtp_plugin.hosts.embedded.models import read_config
    from mtp_plugin.hosts.embedded.requested_config import default_drafting
    from mtp_plugin.tools.parity import TIE_ULPS
    from mtp_plugin.tools.terminal import parity
    from mtp_plugin.tools.terminal.parity_report import as_report, show_parity

    choices: list[str] = []
    with errors_of(config):
        num_layers = read_config(settings.model).facts.num_mtp_layers
        if config is None and not ks and num_layers:
            drafting = default_drafting(settings, choices.append)
            settings = settings.model_copy(update={"speculative_config": drafting})
        variants = parity.variants_of(
            settings,
            num_layers,
            workers=workers,
            ks=ks,
            batch_sizes=batch_sizes,
        )
    for choice in choices:
        log.write_line(choice)
    try:
        with progress(log) as show_progress:
            report = parity.run_parity(
                variants,
                texts,
                params,
                num_prompts=num_prompts,
                seed=request.seed or 0,
                tie_ulps=TIE_ULPS if tie_tolerance is None else tie_tolerance,
                on_progress=show_progress,
            )
    except KeyboardInterrupt:
        log.write_line("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    out = output()
    if as_json:
        out.write_line(json.dumps(as_report(report).as_dict(), indent=2))
    else:
        show_parity(report, out)
    raise typer.Exit(report.exit_code)
