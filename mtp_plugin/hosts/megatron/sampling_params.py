"""Megatron-Core's ``SamplingParams``."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from mtp_plugin.errors import RequestError, expect_int, format_value
from mtp_plugin.requests.options import OPTIONS
from mtp_plugin.requests.options.option import plain

_OPTIONS = {
    "num_tokens_to_generate": OPTIONS["max_new_tokens"],
    "num_tokens_total": OPTIONS["max_new_tokens"],
    "temperature": OPTIONS["temperature"],
    "top_k": OPTIONS["top_k"],
    "top_p": OPTIONS["top_p"],
    "top_n_logprobs": OPTIONS["logprobs"],
}
"""Parameter -> the option that has its range."""


@dataclass
class SamplingParams:
    """The options of one request, with the fields and defaults of Megatron-Core 0.19.2.

    ``top_k=0`` and ``top_p=0.0`` mean that the truncation is off: default parameters sample from
    the whole distribution. ``top_k=1`` is greedy.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    return_log_probs: bool = False
    skip_prompt_log_probs: bool = False
    return_segments: bool = False
    num_tokens_to_generate: int | None = None
    num_tokens_total: int | None = None
    termination_id: int | None = None
    top_n_logprobs: int = 0
    return_prompt_top_n_logprobs: bool = False  # deprecated: follows skip_prompt_log_probs
    add_BOS: bool = False  # noqa: N815 - Megatron's name
    stop_words: list[str] | None = None
    detokenize_stop_sequence: bool = False
    return_prompt_tokens: bool = False

    def __post_init__(self) -> None:
        self._sync_prompt_logprobs_fields()

    def _sync_prompt_logprobs_fields(self) -> None:
        expect_int("top_n_logprobs", self.top_n_logprobs, 0, error=RequestError)
        for name in ("return_prompt_top_n_logprobs", "skip_prompt_log_probs"):
            expect_flag(name, getattr(self, name))
        if self.return_prompt_top_n_logprobs:
            warnings.warn(
                "return_prompt_top_n_logprobs is deprecated, use skip_prompt_log_probs instead",
                DeprecationWarning,
                stacklevel=3,
            )
            if self.skip_prompt_log_probs:
                raise RequestError(
                    "return_prompt_top_n_logprobs: expected skip_prompt_log_probs=False with it"
                )
        self.return_prompt_top_n_logprobs = (
            self.top_n_logprobs > 0 and not self.skip_prompt_log_probs
        )

    def add_attributes(self, attribute_value_pair: Mapping[str, Any]) -> None:
        """Set further attributes; the embedded executor reads ``no_early_termination`` and
        ``no_detokenize_streaming_text`` in addition to the fields."""
        for key, value in attribute_value_pair.items():
            setattr(self, key, value)
        self._sync_prompt_logprobs_fields()

    def serialize(self) -> dict[str, Any]:
        """Return all attributes."""
        return vars(self).copy()

    @classmethod
    def deserialize(cls, data: Mapping[str, Any]) -> Self:
        """Return the parameters of a mapping that `serialize` made."""
        params = cls()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            params.add_attributes(data)
        return params


def expect_flag(name: str, value: Any) -> None:
    """Check that a value has a truth value, which a tensor of several elements has not.

    Raises:
        RequestError: it has none.
    """
    try:
        bool(value)
    except Exception as error:
        raise RequestError(f"{name}: expected True or False, got {format_value(value)}") from error


def range_problems(values: Mapping[str, Any], required: Collection[str]) -> list[str]:
    """Return what is wrong with parameters that have a range, in one line each.

    Args:
        required: those that may not be None.
    """
    problems = (
        _OPTIONS[name].problem(name, plain(value), is_required=name in required)
        for name, value in values.items()
    )
    return [problem for problem in problems if problem is not None]
