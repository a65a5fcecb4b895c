"""Text to token ids, and what decodes them again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

from mtp_plugin.errors import MTPPluginError, RequestError, describe_error, format_value

SHOWN = 40
"""Characters of a text that messages show."""


def encode(tokenizer: Any, text: str, **options: bool) -> list[int]:
    """Token ids of a text; transformers says nothing of long ones, which admission knows better.

    Raises:
        MTPPluginError: the tokenizer raised something else, or gave no ids.
    """
    transformers = _transformers()
    if transformers is not None:
        base = transformers.PreTrainedTokenizerBase
        inherited = getattr(type(tokenizer), "encode", None) is base.encode
        if inherited and "encode" not in vars(tokenizer):
            options["verbose"] = False
    with named_failures(tokenizer, lambda: f"cannot encode {shortened(text)}"):
        ids = list(tokenizer.encode(text, **options))
    odd = [each for each in ids if not isinstance(each, int)]
    if odd:
        raise MTPPluginError(
            f"the tokenizer {type(tokenizer).__name__} gave no ids for {shortened(text)}: expected "
            f"integers, got {type(odd[0]).__name__}"
        )
    return ids


def decode(tokenizer: Any, ids: list[int], *, skip_special_tokens: bool) -> str:
    """Return the text of token ids.

    Raises:
        MTPPluginError: the tokenizer raised something else, or returned no text.
    """
    with named_failures(tokenizer, lambda: f"cannot decode {ids[:3]}"):
        text = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    if not isinstance(text, str):
        raise MTPPluginError(
            f"the tokenizer {type(tokenizer).__name__} gave no text for {ids[:3]}, but "
            f"{format_value(text)}"
        )
    return text


def stop_token(tokenizer: Any, stop: str, *, skip_special_tokens: bool) -> int | None:
    """Return the id of a stop string that is one special token; None: it is searched in the text.

    Args:
        skip_special_tokens: False: special tokens are text too.

    Raises:
        RequestError: it has special tokens and more, which is never in the text.
        MTPPluginError: the tokenizer raised something else, or returned no ids or no text.
    """
    ids = encode(tokenizer, stop, add_special_tokens=False)
    if not ids:
        return None
    shown = decode(tokenizer, ids, skip_special_tokens=skip_special_tokens)
    whole = decode(tokenizer, ids, skip_special_tokens=False) if skip_special_tokens else shown
    if shown == whole:  # white space of some tokenizers decodes to nothing
        return None
    if len(ids) == 1 and not shown:
        return ids[0]
    raise RequestError(
        "special tokens are no text: give one of them alone, their ids in stop_token_ids, or "
        "skip_special_tokens=False"
    )


def is_failure(error: BaseException) -> bool:
    """Whether an error is a tokenizer's own, panics of Hugging Face tokenizers included.

    Its PanicException derives from BaseException, as when a regular expression of the
    pre-tokenizer exceeds the limit of backtracking.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def named_failures(tokenizer: Any, what: Callable[[], str]) -> Iterator[None]:
    """Raise what a tokenizer raises as `MTPPluginError`, with ``what()`` as what it cannot do."""
    try:
        yield
    except MTPPluginError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        raise MTPPluginError(
            f"the tokenizer {type(tokenizer).__name__} {what()}: {describe_error(error)}"
        ) from error


def shortened(text: str) -> str:
    """A text for a message, as Python spells it."""
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")


class LongestToken:
    """How long a text of some tokens can be: each as long as the longest of the vocabulary.

    A large vocabulary takes a while to read, so that it is read again only where it has grown.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._read: tuple[int | None, int] | None = None

    def most_characters(self, num_tokens: int) -> int | None:
        """Return the maximum number of characters of ``num_tokens`` tokens; None: no vocabulary.

        Raises:
            MTPPluginError: the tokenizer raised something else.
        """
        vocab = getattr(self._tokenizer, "get_vocab", None)
        if vocab is None:
            return None
        with named_failures(self._tokenizer, lambda: "cannot return its vocabulary"):
            size = len(self._tokenizer) if isinstance(self._tokenizer, Sized) else None
            read = self._read
            if read is None or read[0] != size:
                self._read = read = (size, max(map(len, vocab()), default=1))
        return num_tokens * read[1]


def detokenizer_of(tokenizer: Any) -> Any:
    """What decodes for a tokenizer: its backend where its class adds nothing but time to that.

    A step decodes every token of every request, and transformers' own part of it takes several
    times as long as the backend's.
    """
    transformers = _transformers()
    if transformers is None:
        return tokenizer
    fast = transformers.PreTrainedTokenizerFast
    if not isinstance(tokenizer, fast) or tokenizer.clean_up_tokenization_spaces:
        return tokenizer
    kind = type(tokenizer)
    inherits = (
        kind.decode is transformers.PreTrainedTokenizerBase.decode
        and kind._decode is fast._decode
        and "decode" not in vars(tokenizer)
    )
    return tokenizer.backend_tokenizer if inherits else tokenizer


def _transformers() -> Any:
    """The package where it is loaded, as it is wherever a tokenizer is of its classes; or None."""
    return sys.modules.get("transformers")
