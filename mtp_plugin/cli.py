"""The command line: ``mtp-plugin generate``, ``parity``, ``config``, ``doctor`` and ``bench``."""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtp_plugin.errors import CheckpointError, ConfigError
from mtp_plugin.tools.bench.cli import app as bench
from mtp_plugin.tools.command_group import CommandGroup
from mtp_plugin.tools.terminal.console import (
    INTERRUPTED,
    OutputConsole,
    messages,
    output,
    progress,
    run_to_the_end,
)

# torch and transformers take seconds to import, pydantic and yaml half the time of --help: each
# command imports what it needs
if TYPE_CHECKING:
    from mtp_plugin.config import LLMConfig

app = typer.Typer(
    name="mtp-plugin",
    help="Multi-token-prediction speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    cls=CommandGroup,
)
app.add_typer(bench)


def main() -> None:
    """Run the command line; named errors become one line each and exit code 2, as a full disk
    does with exit code 1."""
    run_to_the_end(app)


def _show_version(asked: bool) -> None:
    if asked:
        from mtp_plugin.tools.terminal.version import package_version

        output().write_line(f"mtp-plugin {package_version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="YAML file; see `mtp-plugin config`."),
]

ModelFolder = Annotated[
    Path | None,
    typer.Option(
        "--model",
        "-m",
        metavar="DIR",
        help="Checkpoint, before that of the YAML file or in place of one; then it drafts where it "
        "has MTP layers.",
    ),
]
PluginOptions = Annotated[
    Path | None,
    typer.Option(
        "--plugin-options", metavar="FILE", help="YAML file of what stands under mtp, beside it."
    ),
]

Temperature = Annotated[
    float | None,
    typer.Option("--temperature", metavar="T", help="Draw tokens; 0 or unset: greedy."),
]
TopK = Annotated[
    int | None, typer.Option("--top-k", metavar="N", help="Draw among the N most likely ids.")
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", metavar="P", help="Draw among the most likely ids of this share."),
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", metavar="P", help="Draw among ids this likely beside the first."),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        "--repetition-penalty", metavar="R", help="Above 1: ids of prompt and text are less likely."
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option("--presence-penalty", metavar="X", help="Off the logits of ids that stand."),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option("--frequency-penalty", metavar="X", help="Off, for every time that they stand."),
]
OtherOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help="Any other option of a request, the value as YAML has it: 'logit_bias={3: 1.5}', "
        "'bad_words=[[3, 4]]'; may be given repeatedly.",
    ),
]


