"""Options of a request: keys of ``SamplingParams.extra_args`` (``vllm_xargs`` in the server)."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mtp_plugin.errors import PluginError, RequestError, format_value
from mtp_plugin.hosts.vllm.options import DRAFTERS, EngineSettings
from mtp_plugin.requests.options import OPTIONS
from mtp_plugin.requests.options.option import is_int
from mtp_plugin.speculative.verification import custom_verifications
from mtp_plugin.verifications import codes, custom_codes, drafts_of

_logger = logging.getLogger("vllm.mtp_plugin")
PREFIX = "mtp_"
_LIKE_PREFIX = re.compile("mtp[-_]", re.IGNORECASE)
"""A key that begins so is meant for the plugin."""
MAX_BIASED_TOKENS = 1024
"""Of a request; more of them would end vLLM's workers."""


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


def read_request(extra_args: Mapping[str, Any] | None, settings: EngineSettings) -> RequestOptions:
    """Return the options of a request; keys that begin otherwise are left alone.

    Raises:
        RequestError: lists every unknown key and impossible value.
    """
    values = {
        str(key)[len(PREFIX) :]: value
        for key, value in (extra_args or {}).items()
        if str(key).startswith(PREFIX)
    }
    values = {
        name: _OPTIONS[name].values.read(value) if name in _OPTIONS else value
        for name, value in values.items()
    }
    # the type of vllm_xargs has no booleans
    if is_int(values.get("speculate")) and values["speculate"] in (0, 1):
        values["speculate"] = bool(values["speculate"])
    problems = [
        problem for name, value in values.items() for problem in _problems(name, value, settings)
    ]
    keys = map(str, extra_args or ())
    problems += [
        _unknown(key) for key in keys if _LIKE_PREFIX.match(key) and not key.startswith(PREFIX)
    ]
    if problems:
        raise RequestError("; ".join(problems))
    if values.get("relaxed_delta") is not None:
        values["relaxed_delta"] = float(values["relaxed_delta"])
    return RequestOptions(**values)


class AdmittedOptions:
    """Reads the options of requests that are in the engine, where an error would end it.

    Every front end's requests are checked by the engine core before. Wrong options that come
    another way are logged once, and the request is served with the engine's defaults.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._has_logged = False

    def read(self, extra_args: Mapping[str, Any] | None) -> RequestOptions:
        """Return the options of a request, or the defaults; raises nothing."""
        try:
            return read_request(extra_args, self._settings)
        except RequestError as error:
            if not self._has_logged:
                self._has_logged = True
                _logger.warning(
                    "a request that was not checked has wrong options, which are left out, as in "
                    "later requests: %s",
                    error,
                )
            return RequestOptions()


def check_request(params: Any, settings: EngineSettings) -> None:
    """Check a request at admission.

    Args:
        params: vLLM's ``SamplingParams`` or ``PoolingParams``; None has no options.

    Raises:
        VLLMValidationError: wrong options; vLLM answers with HTTP 400.
    """
    try:
        try:
            read_request(getattr(params, "extra_args", None), settings)
        except RequestError as error:
            raise RequestError(f"extra_args: {error}") from None
        _check_bias(getattr(params, "logit_bias", None))
        if settings.synthetic_rates is not None:
            _check_synthetic(params)
    except RequestError as error:
        from vllm.exceptions import VLLMValidationError

        # 0.32 answers to any other exception with HTTP 500, to ValueError too
        raise VLLMValidationError(str(error)) from None


def _unknown(key: str) -> str:
    known = ", ".join(f"{PREFIX}{known}" for known in _OPTIONS)
    return f"{key}: unknown option of mtp_plugin; known ones are {known}"


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
            f"{key}: relaxed acceptance needs additional_config.mtp_plugin.thinking_begin_token "
            "and thinking_end_token"
        ]
    if name == "max_draft_len" and value > settings.num_drafts:
        return [
            f"{key}: expected at most num_speculative_tokens = {settings.num_drafts}, got "
            f"{format_value(value)}"
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
        return [f"{name}: {method} cannot be combined with rejection_sample_method 'synthetic'"]
    reads_probs = "plain" in drafts_of(method)
    if reads_probs and settings.num_drafts and not settings.keeps_draft_probs:
        if not DRAFTERS.get(settings.drafter, False):
            return [
                f"{name}: {method} needs the probabilities of drafts, which are not kept with "
                f"speculative_config.method {settings.drafter!r}: use coupled"
            ]
        return [
            f"{name}: {method} needs speculative_config.draft_sample_method 'probabilistic', with "
            "which the engine keeps the probabilities of drafts"
        ]
    return []


def load_problem(method: str) -> str | None:
    """Return why a method from outside the package cannot be loaded; None: it can."""
    try:
        custom_verifications()[method]
    except PluginError as error:
        return str(error)
    return None


def _check_bias(bias: Mapping[int, float] | None) -> None:
    if bias and len(bias) > MAX_BIASED_TOKENS:
        raise RequestError(
            f"logit_bias: expected at most {MAX_BIASED_TOKENS} tokens, got {len(bias)}"
        )


def _check_synthetic(params: Any) -> None:
    """Synthetic acceptance would accept drafts that these options forbid or make unlikely."""
    for name in ("structured_outputs", "bad_words", "allowed_token_ids", "min_p", "logit_bias"):
        if getattr(params, name, None):
            raise RequestError(
                f"{name}: not possible with rejection_sample_method 'synthetic', which accepts "
                "drafts whatever the model says"
            )
