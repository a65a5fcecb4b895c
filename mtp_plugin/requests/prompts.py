"""One prompt or many, with the options of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtp_plugin.errors import RequestError, format_value
from mtp_plugin.requests.options import MAX_RANGE, SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``."""

PlainPrompt = str | Sequence[int]
"""Text, or token ids."""

PROMPT_KEYS = ("prompt", "prompt_token_ids")


def place_of(number: int, count: int) -> str:
    """How messages call one of several prompts; ``number`` counts from 1."""
    return f"prompt {number} of {count}"


def is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is one prompt, not a sequence of them; a sequence of integers is one."""
    if isinstance(prompts, (str, Mapping)):
        return True
    return len(prompts) > 0 and all(isinstance(item, int) for item in prompts)


def prompts_of(prompts: Prompt | Sequence[Prompt]) -> list[PlainPrompt]:
    """Return one prompt or several as a list; a sequence of integers is one prompt.

    Raises:
        RequestError: neither text nor ids.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        return [_prompt_in(prompts, "prompts")]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(
            f"prompts: expected text or lists of token ids, got {type(prompts).__name__}"
        )
    _expect_short(prompts, "prompts")
    items = list(prompts)
    if is_one_prompt(prompts):
        return [items]  # type: ignore[list-item]
    for number, item in enumerate(items, 1):
        where = place_of(number, len(items))
        if isinstance(item, Mapping):
            items[number - 1] = _prompt_in(item, where)
        elif not isinstance(item, Sequence) or isinstance(item, bytes):
            raise RequestError(
                f"{where}: expected text or a list of token ids, got {type(item).__name__}"
            )
        else:
            _expect_short(item, where)
    return items  # type: ignore[return-value]


def _prompt_in(prompt: Mapping[str, Any], where: str) -> PlainPrompt:
    """Return the text or the ids of a mapping."""
    given = {name: value for name, value in prompt.items() if value is not None}
    unknown = [format_value(name) for name in given if name not in PROMPT_KEYS]
    if unknown:
        raise RequestError(f"{where}: expected {' or '.join(PROMPT_KEYS)}, got {unknown[0]}")
    if len(given) != 1:
        raise RequestError(
            f"{where}: expected either prompt (text) or prompt_token_ids (ids), got "
            f"{' and '.join(given) or 'neither'}"
        )
    ((name, value),) = given.items()
    is_ids = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if not (isinstance(value, str) if name == "prompt" else is_ids):
        expected = "text" if name == "prompt" else "a list of token ids"
        raise RequestError(f"{where}: {name}: expected {expected}, got {type(value).__name__}")
    _expect_short(value, f"{where}: {name}")
    return value  # type: ignore[no-any-return]


def _expect_short(prompt: Sequence[Any], where: str) -> None:
    """Refuse a ``range`` of more ids than any vocabulary has, before it is made a list."""
    if isinstance(prompt, range) and prompt[MAX_RANGE:]:
        raise RequestError(
            f"{where}: expected at most {MAX_RANGE} token ids, got {format_value(prompt)}"
        )


def params_of(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """The options of each prompt; None: the defaults, and one object: the same for all.

    Raises:
        RequestError: no options, or not as many as there are prompts.
    """
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if isinstance(sampling_params, Mapping) or not isinstance(sampling_params, Sequence):
        raise RequestError(
            f"sampling_params: expected SamplingParams, got {type(sampling_params).__name__}"
        )
    params = list(sampling_params)
    odd = [(n, p) for n, p in enumerate(params, 1) if not isinstance(p, SamplingParams)]
    if odd:
        raise RequestError(
            f"{place_of(odd[0][0], len(params))}: sampling_params: expected "
            f"SamplingParams, got {type(odd[0][1]).__name__}"
        )
    if len(params) != num_prompts:
        raise RequestError(f"{num_prompts} prompts, but {len(params)} sampling parameters")
    return params
