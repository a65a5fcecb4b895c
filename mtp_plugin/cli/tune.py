"""``mtp-plugin tune``."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from mtp_plugin.cli.flags import (
    AsJson,
    ConfigFile,
    Device,
    Dtype,
    Graphs,
    MinP,
    PluginOptions,
    Prompts,
    Temperature,
    TopK,
    TopP,
    names,
    numbers,
)
from mtp_plugin.cli.opening import (
    engine_options,
    errors_of,
    finish,
    import_engine,
    load,
)
from mtp_plugin.errors import ConfigError, HostError, RequestError
from mtp_plugin.tools.terminal.console import messages, progress

OWN_OPTIONS = re.compile(
    r"(--model|--speculative-config|--spec-.+|-sc|--additional-config)([=.].*)?"
)


def command(
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", metavar="MODEL", help="As vLLM takes it; embedded: a folder."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", metavar="ENGINE", help="vllm or embedded.")
    ] = "vllm",
    prompt: Prompts = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            "--prompt-file",
            metavar="FILE",
            help='.jsonl whose lines have "prompt", "text" or "messages"; .json: a list; .txt, -: '
            "one prompt. Default: prompts.json in the parent folder of the checkpoint, or 8 "
            "general ones.",
        ),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option("--num-prompts", metavar="N", min=1, help="The first N are used.")
    ] = 64,
    batch_sizes: Annotated[
        str,
        typer.Option(
            "--batch-sizes", "--batch-size", metavar="N,N", help="Requests that run at once."
        ),
    ] = "1,8,64",
    k: Annotated[
        str | None,
        typer.Option(
            "--k",
            metavar="K,K",
            help="Drafts per step; 0 is always measured. Default: 0,1,2,3,5,7, up to one that is "
            "slower than fewer drafts at every batch size, or that of --config.",
        ),
    ] = None,
    k_max: Annotated[
        int | None,
        typer.Option("--k-max", metavar="K", min=1, help="All draft lengths from 0 to K."),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            metavar="NAME,NAME",
            help="coupled, rejection, block. With greedy requests all are the same.",
        ),
    ] = "coupled",
    drafter: Annotated[
        str,
        typer.Option(
            "--drafter",
            metavar="NAME[,MODEL]",
            help="mtp, draft_model, eagle, eagle3, dspark, dflash or ngram, with the draft model "
            "if it is not part of MODEL.",
        ),
    ] = "mtp",
    draft_vocab: Annotated[
        str,
        typer.Option(
            "--draft-vocab",
            metavar="X,X",
            help="none, a number of the lowest ids, or a file of ids, as mtp-plugin draft-vocab "
            "writes it.",
        ),
    ] = "none",
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", "-n", metavar="N", min=1, help="Tokens per request."),
    ] = 128,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Timed steps per batch size.")
    ] = 64,
    at_once: Annotated[
        int,
        typer.Option(
            "--at-once",
            metavar="N",
            min=1,
            help="Start so many engines at the same time, whose steps are timed in turns. They "
            "share the GPU: give vLLM --gpu-memory-utilization and --kv-cache-memory-bytes that "
            "fit, or --config a kv_cache_config.",
        ),
    ] = 1,
    logs: Annotated[
        Path | None,
        typer.Option("--logs", metavar="DIR", help="Keep the logs of the engines there."),
    ] = None,
    config: ConfigFile = None,
    plugin_options: PluginOptions = None,
    dtype: Dtype = None,
    device: Device = None,
    graphs: Graphs = None,
    as_json: AsJson = False,
    engine_arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGS]", help="Further options of vllm serve."),
    ] = None,
) -> None:
    """Find the draft length, verification method and draft vocabulary for a model, a GPU and your
    traffic, or that drafts should be off.

    Runs your prompts in vLLM engines with the plugin, one engine per draft length and draft
    vocabulary, then in vLLM without the plugin at the best draft length. Prints a table, what the
    plugin gains, and the options for vllm serve. With --host embedded, the executor of this package
    runs them; --config, --plugin-options, --dtype, --device and --graphs are for it alone, and the
    last lines are for its config. Step times are medians of steps in which all requests generate.
    Acceptance is counted up to the end of each output. A setting has numbers only if its outputs
    are identical to those of K = 0, near ties apart; rejection and block are compared with greedy
    requests. It is marked *, and not recommended, if its gain exceeds its tokens per step, as on a
    busy machine.

    Exit code 1: a setting has no numbers; the reason is printed. 2: a named error.
    """
    from mtp_plugin.hosts.vllm.options import DRAFTERS, drafter_config
    from mtp_plugin.requests.options import OPTIONS
    from mtp_plugin.tools.tune.answer import METHODS

    if host not in ("vllm", "embedded"):
        raise typer.BadParameter(f"expected vllm or embedded, got {host!r}", param_hint="--host")
    of_embedded = {
        "--config": config is not None,
        "--plugin-options": plugin_options is not None,
        "--dtype": dtype is not None,
        "--device": device is not None,
        "--graphs": graphs is not None,
    }
    of_vllm = {
        "--drafter": drafter != "mtp",
        "--logs": logs is not None,
        "-- ARGS": bool(engine_arguments),
    }
    for name, is_given in (of_embedded if host == "vllm" else of_vllm).items():
        if is_given:
            raise typer.BadParameter(f"{name} is not for --host {host}")
    if model is None and config is None:
        raise typer.BadParameter("expected --model MODEL")
    if k is not None and k_max is not None:
        raise typer.BadParameter("--k and --k-max exclude each other")
    sizes = tuple(sorted(set(numbers(batch_sizes, "--batch-sizes"))))
    chosen = names(methods, METHODS, "--methods")
    if not sizes or not chosen:
        raise typer.BadParameter("expected at least one batch size and one method")
    lengths: Sequence[int] = range(1, k_max + 1) if k_max else ()
    if not lengths and (k or config is None):
        lengths = numbers(k or "0,1,2,3,5,7", "--k", least=0)
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    sampling = {name: value for name, value in given.items() if value is not None}
    arguments = engine_arguments or []
    taken = [text for text in arguments if OWN_OPTIONS.fullmatch(text.replace("_", "-"))]
    if taken:
        raise typer.BadParameter(f"tune sets {taken[0]} itself; leave it out")
    vocabs = tuple(_vocab(text.strip()) for text in dict.fromkeys(draft_vocab.split(",")))
    name = drafter_config(drafter)["method"]
    if name != "mtp" and vocabs != (None,):
        raise typer.BadParameter(f"--draft-vocab needs the drafter mtp, got {name}: leave it out")
    if not DRAFTERS[name] and chosen != METHODS[:1]:
        raise typer.BadParameter(
            f"--methods: {name} has no draft probabilities, coupled alone can be measured"
        )
    for name, value in sampling.items():
        if problem := OPTIONS[name].problem(f"--{name.replace('_', '-')}", value):
            raise RequestError(problem)
    if host == "vllm" and find_spec("vllm") is None:
        raise HostError(
            "tune: vllm is not installed; run it in the environment of vLLM, or with --host "
            "embedded --model DIR"
        )
    from mtp_plugin.tools.tune.prompts import tune_prompts

    log = messages()
    embedded = None
    if host == "embedded":
        folder = None if model is None else Path(model)
        given = engine_options(dtype, device, graphs)
        settings = load(config, log, folder, plugin_options, log.write_line, overrides=given)
        model = settings.model
    found, source = tune_prompts(prompt or (), prompts, str(model), num_prompts)
    if host == "embedded":
        import_engine(log)
        from mtp_plugin.tools.tune.embedded import EmbeddedHost

        with errors_of(config):
            is_greedy = not temperature
            embedded = EmbeddedHost(settings, tuple(lengths), sizes[-1], is_greedy=is_greedy)
        lengths = embedded.num_drafts
    from mtp_plugin.tools.tune.report import TuneReport
    from mtp_plugin.tools.tune.run import TuneOptions, Tuning

    folder = logs or Path(tempfile.mkdtemp(prefix="mtp-plugin-tune-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--logs {folder}: cannot be made: {error.strerror}") from None
    options = TuneOptions(
        ("--model", str(model), *arguments),
        found,
        sizes,
        tuple(sorted(set(lengths))),
        tuple(dict.fromkeys(chosen)),
        vocabs,
        sampling,
        max_new_tokens,
        steps,
        at_once,
        folder,
        drafter,
        embedded,
        stops_early=not (k or k_max),
    )
    if options.is_greedy and chosen != METHODS[:1]:
        log.write_line("greedy requests: all methods are the same, coupled is measured")
    keeps_logs = logs is not None
    try:
        with progress(log) as show_progress:
            tuning = Tuning(options, show_progress)
            tuning.run()
        report = TuneReport(tuning, source)
        keeps_logs = keeps_logs or (bool(report.exit_code) and embedded is None)
    finally:
        if not keeps_logs:
            shutil.rmtree(folder)
    try:
        finish(report, as_json=as_json)
    finally:
        if report.exit_code and embedded is None:
            log.write_line(f"logs of the engines: {folder}")


def _vocab(text: str) -> int | str | None:
    """Return a value of ``draft_vocab``; a wrong one would only be noticed by started engines."""
    if text == "none":
        return None
    value = int(text) if text.isdecimal() else text
    if not value:
        raise typer.BadParameter(
            f"expected none, a number above 0 or a file of ids, got {text!r}",
            param_hint="--draft-vocab",
        )
    from mtp_plugin.config.draft_vocab import resolve_draft_vocab

    resolve_draft_vocab(value, key="--draft-vocab")
    return value
