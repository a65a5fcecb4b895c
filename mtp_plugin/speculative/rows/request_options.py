"""Options of a request: keys with a prefix among the further arguments of an engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mtp_plugin.config.messages import spelled
from mtp_plugin.errors import PluginError, RequestError, format_value
from mtp_plugin.requests.options import OPTIONS
from mtp_plugin.requests.options.option import is_int
from mtp_plugin.speculative.rows.options import EngineSettings
from mtp_plugin.speculative.verification import custom_verifications
from mtp_plugin.verifications import codes, custom_codes, drafts_of

PREFIX = "mtp_"
_LIKE_PREFIX = re.compile("mtp[-_]", re.IGNORECASE)
"""A key that begins so is meant for the plugin."""


@dataclass(frozen=True)
class RequestOptions:
    """The plugin's options of one request; each is a key after the prefix ``mtp_``.

    Their ranges and defaults are those of the table of request options.
    """

    verification: str | None = OPTIONS["verification"].neutral
    """Verification method; unset: the engine's."""
    relaxed_topk: int | None = OPTIONS["relaxed_topk"].neutral
    relaxed_delta: float | None = OPTIONS["relaxed_delta"].neutral
    """Relaxed acceptance in the thinking phase; unset: the engine's."""
    speculate: bool = OPTIONS["speculate"].neutral
    """False (or 0): no draft is accepted."""
    max_draft_len: int | None = OPTIONS["max_draft_len"].neutral
    """Most drafts of a step that may be accepted; unset: K."""

    @property
    def draft_limit(self) -> int | None:
        """Most drafts of a step that may be accepted; None: K."""
        return self.max_draft_len if self.speculate else 0


_OPTIONS = {field.name: OPTIONS[field.name] for field in fields(RequestOptions)}


def read_request(given: Mapping[str, Any] | None, settings: EngineSettings) -> RequestOptions:
    """Return the options of a request; keys that begin otherwise are left alone.

    Raises:
        RequestError: lists every unknown key and impossible value.
    """
    if given is not None and not isinstance(given, Mapping):
        raise RequestError(f"expected a mapping, got {format_value(given)}")
    values = {
        str(key)[len(PREFIX) :]: value
        for key, value in (given or {}).items()
        if str(key).startswith(PREFIX)
    }
    values = {
        name: _OPTIONS[name].values.read(value) if name in _OPTIONS else value
        for name, value in values.items()
    }
    # arguments of some servers have no booleans
    if is_int(values.get("speculate")) and values["speculate"] in (0, 1):
        values["speculate"] = bool(values["speculate"])
    problems = [
        problem for name, value in values.items() for problem in _problems(name, value, settings)
    ]
    keys = map(str, given or ())
    problems += [
        _unknown(key) for key in keys if _LIKE_PREFIX.match(key) and not key.startswith(PREFIX)
    ]
    if problems:
        raise RequestError("; ".join(problems))
    if values.get("relaxed_delta") is not None:
        values["relaxed_delta"] = float(values["relaxed_delta"])
    return RequestOptions(**values)


def _unknown(key: str) -> str:
    known = ", ".join(f"{PREFIX}{known}" for known in _OPTIONS)
    return f"{spelled(key)}: unknown option of mtp_plugin; known ones are {known}"


def _problems(name: str, value: Any, settings: EngineSettings) -> list[str]:
    """Return why an option of a request is refused, in one line or none."""
    key, option = f"{PREFIX}{name}", _OPTIONS.get(name)
    if option is None:
        return [_unknown(key)]
    problem = option.problem(key, value)
    if problem is not None:
        return [problem]
    if value is None:
        return []
    if name == "verification":
        return method_problems(key, value, settings)
    if name in ("relaxed_topk", "relaxed_delta") and not settings.options.is_relaxed:
        return [
            f"{key}: relaxed acceptance needs {settings.options.option_prefix}thinking_begin_token "
            "and thinking_end_token"
        ]
    if name == "max_draft_len" and value > settings.num_drafts:
        return [
            f"{key}: expected at most {settings.options.draft_len_option} = "
            f"{settings.num_drafts}, got {format_value(value)}"
        ]
    return []


def method_problems(name: str, method: str, settings: EngineSettings) -> list[str]:
    """Return why a verification method cannot be used, in one line or none."""
    known = codes() | custom_codes()
    if method not in known:
        return [f"{name}: expected one of {', '.join(known)}, got {format_value(method)}"]
    # a worker that could not load it would end the engine
    problem = None if method in codes() else load_problem(method)
    if problem is not None:
        return [f"{name}: {problem}"]
    if settings.synthetic_rates is not None and method != "coupled":
        return [f"{name}: {method} cannot be combined with {settings.options.synthetic_option}"]
    reads_probs = "plain" in drafts_of(method)
    if reads_probs and settings.num_drafts and not settings.keeps_draft_probs:
        return [f"{name}: {method} {settings.options.no_draft_probs(settings.drafter)}"]
    return []


def load_problem(method: str) -> str | None:
    """Return why a method from outside the package cannot be loaded; None: it can."""
    try:
        custom_verifications()[method]
    except PluginError as error:
        return str(error)
    return None
