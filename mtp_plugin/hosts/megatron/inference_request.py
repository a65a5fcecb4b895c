"""Megatron-Core's ``InferenceRequest`` and ``Status``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

import torch
from typing_extensions import Self

from mtp_plugin.hosts.megatron.sampling_params import SamplingParams


class Status(Enum):
    """State of a request."""

    WAITING_IN_QUEUE = 1
    ACTIVE_AND_GENERATING_TOKENS = 2
    ACTIVE_BUT_NOT_GENERATING_TOKENS = 3
    COMPLETED = 4
    FAILED = 5


@dataclass(kw_only=True)
class InferenceRequest:
    """One request and its results, with the fields of Megatron-Core 0.19.2.

    Static batches also set ``text``: prompt and output.
    """

    request_id: int | str  # a text in static batches only
    prompt: str
    sampling_params: SamplingParams | None = None
    inference_parameters: SamplingParams | None = None  # older name of sampling_params
    prompt_tokens: list[int] | None = None
    prompt_length: int | None = None
    arrival_time: float | None = None
    status: Status | None = None
    encoder_prompt: str | None = None
    generated_text: str | None = None
    segments: list[str] | None = None
    generated_segments: list[str] | None = None
    generated_sequence_lengths: torch.Tensor | None = None
    generated_tokens: torch.Tensor | None = None
    prompt_log_probs: list[float] | None = None
    generated_log_probs: list[float] | None = None
    prompt_top_n_logprobs: list[dict[str, float]] | None = None
    generated_top_n_logprobs: list[dict[str, float]] | None = None
    generated_length: int | None = None
    tpot: list[float] = field(default_factory=list)  # seconds per output token

    def __post_init__(self) -> None:
        if self.sampling_params is None and self.inference_parameters is not None:
            warnings.warn(
                "inference_parameters is the older name of sampling_params",
                DeprecationWarning,
                stacklevel=3,
            )
            self.sampling_params = self.inference_parameters

    def serialize(self) -> dict[str, Any]:
        """Return all attributes, with tensors as ``("tensor", list)``."""
        values = vars(self).copy()
        values["status"] = self.status.name if self.status else None
        for name in ("sampling_params", "inference_parameters"):
            params = values[name]
            values[name] = None if params is None else params.serialize()
        return {
            name: ("tensor", value.tolist()) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }

    @classmethod
    def deserialize(cls, obj: Mapping[str, Any]) -> Self:
        """Return the request of a mapping that `serialize` made."""
        values = dict(obj)
        values["status"] = None if obj["status"] is None else Status[obj["status"]]
        for name in ("sampling_params", "inference_parameters"):
            params = values[name]
            values[name] = None if params is None else SamplingParams.deserialize(params)
        for name, value in values.items():
            if isinstance(value, (tuple, list)) and len(value) == 2 and value[0] == "tensor":
                values[name] = torch.tensor(value[1])
        own = {each.name for each in fields(cls)}
        request = cls(**{name: value for name, value in values.items() if name in own})
        vars(request).update(values)
        return request
