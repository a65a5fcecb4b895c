"""What TensorRT-LLM's requests may ask for beside the table."""

from __future__ import annotations

from typing import Any

from mtp_plugin.requests.options.option import Option
from mtp_plugin.requests.options.values import ANYTHING


def _of_the_host(name: str, about: str, *host: str, **more: Any) -> Option:
    return Option(name, ANYTHING, about, host=host or (name,), **{"neutral": None, **more})


HOST_OPTIONS: tuple[Option, ...] = (
    _of_the_host(
        "py_return_context_logits", "the prompt's logits", host_neutral=lambda flag: not flag
    ),
    _of_the_host(
        "py_return_generation_logits", "the logits of the text", host_neutral=lambda flag: not flag
    ),
    _of_the_host("py_additional_outputs", "further outputs of the model"),
    _of_the_host("beam_width", "beams", "config.beam_width", "py_beam_width", neutral=1),
    _of_the_host(
        "beam_width_array",
        "beams per step",
        "config.beam_width_array",
        neutral=1,
        host_neutral=lambda widths: all(width == 1 for width in widths),
    ),
)
"""What TensorRT-LLM's requests may ask for and `SamplingParams` does not have."""
