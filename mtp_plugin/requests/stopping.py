"""Stop rule of a request, shared by samplers, admission and the masks on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from typing_extensions import Self

from mtp_plugin.errors import RequestError, describe_error, expect_int, format_value
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.requests.tokenizer import is_failure

SERVED_OPTIONS = frozenset(
    {
        "max_new_tokens",
        "stop_token_ids",
        "stop",
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
        "add_special_tokens",
        "detokenize",
    }
)
"""Options served by stop rule, tokenizer and detokenizer; ``min_tokens`` also needs masked
logits."""

MAX_STOP_IDS = 32
"""P: maximum number of stop ids in a slot (lanes of a warp). A request with more has no relaxed
acceptance and cannot use ``min_tokens``."""

MAX_STOP_STRINGS = 64
MAX_STOP_LEN = 1024
"""Maximum number of stop strings of a request, and of characters of each."""

NO_STOP = -1
"""Padding after the request's stop ids."""


class Ending(NamedTuple):
    """How many tokens of a step are kept, and why the request stops, if it does."""

    length: int  # tokens of the run
    reason: FinishReason | None = None  # None: it continues
    error: str | None = None  # why, where the reason is ERROR
    cause: BaseException | None = None  # what was raised there


class TextWatch(Protocol):
    """Receives every kept token in order and watches the decoded text for stop strings."""

    def __call__(self, token: int, *, from_draft: bool) -> bool:
        """Return whether this token completes a stop string.

        Raises:
            Exception: what a tokenizer raises; the request ends with an error.
        """