@app.command()
def generate(
    config: ConfigFile = None,
    model: ModelFolder = None,
    plugin_options: PluginOptions = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="A prompt; may be given repeatedly."),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            "--prompt-file",
            metavar="FILE",
            help=".txt: one prompt; .json: a list of prompts; -: standard input.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "-n",
            metavar="N",
            help="Tokens per prompt at most. Default: 128.",
        ),
    ] = None,
    min_tokens: Annotated[
        int, typer.Option("--min-tokens", metavar="N", help="No end or stop before so many tokens.")
    ] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="End before this text; repeatable."),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not end at the model's end tokens.")
    ] = False,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", metavar="N", help="Of the draws. Default: of each prompt by its number."
        ),
    ] = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    option: OtherOptions = None,
    thinking_budget: Annotated[
        int | None,
        typer.Option(
            "--thinking-token-budget",
            "--thinking-budget",
            metavar="N",
            help="Tokens of thinking behind which its end is forced.",
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare/--no-compare",
            help="Also decode without MTP: for the speed, and token by token for the text.",
        ),
    ] = True,
    compare_drafts: Annotated[
        bool,
        typer.Option(
            "--compare-drafts/--no-compare-drafts",
            help="Also draft for the first prompts without the executor: for the tokens per step.",
        ),
    ] = False,
    marks: Annotated[
        bool,
        typer.Option(
            "--marks/--no-marks", help="Mark accepted drafts where the output has no colours."
        ),
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
) -> None:
    """Decode prompts and show what speculation did.

    All prompts run as one batch. The first unfinished text streams live, with accepted drafts
    marked; the others wait for their turn. Without a prompt, piped input is taken, else those of
    prompts.json in the folder around the checkpoint.

    Exit code 1: the text is not that of decoding without MTP, or the output cannot be written.
    2: a named error.
    """
    from mtp_plugin.tools.terminal.prompts import read_prompts
    from mtp_plugin.tools.terminal.read_ahead import read_ahead
    from mtp_plugin.tools.terminal.request_options import sampling_params

    log = messages()
    if model is not None:
        read_ahead(model)
    settings = _load(config, log, model, plugin_options)
    if model is None:
        read_ahead(settings.model)
    prompts = read_prompts(prompt or (), prompt_file, Path(settings.model), log.write_line)
    flags = {
        "max_new_tokens": max_new_tokens,
        "min_tokens": min_tokens,
        "stop": tuple(stop or ()),
        "ignore_eos": ignore_eos,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "thinking_token_budget": thinking_budget,
    }
    params = sampling_params(flags, option or (), presumed={"max_new_tokens": 128})
    out = output()
    try:
        with _errors_of(config):
            _import_engine(log)
            from mtp_plugin.tools.terminal.generating import Asked, run_generate

            asked = Asked(
                prompts, params, marks=marks, compare=compare, compare_drafts=compare_drafts
            )
            report = run_generate(settings, asked, None if as_json else out, log)
    except KeyboardInterrupt:
        log.write_line("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    from mtp_plugin.tools.terminal.report import report_document, show_report

    if as_json:
        out.write_line(json.dumps(report_document(report), indent=2))
    else:
        show_report(report, out)
    raise typer.Exit(report.exit_code)


def _import_engine(log: OutputConsole) -> None:
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
            from mtp_plugin.executor.collector_freeze import of_process

            of_process.freeze_imports()
        finally:
            if collects:
                gc.enable()


@app.command()
def parity(
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
            help="The first N prompts; where there are fewer, also random pieces of them.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "-n",
            metavar="N",
            help="Tokens per prompt at most. Default: 64.",
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not end at the model's end tokens.")
    ] = False,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            help="Of random prompts, and of the draws. Default: 0, and of each prompt by its "
            "number.",
        ),
    ] = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    option: OtherOptions = None,
    worker: Annotated[
        str | None,
        typer.Option(
            "--worker", metavar="NAME,NAME", help="eagle, vanilla or both. Default: the config's."
        ),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option("--k", metavar="N,N", help="Drafts per step. Default: the config's."),
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
        typer.Option("--graphs/--no-graphs", help="CUDA graphs. Default: as the config says."),
    ] = None,
    tie_tolerance: Annotated[
        float | None,
        typer.Option(
            "--tie-tolerance",
            metavar="ULPS",
            help="bfloat16 and float16: logits this many units in the last place apart, at the "
            "higher one's magnitude, are a tie. Default: 4. In float32 only draws are, as close as "
            "their noise is rounded; 0: nothing is.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
) -> None:
    """Compare what the executor emits with MTP, token for token, with target-only decoding.

    Target-only decoding is one request at a time, without MTP and through none of the executor.
    Several workers, draft lengths and batch sizes run one after the other, each over all prompts.
    Without a prompt those of prompts.json in the folder around the checkpoint are taken, else
    random ids.

    In half precision a token may differ where two logits are equal but for rounding: such ties are
    counted and shown, and target-only decoding goes on from the emitted token. Where tokens are
    drawn, what counts is the gap of scores with their noise, or the distance from a cut.
    Log-probabilities that are asked for are compared too.

    Exit code 1: a difference that is no tie, or the output cannot be written. 2: a named error.
    """
    from mtp_plugin.config import LLMConfig, MTPDecodingConfig
    from mtp_plugin.tools.terminal import parity_options
    from mtp_plugin.tools.terminal.prompts import prompts_for_comparison
    from mtp_plugin.tools.terminal.read_ahead import read_ahead
    from mtp_plugin.tools.terminal.request_options import sampling_params

    if (config is None) == (model is None):
        raise typer.BadParameter("expected either --config or --model")
    # what is wrong with these is told before anything is imported that takes seconds
    workers = _names(worker, (parity_options.EAGLE, parity_options.VANILLA), "--worker")
    ks, batch_sizes = _numbers(k, "--k"), _numbers(batch_size, "--batch-size")
    if tie_tolerance is not None and not tie_tolerance >= 0:
        raise typer.BadParameter(
            f"expected at least 0 ulps, got {tie_tolerance:g}", param_hint="--tie-tolerance"
        )
    flags = {
        "max_new_tokens": max_new_tokens,
        "ignore_eos": ignore_eos,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
    }
    params = sampling_params(flags, option or (), presumed={"max_new_tokens": 64})

    log = messages()
    if config is not None:
        settings = _load(config, log)
    else:
        settings = LLMConfig(model=str(model), speculative_config=MTPDecodingConfig())
    settings = parity_options.on(settings, dtype=dtype, device=device, graphs=graphs)
    parity_options.check_combinations(settings, workers=workers, ks=ks, batch_sizes=batch_sizes)
    texts = prompts_for_comparison(prompt or (), prompt_file, Path(settings.model))

    read_ahead(settings.model)
    _import_engine(log)
    from mtp_plugin.executor.models import read_facts
    from mtp_plugin.tools.parity import TIE_ULPS
    from mtp_plugin.tools.terminal import parity as room
    from mtp_plugin.tools.terminal.parity_report import parity_document, show_parity

    with _errors_of(config):
        variants = room.variants_of(
            settings,
            read_facts(settings.model).num_mtp_layers,
            workers=workers,
            ks=ks,
            batch_sizes=batch_sizes,
        )
    try:
        with progress(log) as tell:
            report = room.run_parity(
                variants,
                texts,
                params,
                num_prompts=num_prompts,
                seed=0 if seed is None else seed,
                tie_ulps=TIE_ULPS if tie_tolerance is None else tie_tolerance,
                on_progress=tell,
            )
    except KeyboardInterrupt:
        log.write_line("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    out = output()
    if as_json:
        out.write_line(json.dumps(parity_document(report), indent=2))
    else:
        show_parity(report, out)
    raise typer.Exit(report.exit_code)


def _names(text: str | None, allowed: tuple[str, ...], option: str) -> tuple[str, ...]:
    names = tuple(text.split(",")) if text else ()
    odd = [name for name in names if name not in allowed]
    if odd:
        raise typer.BadParameter(
            f"expected {' or '.join(allowed)}, with commas between, got {odd[0]!r}",
            param_hint=option,
        )
    return names


def _numbers(text: str | None, option: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        numbers = (0,)
    if any(number < 1 for number in numbers):
        raise typer.BadParameter(
            f"expected whole numbers above 0 with commas between, got {text!r}", param_hint=option
        )
    return numbers


@app.command("config")
def show_config(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="YAML file.")] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of the file instead.")
    ] = False,
) -> None:
    """Check a YAML file and print it with every default filled in, or print the schema."""
    if schema == (file is not None):
        raise typer.BadParameter("expected either FILE or --schema")
    import yaml

    from mtp_plugin.config import json_schema

    if file is None:
        output().write_line(json.dumps(json_schema(), indent=2))
        return
    log = messages()
    settings = _load(file, log)
    if settings.speculative_config is not None:
        from mtp_plugin.executor.models import read_facts

        try:
            with _errors_of(file):
                settings = settings.resolve(read_facts(settings.model).num_mtp_layers)
        except CheckpointError as error:
            log.write_line(f"warning: draft length not looked up in the checkpoint: {error}")
    output().write(yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False))


