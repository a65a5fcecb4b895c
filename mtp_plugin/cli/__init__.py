"""The command line: ``mtp-plugin generate``, ``serve``, ``config``, ``doctor``, ``draft-vocab`` and
``tune``.

Each command is a file; its function's docstring is its help. torch and transformers take seconds to
import, pydantic and yaml half the time of ``--help``: each command imports what it needs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from mtp_plugin.cli import bench, config, doctor, draft_vocab, generate, parity, serve, tune
from mtp_plugin.tools.command_group import CommandGroup
from mtp_plugin.tools.terminal.console import output, run_to_the_end
from mtp_plugin.version import __version__

app = typer.Typer(
    name="mtp-plugin",
    help="Multi-token-prediction speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    cls=CommandGroup,
)
app.command("generate")(generate.command)
app.command("serve")(serve.command)
app.command("config")(config.command)
app.command("doctor")(doctor.command)
app.command("draft-vocab")(draft_vocab.command)
app.command("tune")(tune.command)
app.command("bench", hidden=True, context_settings=bench.CONTEXT)(bench.command)
app.command("parity", hidden=True, context_settings=bench.CONTEXT)(parity.command)


def main() -> None:
    """Run the command line; named errors become one line each and exit code 2, as a full disk
    does with exit code 1."""
    run_to_the_end(app)


def _show_version(requested: bool) -> None:
    if requested:
        output().write_line(f"mtp-plugin {__version__}")
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
