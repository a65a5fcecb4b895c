"""Options of a request: keys of ``SamplingParams.extra_args`` (``vllm_xargs`` in the server)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mtp_plugin.errors import RequestError, one_line
from mtp_plugin.requests.columns import TopPMass
from mtp_plugin.requests.options import INT32_MAX
from mtp_plugin.requests.stopping import MAX_STOP_IDS, StopRule
from mtp_plugin.speculative.host import RequestFacts
from mtp_plugin.speculative.rows.options import EngineSettings
from mtp_plugin.speculative.rows.request_options import RequestOptions, read_request
from mtp_plugin.speculative.rows.request_slots import row_facts

_logger = logging.getLogger("vllm.mtp_plugin")
MAX_BIASED_TOKENS = 1024
"""Of a request; more of them would end vLLM's workers."""
PREFILL = "_mtp_plugin_prefill"
"""Attribute of vLLM's ``RequestState``: request state index -> ids of a new request's prefill."""


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
                    one_line(error),
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


def request_facts(params: Any, options: RequestOptions, prompt_len: int) -> RequestFacts:
    """Return what the modes read of a request of vLLM, which stops and masks requests by itself.

    Args:
        params: vLLM's ``SamplingParams``. options: read from it.
    """
    stop_ids = {int(token) for token in params.all_stop_token_ids}
    ends = stop_ids
    if params.ignore_eos:
        ends = stop_ids.intersection(map(int, params.stop_token_ids or ()))
    return row_facts(
        options,
        StopRule(
            max_length=INT32_MAX,
            prompt_len=prompt_len,
            # more ids than a slot holds cannot be masked by it either
            min_tokens=params.min_tokens if len(ends) <= MAX_STOP_IDS else 0,
            end_ids=tuple(sorted(ends)),
            ignored_ids=tuple(sorted(stop_ids - ends)),
        ),
        TopPMass.MIN_P,
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
    )