@app.command()
def doctor(
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
    _import_engine(messages())
    from mtp_plugin.config import LLMConfig
    from mtp_plugin.tools.terminal.doctor import Diagnosis, examine, show_diagnosis

    try:
        diagnosis = examine(_load(config, messages(), model, plugin_options))
    except ConfigError as error:
        diagnosis = Diagnosis([("config", str(config or model))], str(error).splitlines())
    except CheckpointError:
        # it cannot be asked how to draft; what is wrong with it is told as with any other
        diagnosis = examine(LLMConfig(model=str(model)))
    show_diagnosis(diagnosis, output())
    raise typer.Exit(diagnosis.exit_code)


@contextmanager
def _errors_of(file: Path | None) -> Iterator[None]:
    """What is found wrong with a config later than when it is read names its file too."""
    try:
        yield
    except ConfigError as error:
        if file is None:
            raise
        raise ConfigError(f"{file}: {error}") from error


def _load(
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
        _import_engine(log)
        from mtp_plugin.executor.asked_config import config_of_checkpoint

        return config_of_checkpoint(str(model), {}, log.write_line)
    from mtp_plugin.config import load_config

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = load_config(file, model=model, plugin_options=plugin_options)
    for warning in caught:
        log.write_line(f"warning: {warning.message}")
    return settings


if __name__ == "__main__":
    main()
