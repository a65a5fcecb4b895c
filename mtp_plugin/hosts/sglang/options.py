"""Options of the plugin in SGLang: the environment variable ``MTP_PLUGIN_SGLANG``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mtp_plugin.config.bounded import read_text
from mtp_plugin.config.loading import parse_yaml
from mtp_plugin.config.messages import got, key_path, message_of, spelled
from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.hosts.sglang import VARIABLE
from mtp_plugin.speculative.rows.options import EngineSettings, RowOptions

_LONGEST = 2**20
"""Characters of all options; parsing takes seconds per MB."""
_SHOWN = 20
"""Unknown options that a message shows."""
DRAFTERS = ("EAGLE", "EAGLE3", "NEXTN")
"""Values of ``--speculative-algorithm`` that are served; SGLang reads NEXTN as EAGLE, with which
MTP layers draft."""


class SglangOptions(RowOptions):
    """Options of one engine."""

    logger: ClassVar[str] = "sglang.srt.mtp_plugin"
    option_prefix: ClassVar[str] = f"{VARIABLE}: "

    def no_draft_probs(self, drafter: str) -> str:
        """See `RowOptions.no_draft_probs`."""
        return (
            "is not served in SGLang yet with --speculative-algorithm "
            f"{drafter.upper()}: use coupled"
        )


def read_settings(server_args: Any, environment: Mapping[str, str] = os.environ) -> EngineSettings:
    """Return the settings of an engine.

    Args:
        server_args: SGLang's ``ServerArgs``, resolved.

    Raises:
        ConfigError: lists every wrong option.
    """
    options = read_options(environment)
    algorithm = server_args.speculative_algorithm
    if algorithm is None:
        return EngineSettings(options, 0, drafter="none")
    drafts = server_args.speculative_num_steps or 0
    return EngineSettings(options, drafts, drafter=algorithm.lower())


def read_options(environment: Mapping[str, str] = os.environ) -> SglangOptions:
    """Return the options that the variable gives.

    Raises:
        ConfigError: no mapping, or lists every wrong option.
    """
    text, source = environment.get(VARIABLE, "").strip(), VARIABLE
    if not text.startswith("{"):
        source = f"{VARIABLE}: {spelled(text)}"
        text = read_text(Path(text), source, "JSON, or a YAML or JSON file of options")
    expect(len(text) <= _LONGEST, ConfigError, f"{source}: expected at most {_LONGEST} characters")
    given = parse_yaml(text, source)
    if not isinstance(given, dict):
        raise ConfigError(
            f"{source}: expected a mapping of options ({{}} for the defaults), got {got(given)}; "
            "unset the variable to turn the plugin off"
        )
    known = SglangOptions.model_fields
    unknown = [spelled(str(key)) for key in given if key not in known]
    if unknown:
        raise ConfigError(
            f"{VARIABLE}: {', '.join(unknown[:_SHOWN])}: unknown option; known ones are "
            f"{', '.join(known)}"
        )
    try:
        return SglangOptions.model_validate(given)
    except ValidationError as error:
        raise ConfigError("; ".join(map(_problem, error.errors()))) from None


def _problem(details: ErrorDetails) -> str:
    return f"{VARIABLE}: {key_path(details['loc'])}: {message_of(details)}"
