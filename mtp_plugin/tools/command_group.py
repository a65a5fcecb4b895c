"""Groups of commands with fast and complete help, and one line at Ctrl-C."""

from __future__ import annotations

from typing import Any

import typer.core

from mtp_plugin.tools.terminal.console import INTERRUPTED, messages

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
