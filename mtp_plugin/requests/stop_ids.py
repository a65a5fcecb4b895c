"""The ids that end a request, under the names that hosts have for them."""

from __future__ import annotations

from typing import Any

MAX_STOP_IDS = 16
"""P of ``stop_ids_pool``: stop ids kept per slot."""

NO_STOP = -1
"""Fills a row of stop ids behind the request's own."""

TOO_MANY_STOPS = -2
"""First in the row of a request with more ids than fit: its acceptance is strict."""


def stop_ids_of(request: Any) -> list[int]:
    """Its ``py_end_id`` or ``end_id``, its ``py_stop_ids``, and its stop words of one token, each
    id once: TensorRT-LLM's stop token ids come as such words."""
    listed = [getattr(request, "py_end_id", None), getattr(request, "end_id", None)]
    listed += getattr(request, "py_stop_ids", None) or ()
    words = stop_words(getattr(request, "py_stop_words_list", None))
    listed += [word[0] for word in words if len(word) == 1]
    return list(dict.fromkeys(int(token) for token in listed if token is not None and token >= 0))


def stop_words(listed: Any) -> list[list[int]]:
    """The words of ``py_stop_words_list``: TensorRT-LLM's pair of flat tokens and their running
    ends, equally long (-1 behind the last end), or a plain list of words."""
    if not listed:
        return []
    if len(listed) == 2 and len(listed[0]) == len(listed[1]):
        flat, ends = list(listed[0]), [end for end in listed[1] if end != -1]
        rising = all(a < b for a, b in zip([0, *ends], ends, strict=False))
        if ends and rising and ends[-1] <= len(flat):
            return [flat[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    return [list(word) for word in listed]
