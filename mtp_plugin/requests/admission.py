"""What a host's request asks for that greedy decoding with drafts does not give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_FLAGS = ("py_return_context_logits", "py_return_generation_logits", "py_return_log_probs")
_LISTS = (
    "bad_words_list",
    "py_bad_words_list",
    "embedding_bias",
    "py_embedding_bias",
    "py_logits_post_processors",
    "py_additional_outputs",
    "guided_decoding_params",
    "py_guided_decoding_params",
)
_DRAWS = ("temperature", "top_k", "top_p", "min_p", "top_p_decay")
"""Fields of TensorRT-LLM's sampling config that say how a token is drawn."""
_NO_NGRAM_LIMIT = 1 << 30
_NEUTRAL: dict[str, Callable[[float], bool]] = {
    "beam_width": lambda value: value == 1,
    "beam_width_array": lambda value: value == 1,
    "num_return_sequences": lambda value: value == 1,
    "min_length": lambda value: value <= 1,
    "repetition_penalty": lambda value: value == 1,
    "presence_penalty": lambda value: value == 0,
    "frequency_penalty": lambda value: value == 0,
    "no_repeat_ngram_size": lambda value: value <= 0 or value >= _NO_NGRAM_LIMIT,
}
"""Its other fields, and which values change nothing."""


def unsupported_options(request: Any, *, always_greedy: bool = False) -> list[str]:
    """Every option of a request, as TensorRT-LLM holds it, that would change its output.

    A temperature of 0, a top-k of 1, a top-p of 0, or none of these and no min-p: decoding is
    greedy, and how a token would be drawn does not matter.

    Args:
        request: with ``sampling_config``, whose fields are numbers, lists of one or None, and with
            fields of its own; one that is not there asks for nothing.
        always_greedy: how a token would be drawn never matters.

    Returns:
        ``name`` or ``name=value``, in a fixed order.
    """
    config = getattr(request, "sampling_config", None)
    values = {name: _first(getattr(config, name, None)) for name in (*_DRAWS, *_NEUTRAL)}
    given = {name: value for name, value in values.items() if value is not None}
    if given.get("min_p") == 0:
        del given["min_p"]  # off
    beams = getattr(request, "py_beam_width", None)
    if beams is not None:
        given.setdefault("beam_width", beams)
    found = [name for name in _FLAGS if getattr(request, name, False)]
    found += [name for name in _LISTS if _is_there(getattr(request, name, None))]
    drawn = {name: given.get(name) for name in ("temperature", "top_k", "top_p", "min_p")}
    if not (always_greedy or is_greedy(**drawn)):
        found += [f"{name}={given[name]}" for name in _DRAWS if name in given]
    found += [
        f"{name}={given[name]}"
        for name, changes_nothing in _NEUTRAL.items()
        if name in given and not changes_nothing(given[name])
    ]
    return found


def is_greedy(
    *, temperature: float | None, top_k: int | None, top_p: float | None, min_p: float | None
) -> bool:
    """Whether options describe greedy decoding; None: not given."""
    if temperature == 0 or top_k == 1 or top_p == 0:
        return True
    return all(value is None for value in (temperature, top_k, top_p, min_p))


def _first(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return value[0] if value else None
    return value


def _is_there(value: Any) -> bool:
    return value is not None and not (hasattr(value, "__len__") and len(value) == 0)
