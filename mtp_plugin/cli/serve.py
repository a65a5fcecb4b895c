"""``mtp-plugin serve``."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mtp_plugin.cli.flags import (
    ConfigFile,
    DraftLength,
    ModelArgument,
    NoMTP,
    PluginOptions,
    SameModel,
    draft_length,
    one_model,
)
from mtp_plugin.cli.opening import errors_of, import_engine, load
from mtp_plugin.errors import ConfigError, format_value
from mtp_plugin.extras import SERVE_PACKAGES, require
from mtp_plugin.tools.terminal.console import OutputConsole, messages, progress

API_KEY = "MTP_PLUGIN_API_KEY"


def command(
    model: ModelArgument = None,
    model_option: SameModel = None,
    config: ConfigFile = None,
    k: DraftLength = None,
    no_mtp: NoMTP = False,
    plugin_options: PluginOptions = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            metavar="N",
            help="Maximum length of prompt plus output, instead of the config's max_seq_len. "
            "Default: from the model.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="auto, bfloat16, float16 or float32, instead of the config's dtype.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--listen", "--host", metavar="ADDRESS", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port to listen on.")
    ] = 8000,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            "--served-model-name",
            metavar="NAME",
            help="Name of the model in requests. Default: the name of the checkpoint's folder, or "
            "of the folder around it if that is `checkpoint`.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            metavar="FILE",
            help=f"File with the API key that clients must send. Default: the variable {API_KEY}; "
            "without either, no key is needed.",
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            "--chat-template",
            metavar="FILE",
            help="Jinja template for conversations. Default: the tokenizer's.",
        ),
    ] = None,
    metrics_prefix: Annotated[
        str,
        typer.Option(
            "--metrics-prefix",
            metavar="NAME",
            help="Prefix of the names in /metrics; `vllm` gives vLLM's names.",
        ),
    ] = "mtp_plugin",
    max_queued: Annotated[
        int,
        typer.Option(
            "--max-queued",
            metavar="N",
            min=1,
            help="Maximum number of unfinished sequences; requests above it get HTTP 429.",
        ),
    ] = 1024,
    drain_seconds: Annotated[
        float,
        typer.Option(
            "--drain-seconds",
            metavar="S",
            min=0,
            help="Time that a shutdown waits for running requests before it aborts them.",
        ),
    ] = 30.0,
) -> None:
    """Serve a checkpoint over HTTP with OpenAI's API.

    The endpoints are /v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize,
    /health, /version and /metrics; / is a page to try it. Exit code 2: a named error.
    """
    require("mtp-plugin serve", *SERVE_PACKAGES, extra="serve")
    model = one_model(model, model_option)
    if model is None and config is None:
        raise typer.BadParameter("expected MODEL, --model DIR or --config FILE")
    api_key = _read_api_key(api_key_file)
    template = None if chat_template is None else _read("--chat-template", chat_template)
    prefix = _read_prefix(metrics_prefix)
    log = messages()
    given = {"max_seq_len": max_model_len, "dtype": dtype}
    overrides = {key: value for key, value in given.items() if value is not None}
    draft_len = draft_length(k, no_mtp)
    settings = load(config, log, model, plugin_options, draft_len=draft_len, overrides=overrides)
    with errors_of(config):
        import_engine(log)
        from mtp_plugin.hosts.embedded import LLM
        from mtp_plugin.serving import ServerSettings, bind, serve

        server = ServerSettings(
            model_name=served_model_name or _name_of(Path(settings.model).resolve()),
            host=host,
            port=port,
            api_key=api_key,
            chat_template=template,
            metrics_prefix=prefix,
            max_queued=max_queued,
            drain_seconds=drain_seconds,
        )
        with bind(server) as reserved:
            with progress(log) as show_progress:
                llm = LLM(settings, on_progress=show_progress)
            with llm:
                llm.capture_when_idle()
                serve(llm, server, reserved, partial(_write_line, log))


def _name_of(folder: Path) -> str:
    named = folder.parent if folder.name == "checkpoint" else folder
    return named.name or folder.name


def _write_line(log: OutputConsole, line: str) -> None:
    with suppress(SystemExit):  # a closed log does not end the server
        log.write_line(line)


def _read_api_key(file: Path | None) -> str | None:
    if file is None:
        key, source = os.environ.get(API_KEY), f"the variable {API_KEY}"
    else:
        key, source = _read("--api-key-file", file).strip(), str(file)
    if key is not None and not (key.isascii() and key.isprintable() and key.strip()):
        raise ConfigError(f"API key in {source}: expected printable ASCII characters")
    return key


def _read(option: str, file: Path) -> str:
    from mtp_plugin.config.bounded import read_bounded

    try:
        return read_bounded(file).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError(f"{option} {file}: cannot be read: {reason}") from None


def _read_prefix(name: str) -> str:
    if not name.isidentifier() or not name.isascii():
        raise ConfigError(
            f"--metrics-prefix: expected a name such as vllm, got {format_value(name)}"
        )
    return f"{name}:"
