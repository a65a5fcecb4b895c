"""Options common to several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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

Temperature = Annotated[
    float | None,
    typer.Option("--temperature", metavar="T", help="Sampling temperature; 0 or unset: greedy."),
]
TopK = Annotated[
    int | None, typer.Option("--top-k", metavar="N", help="Sample from the N most likely tokens.")
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", metavar="P", help="Nucleus sampling: cumulative probability."),
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", metavar="P", help="Minimum probability relative to the argmax."),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        "--repetition-penalty",
        metavar="R",
        help="Above 1: tokens of prompt and output get less likely.",
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option(
        "--presence-penalty", metavar="X", help="Subtracted from the logits of output tokens."
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option("--frequency-penalty", metavar="X", help="Subtracted for each occurrence."),
]
OtherOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help="Any other request option, with a YAML value: 'logit_bias={3: 1.5}', "
        "'bad_words=[[3, 4]]'; may be given repeatedly.",
    ),
]


def draft_length(k: int | None, no_mtp: bool) -> int | None:
    """Return the requested drafts per step; 0: none, None: the default."""
    if k is not None and no_mtp:
        raise typer.BadParameter("--k and --no-mtp exclude each other")
    return 0 if no_mtp else k


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
