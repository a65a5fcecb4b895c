"""``mtp-plugin parity``, the old name of ``mtp-plugin generate --compare-drafts``."""

from __future__ import annotations

import shlex

import typer

from mtp_plugin.tools.terminal.console import messages


def command(context: typer.Context) -> None:
    """Run `mtp-plugin generate --compare-drafts`, which replaces this command and takes its
    options: --k 1,3 and --batch-size 1,8 as --grid k=1,3 --grid batch=1,8."""
    from mtp_plugin import cli

    # the former defaults; options that are given follow and take precedence
    arguments = ["--compare-drafts", "-n", "64"]
    if not {"--prompt", "-p", "--prompt-file", "--num-prompts"} & {*context.args}:
        arguments += ["--num-prompts", "8"]
    grid, words = {"--k": "k", "--batch-size": "batch"}, iter(context.args)
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--worker":
            raise typer.BadParameter("give use_mtp_vanilla in a YAML file", param_hint="--worker")
        if name in grid:
            word = f"--grid={grid[name]}={value if equals else next(words, '')}"
        arguments.append(word)
    messages().write_line(f"parity is now: {shlex.join(['mtp-plugin', 'generate', *arguments])}")
    cli.app(["generate", *arguments])
