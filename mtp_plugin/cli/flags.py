"""Flags that several commands take."""

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


def names(text: str | None, allowed: tuple[str, ...], option: str) -> tuple[str, ...]:
    names = tuple(text.split(",")) if text else ()
    odd = [name for name in names if name not in allowed]
    if odd:
        raise typer.BadParameter(
            f"expected {' or '.join(allowed)}, with commas between, got {odd[0]!r}",
            param_hint=option,
        )
    return names


def numbers(text: str | None, option: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        numbers = (0,)
    if any(number < 1 for number in numbers):
        raise typer.BadParameter(
            f"expected whole numbers above 0 with commas between, got {text!r}", param_hint=option
        )
    return numbers
