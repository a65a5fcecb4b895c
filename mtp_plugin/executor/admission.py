"""From prompts and options to requests that the executor can serve, or every reason why not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mtp_plugin.errors import MTPPluginError, RequestError, format_value
from mtp_plugin.executor.models import ModelFacts
from mtp_plugin.executor.pending_request import PendingRequest
from mtp_plugin.executor.py_executor import PyExecutor
from mtp_plugin.executor.request import LlmRequest
from mtp_plugin.executor.tokenizer_turn import TokenizerTurn
from mtp_plugin.requests.detokenizer import RequestText
from mtp_plugin.requests.options import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, SamplingParams
from mtp_plugin.requests.prompts import Prompt, expect_short, params_of, place_of, prompts_of
from mtp_plugin.requests.stopping import MAX_STOP_LEN, MAX_STOP_STRINGS, StopRule
from mtp_plugin.requests.tokenizer import (
    LongestToken,
    detokenizer_of,
    encode,
    named_failures,
    shortened,
)
from mtp_plugin.speculative.plugin import SpeculativePieces

LONG_PROMPT = 2**16
"""Characters up to which a prompt is tokenised, however long it may be: that takes no time."""
LONG_BAD_WORD = 1024
"""Characters up to which a bad word is: 64 for each of the tokens that it may have."""


class Admission:
    """Makes requests, numbered in the order they come, from any number of threads.

    Args:
        executor: that they are for; nothing is enqueued here.
        facts: vocabulary and end ids.
        pieces: how many drafts a request may get, and whether draws accept them.
        tokenizer: with ``encode`` and ``decode``; None: prompts are ids, and there is no text.
        max_seq_len: tokens of a request at most.
        is_stepping_here: see `TokenizerTurn`.
    """

    def __init__(
        self,
        executor: PyExecutor,
        facts: ModelFacts,
        pieces: SpeculativePieces,
        *,
        tokenizer: Any,
        max_seq_len: int,
        is_stepping_here: Callable[[], bool] = lambda: False,
    ) -> None:
        self._executor = executor
        self._facts = facts
        self._pieces = pieces
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer_of(tokenizer)
        self._max_seq_len = max_seq_len
        self._all_ids = frozenset(range(min(facts.vocab_size, MAX_BAD_WORDS + 1)))
        """Those of the vocabulary, or more than a request can ban."""
        self._ids = itertools.count()  # its next() is one step for any number of threads
        self._longest = LongestToken(tokenizer)
        self._turn = TokenizerTurn(is_stepping_here)

    def make_batch(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[LlmRequest]:
        """As :meth:`make_requests`, for one prompt or several, with the same options or each its
        own."""
        batch = prompts_of(prompts)
        return self.make_requests(batch, params_of(sampling_params, len(batch)))

    def make_requests(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[LlmRequest]:
        """Requests that are admitted and fit.

        Raises:
            RequestError: naming every reason, and among several the prompt's place.
        """
        requests = []
        for number, (prompt, asked) in enumerate(zip(prompts, params, strict=True), 1):
            request_id = next(self._ids)
            try:
                request = self._make_request(request_id, prompt, asked)
                self._executor.check_fits(request)
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                why = str(error).removeprefix(f"request {request_id}: ")
                raise RequestError(f"{place_of(number, len(prompts))}: {why}") from error
            request.prompt_index = number - 1
            requests.append(request)
        return requests

    def ask(
        self, prompt: Prompt, sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> PendingRequest:
        """A request whose texts are tokenised later, by whoever makes it.

        Raises:
            RequestError: naming every reason that needs no tokenizer.
        """
        (prompt,) = prompts_of([prompt])
        (params,) = params_of(sampling_params, 1)
        request_id = next(self._ids)
        prompt = prompt if isinstance(prompt, str) else _listed(prompt, request_id)

        def make() -> LlmRequest:
            request = self._make_request(request_id, prompt, params)
            self._executor.check_fits(request)
            return request

        if self._tokenizer is None or not _has_texts(prompt, params):
            return PendingRequest.of(make())
        if isinstance(prompt, str):
            self._check_text(prompt, request_id)
        else:
            self._check_ids(prompt, request_id)
        ids = () if isinstance(prompt, str) else prompt
        self._admitted(params, request_id, ids, tokenise=False)
        self._turn.expect_outside(request_id)
        return PendingRequest(request_id, make, partial(self._turn.expect_outside, request_id))

    def make_request(self, prompt: Prompt, params: SamplingParams) -> LlmRequest:
        """A request that is admitted; whether it fits, its enqueuing says.

        Raises:
            RequestError: naming every reason.
        """
        return self._make_request(next(self._ids), prompt, params)

    def _make_request(self, request_id: int, prompt: Prompt, params: SamplingParams) -> LlmRequest:
        if not _has_texts(prompt, params):
            return self._tokenised(request_id, prompt, params)
        return self._turn.take(request_id, lambda: self._tokenised(request_id, prompt, params))

    def _tokenised(self, request_id: int, prompt: Prompt, params: SamplingParams) -> LlmRequest:
        ids = self._prompt_ids(prompt, request_id)
        params = self._admitted(params, request_id, ids)
        text = None
        if self._detokenizer is not None:
            text = RequestText(
                self._detokenizer,
                params.stop,
                params.min_tokens,
                include_stop=params.include_stop_str_in_output,
            )
        return LlmRequest(
            request_id,
            ids,
            params,
            end_ids=self._facts.eos_token_ids,
            text=text,
            max_draft_len=self._pieces.plan.max_draft_len,
            max_seq_len=self._max_seq_len,
            label=self._pieces.label if self._pieces.changes_text(params.asked()) else None,
        )

    def _prompt_ids(self, prompt: Prompt, request_id: int) -> list[int]:
        if not isinstance(prompt, str):
            ids = _listed(prompt, request_id)
        else:
            self._check_text(prompt, request_id)
            try:
                ids = encode(self._tokenizer, prompt)
            except MTPPluginError as error:
                raise RequestError(f"request {request_id}: {error}") from error
        self._check_ids(ids, request_id)
        return ids

    def _check_ids(self, ids: Sequence[int], request_id: int) -> None:
        if not ids:
            raise RequestError(f"request {request_id}: the prompt is empty")
        vocab = self._facts.vocab_size
        wrong = [
            t for t in ids if not isinstance(t, int) or isinstance(t, bool) or not 0 <= t < vocab
        ]
        if wrong:
            raise RequestError(
                f"request {request_id}: prompt ids must be integers in [0, {vocab}), got "
                f"{format_value(wrong[:3])}"
            )

    def _check_text(self, prompt: str, request_id: int) -> None:
        """Refuse a text that is none for this tokenizer, before it is tokenised."""
        if self._tokenizer is None:
            raise RequestError(
                f"request {request_id}: a text prompt needs a tokenizer, the checkpoint has no "
                f"tokenizer.json"
            )
        self._expect_length(prompt, request_id)
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"request {request_id}: the prompt is no valid Unicode text: {error}"
            ) from error

    def _expect_length(self, prompt: str, request_id: int) -> None:
        """Refuse a text that is too long whatever its tokens are, before it is tokenised."""
        if len(prompt) <= max(LONG_PROMPT, self._max_seq_len):
            return
        try:
            most = self._longest.most_characters(self._max_seq_len)
        except MTPPluginError as error:
            raise RequestError(f"request {request_id}: {error}") from error
        if most is not None and len(prompt) > most:
            raise RequestError(
                f"request {request_id}: the prompt has {len(prompt)} characters, max_seq_len "
                f"({self._max_seq_len}) tokens of this tokenizer have at most {most}"
            )

    def _admitted(
        self,
        params: SamplingParams,
        request_id: int,
        prompt: Sequence[int],
        *,
        tokenise: bool = True,
    ) -> SamplingParams:
        """The options, with bad words as ids.

        Args:
            prompt: its ids; none: they are not known yet.
            tokenise: False: leave out what asks the tokenizer.

        Raises:
            RequestError: naming every reason why they cannot be served.
        """
        unsupported = params.unsupported(self._pieces.served_options)
        unsupported += self._pieces.refusals(params.asked())
        unsupported += self._stop_problems(params.stop, tokenise)
        words, problems = self._bad_words(params, tokenise)
        unsupported += problems
        unsupported += self._outside_vocabulary(params, words)
        unsupported += self._nothing_left(params, words, prompt)
        try:
            # whatever the prompt is, the ids that end the request are these
            StopRule.of(
                params,
                prompt_len=0,
                max_seq_len=self._max_seq_len,
                end_ids=self._facts.eos_token_ids,
            )
        except RequestError as error:
            unsupported.append(str(error))
        if unsupported:
            raise RequestError(f"request {request_id}: not supported: {', '.join(unsupported)}")
        return params if words == params.bad_words else replace(params, bad_words=words)

    def _stop_problems(self, stop: tuple[str, ...], tokenise: bool) -> list[str]:
        """What is wrong with stop strings; sizes come first, since the rest takes time."""
        if len(stop) > MAX_STOP_STRINGS:
            return [f"stop: at most {MAX_STOP_STRINGS} strings are served, got {len(stop)}"]
        longest = max(map(len, stop), default=0)
        if longest > MAX_STOP_LEN:
            return [
                f"stop: at most {MAX_STOP_LEN} characters of a string are served, got {longest}"
            ]
        if stop and self._tokenizer is None:
            return [f"stop={format_value(stop)} (the checkpoint has no tokenizer.json)"]
        return [
            f"stop={shortened(word)} ({problem})"
            for word in stop
            if (problem := self._no_text(word, tokenise)) is not None
        ]

    def _bad_words(
        self, params: SamplingParams, tokenise: bool
    ) -> tuple[tuple[tuple[int, ...], ...], list[str]]:
        """The bad words as ids, and what is wrong with them.

        Of a text also the ids behind a space, where they begin with another id and are as many:
        with or without a space in front it is the same word.
        """
        words: dict[tuple[int, ...], None] = {}
        problems: list[str] = []
        name = params.spelled("bad_words")
        for word in params.bad_words:
            if isinstance(word, tuple):
                words[word] = None
                continue
            if self._tokenizer is None:
                problems.append(
                    f"{name}={format_value(word)} (the checkpoint has no tokenizer.json)"
                )
                continue
            if len(word) > LONG_BAD_WORD:  # before it is tokenised, which takes time
                problems.append(
                    f"{name}: at most {LONG_BAD_WORD} characters of a word are served, got "
                    f"{len(word)}"
                )
                continue
            try:
                word.encode()
            except UnicodeEncodeError:
                problems.append(f"{name}={format_value(word)} (it is no valid Unicode text)")
                continue
            if not tokenise:
                continue
            bare = word.lstrip(" ")
            try:
                plain = self._ids_of(bare or word)
                spaced = self._ids_of(f" {bare}") if bare else plain
            except MTPPluginError as error:
                problems.append(f"{name}={format_value(word)} ({error})")
                continue
            if not plain:
                problems.append(f"{name}={format_value(word)} (it has no tokens)")
                continue
            if len(plain) > MAX_BAD_WORD_LEN:
                problems.append(
                    f"{name}={format_value(word)} (at most {MAX_BAD_WORD_LEN} tokens of a word are "
                    f"served, got {len(plain)})"
                )
                continue
            words[plain] = None
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                words[spaced] = None
        count = len(words) + len(params.bad_token_ids)
        if count > MAX_BAD_WORDS:
            asked = len(params.bad_words) + len(params.bad_token_ids)
            twice = ", as a text counts behind a space too" if count > asked else ""
            problems.append(
                f"{name} and bad_token_ids: at most {MAX_BAD_WORDS} are served, got {count}{twice}"
            )
        return tuple(words), problems

    def _ids_of(self, text: str) -> tuple[int, ...]:
        return tuple(encode(self._tokenizer, text, add_special_tokens=False))

    def _outside_vocabulary(
        self, params: SamplingParams, bad_words: Sequence[Sequence[int]]
    ) -> Iterator[str]:
        vocab = self._facts.vocab_size
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("bad_words", [token for word in bad_words for token in word]),
            ("bad_token_ids", params.bad_token_ids),
        ):
            wrong = [token for token in dict.fromkeys(ids) if token >= vocab]
            if wrong:
                verb = "is" if len(wrong) == 1 else "are"
                yield (
                    f"{params.spelled(name)}: {_first_of(wrong)} {verb} outside the vocabulary of "
                    f"{vocab}"
                )

    def _nothing_left(
        self, params: SamplingParams, bad_words: Sequence[Sequence[int]], prompt: Sequence[int]
    ) -> Iterator[str]:
        if params.thinking_token_budget is not None:
            prompt = ()  # what a spent budget forces comes before what is banned here
        always, banned = (_banned(params, bad_words, behind) for behind in ((), prompt))
        where = "" if banned == always else " behind this prompt"
        allowed, bad = params.allowed_token_ids, f"{params.spelled('bad_words')} and bad_token_ids"
        if allowed is not None and banned.issuperset(allowed):
            yield f"allowed_token_ids: none is left{where} beside {bad}"
        elif allowed is None and banned and banned.issuperset(self._all_ids):
            yield f"{bad}: no id of the vocabulary of {self._facts.vocab_size} is left{where}"

    def _no_text(self, word: str, tokenise: bool) -> str | None:
        """Why a model cannot write the word in tokens that are all decoded; None: it can."""
        try:
            word.encode()
        except UnicodeEncodeError:
            return "it is no valid Unicode text"
        if not tokenise:
            return None
        try:
            ids = encode(self._tokenizer, word, add_special_tokens=False)
            shown, whole = (self._decode(ids, skip) for skip in (True, False))
        except MTPPluginError as error:
            return str(error)
        if not ids or shown == whole != "":
            return None
        return "special tokens are no text, give their ids in stop_token_ids"

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        with named_failures(self._tokenizer, lambda: f"cannot decode {ids[:3]}"):
            text = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        if not isinstance(text, str):
            raise MTPPluginError(
                f"the tokenizer {type(self._tokenizer).__name__} gave no text for {ids[:3]}, but "
                f"{format_value(text)}"
            )
        return text


def _banned(
    params: SamplingParams, bad_words: Sequence[Sequence[int]], prompt: Sequence[int]
) -> set[int]:
    """Ids that do not follow a prompt; without one: that are never written."""
    banned = {*params.bad_token_ids}
    for *beginning, last in bad_words:
        if list(prompt[max(0, len(prompt) - len(beginning)) :]) == beginning:
            banned.add(last)
    return banned


def _first_of(ids: Sequence[int]) -> str:
    """Ids for a message: of many the first three, and how many more there are."""
    shown = ", ".join(map(format_value, ids[:3]))
    return shown if len(ids) <= 3 else f"{shown} and {len(ids) - 3} more"


def _has_texts(prompt: Prompt, params: SamplingParams) -> bool:
    """Whether a tokenizer is asked before the request is made."""
    words = (prompt, *params.stop, *params.bad_words)
    return any(isinstance(word, str) for word in words)


def _listed(prompt: Any, request_id: int) -> list[int]:
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise RequestError(
            f"request {request_id}: expected text or a list of token ids, got "
            f"{type(prompt).__name__}"
        )
    expect_short(prompt, f"request {request_id}")
    return list(prompt)
