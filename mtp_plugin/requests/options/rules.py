"""Which values of the table exclude each other, and how long lists may be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mtp_plugin.errors import format_value
from mtp_plugin.requests.options.option import (
    GREEDY_BELOW,
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_BIAS_IDS,
    Option,
    Values,
)
from mtp_plugin.verifications import METHODS, codes, drafts_of, is_nameable

DRAFTS_OF_VERIFICATION: Mapping[str, tuple[str, ...]] = {
    name: METHODS[name].drafts for name in codes()
}
"""How drafts may be sampled for each method in this package; the first is the default."""

VERIFICATION = Values(
    f"one of {', '.join(codes())}, or the name of a registered method",
    lambda value: value is None or is_nameable(value),
)
"""Values of the option ``verification``."""


def is_greedy(values: Mapping[str, Any]) -> bool:
    """Whether options, by name, describe greedy decoding; None and missing are the same."""
    given = {name: values.get(name) for name in ("temperature", "top_k", "top_p", "min_p")}
    temperature = given["temperature"]
    is_cold = temperature is not None and temperature < GREEDY_BELOW
    if is_cold or given["top_k"] == 1 or given["top_p"] == 0:
        return True
    return all(value is None for value in given.values())


def problems_of(
    values: Mapping[str, Any], options: Mapping[str, Option], spelled: Mapping[str, str]
) -> list[str]:
    """Return what is wrong with values by name: out of range, too many, or excluding each other.

    Args:
        spelled: names of other engines under which options were given, by our name.
    """
    wrong = [name for name, option in options.items() if not option.values.allows(values[name])]
    sound = {**values, **{name: options[name].neutral for name in wrong}}
    return [
        *(
            f"{spelled.get(name, name)} must be {options[name].values.words}, got "
            f"{format_value(values[name])}"
            for name in wrong
        ),
        *_too_many(sound, spelled),
        *_not_together(sound, spelled),
    ]


def _too_many(values: Mapping[str, Any], spelled: Mapping[str, str]) -> Iterator[str]:
    """Yield a message per list that is longer than the limit."""
    words = len(values["bad_words"]) + len(values["bad_token_ids"])
    bias, bad = (spelled.get(name, name) for name in ("logit_bias", "bad_words"))
    for name, count, most in (
        (bias, len(values["logit_bias"] or ()), MAX_BIAS_IDS),
        (f"{bad} and bad_token_ids", words, MAX_BAD_WORDS),
    ):
        if count > most:
            yield f"{name}: at most {most} are served, got {count}"
    for word in values["bad_words"]:
        if isinstance(word, tuple) and len(word) > MAX_BAD_WORD_LEN:
            yield f"{bad}: at most {MAX_BAD_WORD_LEN} tokens of a word are served, got {len(word)}"


def _not_together(values: Mapping[str, Any], spelled: Mapping[str, str]) -> Iterator[str]:
    """Yield a message per pair of values that exclude each other."""
    least, most = values["min_tokens"], values["max_new_tokens"]
    if most is not None and least > most:
        name = spelled.get("max_new_tokens", "max_new_tokens")
        yield f"min_tokens {format_value(least)} is above {name} {format_value(most)}"
    for name in ("relaxed_topk", "relaxed_delta"):
        value = values[name]
        if value is not None and not is_greedy(values):
            yield f"{name}={format_value(value)} needs greedy decoding, and this request samples"
        if value is not None and not values["relaxed_acceptance"]:
            yield f"{name}={format_value(value)} contradicts relaxed_acceptance=False"
    verification, drafts = values["verification"], values["draft_sampling"]
    if verification is not None and drafts is not None:
        expected = drafts_of(verification)
        if drafts not in expected:
            yield (
                f"draft_sampling={drafts!r} cannot be verified by {verification!r}, expected one "
                f"of {', '.join(expected)}"
            )
    allowed = values["allowed_token_ids"]
    if allowed == ():
        yield "allowed_token_ids: names no id"
    elif allowed is not None:
        banned = {*values["bad_token_ids"]}
        banned.update(
            word[0] for word in values["bad_words"] if isinstance(word, tuple) and len(word) == 1
        )
        if banned.issuperset(allowed):
            bad = spelled.get("bad_words", "bad_words")
            yield f"allowed_token_ids: none is left without {bad} and bad_token_ids"