@dataclass(frozen=True, kw_only=True)
class StopRule:
    """When one request stops.

    The first token that is an end id, completes a stop word or a stop string, or fills the length
    ends it. Where one token does several of these, the reason is the first in this order, unless
    ``trtllm_words`` is set.

    Raises:
        RequestError: a number or an id is not an integer, or ``min_tokens`` is given with more than
            `MAX_STOP_IDS` ids.
    """

    max_length: int
    """Maximum number of tokens, prompt included."""
    prompt_len: int = 0
    min_tokens: int = 0
    """Minimum number of output tokens before an id or a word stops the request."""
    end_ids: tuple[int, ...] = ()
    words: tuple[tuple[int, ...], ...] = ()
    """Stop words, as ids."""
    trtllm_words: bool = False
    """TensorRT-LLM's rules of stop words: they may begin in the prompt, and the reason of a token
    that completes one and fills the length is the length."""
    ignored_ids: tuple[int, ...] = ()
    """End ids of the model that do not end the request."""
    watch: TextWatch | None = None
    """Checks for stop strings; None: there are none."""
    _ends: frozenset[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("max_length", "prompt_len", "min_tokens"):
            vars(self)[name] = expect_int(name, vars(self)[name], 0, error=RequestError)
        for name in ("end_ids", "ignored_ids"):
            ids = tuple(expect_int(name, token, error=RequestError) for token in vars(self)[name])
            vars(self)[name] = ids
        vars(self)["_ends"] = frozenset(self.end_ids)  # frozen against others
        count = len(self.device_ids)
        if self.min_tokens > 0 and count > MAX_STOP_IDS:
            raise RequestError(
                f"min_tokens={format_value(self.min_tokens)} and {count} ids that end the text: "
                f"at most {MAX_STOP_IDS} can be held back"
            )

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        *,
        prompt_len: int,
        max_seq_len: int,
        end_ids: Iterable[int] = (),
        watch: TextWatch | None = None,
    ) -> Self:
        """The rule of a request with these options.

        Args:
            max_seq_len: tokens that any request can hold. end_ids: of the model.
        """
        own = tuple(end_ids)
        ids = (() if params.ignore_eos else own) + params.stop_token_ids
        new_tokens = params.max_new_tokens
        return cls(
            max_length=(
                max_seq_len if new_tokens is None else min(max_seq_len, prompt_len + new_tokens)
            ),
            prompt_len=prompt_len,
            min_tokens=params.min_tokens,
            end_ids=tuple(dict.fromkeys(ids)),
            ignored_ids=own if params.ignore_eos else (),
            watch=watch,
        )

    @property
    def device_ids(self) -> tuple[int, ...]:
        """The token ids that stop the request, including stop words of one token."""
        alone = (word[0] for word in self.words if len(word) == 1)
        return tuple(dict.fromkeys((*self.end_ids, *alone)))

    @property
    def slot_ids(self) -> tuple[int, ...] | None:
        """The stop ids stored in the request's slot; None: more than `MAX_STOP_IDS`.

        Ignored EOS ids are included, because drafts of them are never accepted by relaxed
        acceptance, unless ``min_tokens`` masks the ids of the slot.
        """
        ids = self.device_ids
        if self.min_tokens == 0:
            ids = tuple(dict.fromkeys((*ids, *self.ignored_ids)))
        return ids if len(ids) <= MAX_STOP_IDS else None

    def check(
        self,
        run: Sequence[int],
        length: int,
        *,
        num_drafts: int = 0,
        tokens: Sequence[int] = (),
    ) -> Ending:
        """Return where the output tokens of a step stop the request, if they do.

        Args:
            run: output tokens of the step.
            length: number of tokens before them, prompt included.
            num_drafts: number of tokens in ``run`` that are accepted drafts.
            tokens: the tokens before ``run``; only needed for stop words.
        """
        is_plain = self.watch is None and not self.words
        if is_plain and length + len(run) < self.max_length and self._ends.isdisjoint(run):
            return Ending(len(run))  # the common case
        first_end = self.prompt_len + self.min_tokens
        for count, token in enumerate(run, 1):
            reason = None
            if length + count > first_end:
                if token in self._ends:
                    reason = FinishReason.END_ID
                elif self.trtllm_words and length + count >= self.max_length:
                    reason = FinishReason.LENGTH
                elif self.words and self._completes_word(tokens, run[:count]):
                    reason = FinishReason.STOP_WORDS
            if self.watch is not None:
                try:
                    if self.watch(token, from_draft=count <= num_drafts) and reason is None:
                        reason = FinishReason.STOP_WORDS
                except BaseException as error:
                    if not is_failure(error):
                        raise
                    why = f"the tokenizer cannot decode token {token}: {describe_error(error)}"
                    return Ending(count, FinishReason.ERROR, why, error)
            if reason is None and length + count >= self.max_length:
                reason = FinishReason.LENGTH
            if reason is not None:
                return Ending(count, reason)
        return Ending(len(run))

    def _completes_word(self, tokens: Sequence[int], run: Sequence[int]) -> bool:
        """Whether the last token of ``run`` completes a stop word."""
        longest = max(map(len, self.words))
        first = 0 if self.trtllm_words else self.prompt_len
        before = tokens[max(first, len(tokens) - longest) :]
        output = (*before, *run)
        return any(word and output[-len(word) :] == word for word in self.words)


def stop_words(listed: Any, *, are_plain: bool = False) -> list[list[int]]:
    """The words of ``py_stop_words_list`` or ``bad_words_list``: TensorRT-LLM's pair of flat tokens
    and their running ends, equally long (-1 after the last end), or a plain list of words; as
    lists, or the pair as a tensor [2, N] or [1, 2, N].

    Args:
        are_plain: it is no pair, whatever it looks like: two words equally long may look like one.
    """
    if are_plain and all(token >= 0 for word in listed or () for token in word):
        return [list(word) for word in listed or ()]
    if hasattr(listed, "tolist"):
        listed = listed.tolist()
        if len(listed) == 1 and listed[0] and isinstance(listed[0][0], list):
            (listed,) = listed
    if not listed:
        return []
    if len(listed) == 2 and len(listed[0]) == len(listed[1]):
        flat, ends = list(listed[0]), [end for end in listed[1] if end != -1]
        rising = all(a < b for a, b in zip([0, *ends], ends, strict=False))
        if ends and rising and ends[-1] <= len(flat):
            return [flat[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    return [list(word) for word in listed]
