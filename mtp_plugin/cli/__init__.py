"""The command line: ``mtp-plugin generate``, ``serve``, ``config``, ``doctor``, ``draft-vocab`` and
``tune``.

Each command is a file; its function's docstring is its help. torch and transformers take seconds to
import, pydantic and yaml half the time of ``--help``: each command imports what it needs.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
import typer.core

from mtp_plugin.cli import bench, config, doctor, draft_vocab, generate, parity, serve, tune
from mtp_plugin.tools.terminal.console import INTERRUPTED, messages, output, run_to_the_end
from mtp_plugin.version import __version__

WHOLE_SENTENCE = 1000
"""Characters of a command's summary in the help of its group: all of its first sentence."""


class CommandGroup(typer.core.TyperGroup):
    """A group with a fast default of ``--help``, unshortened help texts, and a line at Ctrl-C.

    Typer converts a default of None through pydantic, which takes half the time of ``--help``.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command; at Ctrl-C, print ``interrupted`` and exit with 130."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            messages().write_line("interrupted")
            raise typer.Exit(INTERRUPTED) from None

    def get_help_option(self, ctx: Any) -> Any:
        """Return the ``--help`` option with the default False; None if the group has none."""
        option: Any = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands with their whole first sentences, which click would shorten."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, command.get_short_help_str(WHOLE_SENTENCE))
            for name, command in commands
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


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
