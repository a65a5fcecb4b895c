"""``mtp-plugin draft-vocab``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from mtp_plugin.errors import ConfigError
from mtp_plugin.requests.pacing import paced
from mtp_plugin.tools.terminal.console import messages, output, progress


def command(
    tokenizer: Annotated[
        Path,
        typer.Option("--tokenizer", metavar="DIR", help="Folder with tokenizer.json."),
    ],
    texts: Annotated[
        list[Path],
        typer.Option(
            "--texts",
            metavar="FILES",
            help='.txt, or .jsonl whose lines have "prompt", "text" or "messages".',
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="FILE",
            help="The JSON list is written there; .pt: the token map that SGLang reads.",
        ),
    ],
    size: Annotated[int, typer.Option("--size", metavar="N", min=1, help="Number of ids.")] = 32768,
    more_texts: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILES]", show_default=False)
    ] = None,
) -> None:
    """Count the token ids of your own text, and write those that drafts may have as a JSON list.

    The list is for draft_vocab, or for SGLang's --speculative-token-map with a name in .pt: the
    most frequent ids, and all special tokens of the tokenizer. The share of a held-out tenth of the
    text that it covers is printed, next to that of the lowest ids. Texts that your model has
    written count best. Files are streamed.
    """
    from mtp_plugin.tools.draft_vocab import count_draft_vocab, is_token_map, write_ids

    if not os.path.isdir(out.parent):
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    log = messages()
    with progress(log) as show_progress:
        report = show_progress if log.is_terminal else paced(show_progress)
        found = count_draft_vocab(tokenizer, [*texts, *(more_texts or ())], size, report)
    write_ids(found.ids, out)
    console = output()
    found.show(console)
    use = f"--speculative-token-map {out}" if is_token_map(out) else f'"draft_vocab": "{out}"'
    console.write_line(f"written to {out}, for {use}")
