"""Groups of commands whose help is told without what checks options."""

from __future__ import annotations

from typing import Any

import typer.core


class CommandGroup(typer.core.TyperGroup):
    """A group that knows without a conversion that ``--help`` was not given.

    Typer converts what is None through pydantic, which takes half the time of a command's help.
    """

    def get_help_option(self, ctx: Any) -> Any:
        """The option, False where it is not given; None: the group has none."""
        option: Any = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option
