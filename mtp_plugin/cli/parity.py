"""``mtp-plugin parity``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtp_plugin.cli.flags import (
    AsJson,
    Device,
    Dtype,
    Graphs,
    PromptFile,
    Prompts,
    RequestFlags,
    names,
    numbers,
    with_request_flags,
)
from mtp_plugin.cli.opening import (
    engine_options,
    errors_of,
    finish,
    import_engine,
    load,
)
from mtp_plugin.tools.terminal.console import messages, progress


@with_request_flags
def command(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="YAML file.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", "-m", metavar="DIR", help="A checkpoint, instead of a YAML file."),
    ] = None,
    prompt: Prompts = None,
    prompt_file: PromptFile = None,
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
    request: RequestFlags,
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
    dtype: Dtype = None,
    device: Device = None,
    graphs: Graphs = None,
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
    as_json: AsJson = False,
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
    from mtp_plugin.tools.cells import EAGLE, VANILLA, make_grid
    from mtp_plugin.tools.terminal.prompts import prompts_for_comparison
    from mtp_plugin.tools.terminal.read_ahead import read_ahead

    if (config is None) == (model is None):
        raise typer.BadParameter("expected either --config or --model")
    # check these before slow imports
    workers = names(worker, (EAGLE, VANILLA), "--worker")
    ks, batch_sizes = numbers(k, "--k"), numbers(batch_size, "--batch-size")
    if tie_tolerance is not None and not tie_tolerance >= 0:
        raise typer.BadParameter(
            f"expected at least 0 ulps, got {tie_tolerance:g}", param_hint="--tie-tolerance"
        )
    params = request.params(max_new_tokens=64)

    log = messages()
    given = engine_options(dtype, device, graphs)
    if config is not None:
        settings = load(config, log, overrides=given)
    else:
        given |= {"model": str(model), "speculative_config": MTPDecodingConfig()}
        settings = LLMConfig.model_validate(given)
    make_grid(settings, None, workers, ks, batch_sizes)
    texts = prompts_for_comparison(prompt or (), prompt_file, Path(settings.model))

    read_ahead(settings.model)
    import_engine(log)
    from mtp_plugin.hosts.embedded.models import read_config
    from mtp_plugin.hosts.embedded.requested_config import default_drafting
    from mtp_plugin.tools.comparison import compare_grid
    from mtp_plugin.tools.parity import TIE_ULPS
    from mtp_plugin.tools.terminal.report import ComparisonReport

    choices: list[str] = []
    with errors_of(config):
        num_layers = read_config(settings.model).facts.num_mtp_layers
        if config is None and not ks and num_layers:
            drafting = default_drafting(settings, choices.append)
            settings = settings.model_copy(update={"speculative_config": drafting})
        cells = make_grid(settings, num_layers, workers, ks, batch_sizes)
    for choice in choices:
        log.write_line(choice)
    tie_ulps = TIE_ULPS if tie_tolerance is None else tie_tolerance
    with progress(log) as show_progress:
        compared = compare_grid(
            cells,
            texts,
            params,
            num_prompts=num_prompts,
            seed=request.seed or 0,
            tie_ulps=tie_ulps,
            on_progress=show_progress,
        )
    finish(ComparisonReport("parity", *compared, params, tie_ulps), as_json=as_json)
