"""``mtp-plugin bench``, the old name of ``mtp-plugin tune --host embedded``."""

from __future__ import annotations

import shlex

import typer

from mtp_plugin.tools.terminal.console import messages

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def command(context: typer.Context) -> None:
    """Run `mtp-plugin tune --host embedded`, which replaces this command and takes its options."""
    from mtp_plugin import cli

    # the former defaults; options that are given follow and take precedence
    arguments = ["--host", "embedded", "--batch-sizes", "1,8", "-n", "64", *context.args]
    messages().write_line(f"bench is now: {shlex.join(['mtp-plugin', 'tune', *arguments])}")
    cli.app(["tune", *arguments])
