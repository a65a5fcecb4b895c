"""``mtp-plugin config``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mtp_plugin.cli.opening import errors_of, load
from mtp_plugin.errors import CheckpointError, one_line
from mtp_plugin.tools.terminal.console import messages, output


def command(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="YAML file.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", "-m", metavar="DIR", help="Checkpoint; overrides the one of the YAML file."
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of the file instead.")
    ] = False,
) -> None:
    """Check a YAML file and print it with all defaults, or print its JSON schema."""
    if schema == (file is not None):
        raise typer.BadParameter("expected either FILE or --schema")
    if schema and model is not None:
        raise typer.BadParameter("--model goes with FILE alone")
    import yaml

    from mtp_plugin.config import json_schema

    if file is None:
        output().write_line(json.dumps(json_schema(), indent=2))
        return
    log = messages()
    settings = load(file, log, model)
    if settings.speculative_config is not None:
        from mtp_plugin.hosts.embedded.models import read_config

        try:
            with errors_of(file):
                settings = settings.resolve(read_config(settings.model).facts.num_mtp_layers)
        except CheckpointError as error:
            log.write_line(
                f"warning: draft length not looked up in the checkpoint: {one_line(error)}"
            )
    output().write(yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False))
