"""Options common to several commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mtp_plugin.requests.options import SamplingParams

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
        help="Checkpoint; overrides the one of the YAML file. Without a YAML file, its MTP layers "
        "are used for drafting.",
    ),
]
ModelArgument = Annotated[
    Path | None,
    typer.Argument(metavar="MODEL", help="Checkpoint; overrides the one of the YAML file."),
]
SameModel = Annotated[
    Path | None, typer.Option("--model", "-m", metavar="DIR", help="The same as MODEL.")
]
PluginOptions = Annotated[
    Path | None,
    typer.Option(
        "--plugin-options",
        metavar="FILE",
        help="YAML file with the keys of speculative_config.mtp.",
    ),
]

DraftLength = Annotated[
    int | None,
    typer.Option(
        "--k",
        metavar="K",
        min=1,
        help="Drafts per step. Default: the config's; without a YAML file the number of MTP "
        "layers, at most 3.",
    ),
]
NoMTP = Annotated[
    bool, typer.Option("--no-mtp", help="Decode without MTP; no MTP weights are needed.")
]

Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompt", "-p", metavar="TEXT", help="A prompt; may be given repeatedly."),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--prompt-file",
        metavar="FILE",
        help=".txt: one prompt; .json: a list of prompts; -: standard input.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="NAME", help="float32, bfloat16, float16 or auto."),
]
Device = Annotated[str | None, typer.Option("--device", metavar="NAME", help="cpu, cuda or auto.")]
Graphs = Annotated[
    bool | None, typer.Option("--graphs/--no-graphs", help="CUDA graphs. Default: the config's.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]

Temperature = Annotated[
    float | None,
    typer.Option("--temperature", metavar="T", help="Sampling temperature; 0 or unset: greedy."),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", metavar="N", help="Sample from the N most likely tokens."),
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", metavar="P", help="Nucleus sampling: cumulative probability."),
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", metavar="P", help="Minimum probability relative to the argmax."),
]


@dataclass(frozen=True, kw_only=True)
class RequestFlags:
    """The flags of ``generate`` that become `SamplingParams`."""

    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "-n",
            metavar="N",
            help="Maximum number of output tokens per prompt. Default: 128.",
        ),
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue after the model's EOS tokens.")
    ] = False
    temperature: Temperature = None
    top_k: TopK = None
    top_p: TopP = None
    min_p: MinP = None
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            help="Seed of sampling. Default: from the prompt's number. Random prompts depend on "
            "it, too.",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            "--repetition-penalty",
            metavar="R",
            help="Above 1: tokens of prompt and output get less likely.",
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        typer.Option(
            "--presence-penalty", metavar="X", help="Subtracted from the logits of output tokens."
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        typer.Option("--frequency-penalty", metavar="X", help="Subtracted for each occurrence."),
    ] = None
    min_tokens: Annotated[
        int | None,
        typer.Option("--min-tokens", metavar="N", help="Minimum number of output tokens."),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(
            "--stop", metavar="TEXT", help="Stop before this text; may be given repeatedly."
        ),
    ] = None
    thinking_token_budget: Annotated[
        int | None,
        typer.Option(
            "--thinking-token-budget",
            "--thinking-budget",
            metavar="N",
            help="Maximum number of thinking tokens; the end-of-thinking tag is forced after that.",
        ),
    ] = None
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            metavar="NAME=VALUE",
            help="Any other request option, with a YAML value: 'logit_bias={3: 1.5}', "
            "'bad_words=[[3, 4]]'; may be given repeatedly.",
        ),
    ] = None

    def params(self, max_new_tokens: int) -> SamplingParams:
        """Return the options of a request, with a default of ``max_new_tokens``.

        Raises:
            RequestError: an option is invalid.
        """
        from mtp_plugin.tools.terminal.request_options import sampling_params

        flags = {each.name: getattr(self, each.name) for each in fields(self)}
        others = flags.pop("option") or ()
        flags = {n: (tuple(v) or None) if isinstance(v, list) else v for n, v in flags.items()}
        return sampling_params(flags, others, presumed={"max_new_tokens": max_new_tokens})


def with_request_flags(command: Callable[..., None]) -> Any:
    """Replace a command's parameter ``request`` by the flags of `RequestFlags`."""
    flags = [
        each.replace(kind=Parameter.KEYWORD_ONLY)
        for each in signature(RequestFlags, eval_str=True).parameters.values()
    ]
    own = [
        each.replace(kind=Parameter.KEYWORD_ONLY)
        for each in signature(command, eval_str=True).parameters.values()
    ]
    place = next(n for n, each in enumerate(own) if each.name == "request")
    parameters = [*own[:place], *flags, *own[place + 1 :]]

    @wraps(command)
    def run(**values: Any) -> None:
        request = RequestFlags(**{each.name: values.pop(each.name) for each in flags})
        command(request=request, **values)

    run.__dict__["__signature__"] = Signature(parameters)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def draft_length(k: int | None, no_mtp: bool) -> int | None:
    """Return the requested drafts per step; 0: none, None: the default."""
    if k is not None and no_mtp:
        raise typer.BadParameter("--k and --no-mtp exclude each other")
    return 0 if no_mtp else k


def one_model(argument: Path | None, option: Path | None) -> Path | None:
    """Return the checkpoint that is given as MODEL or as --model, or both."""
    if argument is not None and option not in (None, argument):
        raise typer.BadParameter(f"expected one checkpoint, got {argument} and --model {option}")
    if argument is not None and argument.suffix in (".yaml", ".yml"):
        raise typer.BadParameter(f"{argument} is a config file; type: --config {argument}")
    return argument or option


def names(text: str | None, allowed: tuple[str, ...], option: str) -> tuple[str, ...]:
    names = tuple(text.split(",")) if text else ()
    odd = [name for name in names if name not in allowed]
    if odd:
        raise typer.BadParameter(
            f"expected {' or '.join(allowed)}, with commas between, got {odd[0]!r}",
            param_hint=option,
        )
    return names


def numbers(text: str | None, option: str, least: int = 1) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        numbers = (-1,)
    if any(number < least for number in numbers):
        raise typer.BadParameter(
            f"expected whole numbers above {least - 1} with commas between, got {text!r}",
            param_hint=option,
        )
    return numbers


def grid_of(given: list[str]) -> dict[str, tuple[int, ...] | tuple[str, ...]]:
    """Return the values of ``--grid`` by name: numbers of k and batch, names of dtype."""
    found: dict[str, tuple[int, ...] | tuple[str, ...]] = {}
    for text in given:
        name, _, values = text.partition("=")
        if name not in ("k", "batch", "dtype") or not values:
            raise typer.BadParameter(
                f"expected k=N,N or batch=N,N or dtype=NAME,NAME, got {text!r}", param_hint="--grid"
            )
        if name == "dtype":
            found[name] = names(values, ("auto", "float32", "bfloat16", "float16"), "--grid dtype")
        else:
            found[name] = numbers(values, f"--grid {name}", least=int(name == "batch"))
    return found
