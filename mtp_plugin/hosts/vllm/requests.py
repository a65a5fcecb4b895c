"""Options of a request: keys of ``SamplingParams.extra_args`` (``vllm_xargs`` in the server)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mtp_plugin.config.messages import expected, got
from mtp_plugin.errors import PluginError, RequestError
from mtp_plugin.hosts.vllm.options import EngineSettings
from mtp_plugin.speculative.verification import custom_verifications
from mtp_plugin.verifications import codes, custom_codes, drafts_of

_logger = logging.getLogger("vllm.mtp_plugin")
PREFIX = "mtp_"


class RequestOptions(BaseModel):
    """The plugin's options of one request; each is a key after the prefix ``mtp_``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    verification: str | None = None
    """Verification method; unset: the engine's."""
    relaxed_topk: int | None = Field(default=None, ge=1)
    relaxed_delta: float | None = Field(default=None, ge=0.0, le=1.0)
    """Relaxed acceptance in the thinking phase; unset: the engine's."""
    speculate: bool = True
    """False (or 0): no draft is accepted."""
    max_draft_len: int | None = Field(default=None, ge=0)
    """Most drafts of a step that may be accepted; unset: K."""

    @property
    def draft_limit(self) -> int | None:
        """Most drafts of a step that may be accepted; None: K."""
        return self.max_draft_len if self.speculate else 0

    @field_validator("speculate", mode="before")
    @classmethod
    def _flag(cls, value: Any) -> Any:
        return bool(value) if type(value) is int and value in (0, 1) else value

    @field_validator("relaxed_delta", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        # a larger integer may not fit a float, and is refused as it is
        return float(value) if type(value) is int and abs(value) <= 1 else value


def read_request(extra_args: Mapping[str, Any] | None, settings: EngineSettings) -> RequestOptions:
    """Return the options of a request; keys without the prefix are left alone.

    Raises:
        RequestError: lists every unknown key and impossible value.
    """
    ours = {
        str(key)[len(PREFIX) :]: value
        for key, value in (extra_args or {}).items()
        if str(key).startswith(PREFIX)
    }
    if not ours:
        return RequestOptions()
    try:
        options = RequestOptions.model_validate(ours)
    except ValidationError as error:
        raise RequestError("; ".join(_problem(entry, ours) for entry in error.errors())) from None
    problems = _impossible(options, settings)
    if problems:
        raise RequestError("; ".join(problems))
    return options


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
        if settings.synthetic_rates is not None:
            _check_synthetic(params)
    except RequestError as error:
        from vllm.exceptions import VLLMValidationError

        # 0.32 answers to any other exception with HTTP 500, to ValueError too
        raise VLLMValidationError(str(error)) from None


def _impossible(options: RequestOptions, settings: EngineSettings) -> list[str]:
    problems = []
    method = options.verification
    if method is not None:
        problems += method_problems(f"{PREFIX}verification", method, settings)
    if not settings.options.is_relaxed:
        problems += [
            f"{PREFIX}{name}: relaxed acceptance needs additional_config.mtp_plugin."
            "thinking_begin_token and thinking_end_token"
            for name in ("relaxed_topk", "relaxed_delta")
            if getattr(options, name) is not None
        ]
    most = options.max_draft_len
    if most is not None and most > settings.num_drafts:
        problems.append(
            f"{PREFIX}max_draft_len: expected at most num_speculative_tokens = "
            f"{settings.num_drafts}, got {got(most)}"
        )
    return problems


def method_problems(name: str, method: str, settings: EngineSettings) -> list[str]:
    """Return why a verification method cannot be used, in one line or none."""
    known = codes() | custom_codes()
    if method not in known:
        return [f"{name}: expected one of {', '.join(known)}, got {got(method)}"]
    if method not in codes():
        try:  # a worker that could not load it would end the engine
            custom_verifications()[method]
        except PluginError as error:
            return [f"{name}: {error}"]
    if settings.synthetic_rates is not None and method != "coupled":
        return [f"{name}: {method} cannot be combined with rejection_sample_method 'synthetic'"]
    reads_probs = "plain" in drafts_of(method)
    if reads_probs and settings.num_drafts and not settings.keeps_draft_probs:
        return [
            f"{name}: {method} needs speculative_config.draft_sample_method 'probabilistic', with "
            "which the engine keeps the probabilities of drafts"
        ]
    return []


def _check_synthetic(params: Any) -> None:
    """Synthetic acceptance would accept drafts that these options forbid."""
    for name in ("structured_outputs", "bad_words", "allowed_token_ids"):
        if getattr(params, name, None):
            raise RequestError(
                f"{name}: not possible with rejection_sample_method 'synthetic', which accepts "
                "drafts whatever the model says"
            )


def _problem(entry: Any, given: Mapping[str, Any]) -> str:
    name = str(entry["loc"][0])
    field = RequestOptions.model_fields.get(name)
    if field is None:
        known = ", ".join(f"{PREFIX}{known}" for known in RequestOptions.model_fields)
        return f"{PREFIX}{name}: unknown option of mtp_plugin; known ones are {known}"
    wanted = expected(field.annotation, tuple(field.metadata))
    return f"{PREFIX}{name}: expected {wanted.removesuffix(' or null')}, got {got(given[name])}"
