"""Validates prompts and sampling options and makes requests of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from mtp_plugin.errors import MTPPluginError, RequestError, format_value
from mtp_plugin.hosts.embedded.models import ModelFacts
from mtp_plugin.hosts.embedded.py_executor import PyExecutor
from mtp_plugin.hosts.embedded.request import LlmRequest
from mtp_plugin.hosts.embedded.tokenising import PendingRequest, TokenizerLock
from mtp_plugin.requests.detokenizer import RequestText
from mtp_plugin.requests.options import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, SamplingParams
from mtp_plugin.requests.prompts import (
    PlainPrompt,
    Prompt,
    expect_short,
    params_of,
    place_of,
    prompts_of,
)
from mtp_plugin.requests.seeds import sample_seed
from mtp_plugin.requests.stopping import MAX_STOP_LEN, MAX_STOP_STRINGS, StopRule
from mtp_plugin.requests.tokenizer import (
    LongestToken,
    detokenizer_of,
    encode,
    is_failure,
    named_failures,
    shortened,
)
from mtp_plugin.speculative.plugin import SpeculativePieces

LONG_PROMPT = 2**16
"""Prompts of up to this many characters are tokenised without a check of their length."""
MAX_SAMPLES = 128
"""Maximum ``n`` of a request."""
LONG_BAD_WORD = 1024
"""Maximum number of characters of a bad word: 64 for each token that it may have."""


class Admission:
    """Makes requests with consecutive ids. Thread-safe.

    Args:
        executor: checks whether requests fit; nothing is enqueued here.
        facts: vocabulary size and end-of-sequence ids.
        pieces: draft length, served options and acceptance label.
        tokenizer: has ``encode`` and ``decode``; None: prompts are token ids, outputs have no text.
        max_seq_len: maximum number of tokens of a request, prompt included.
        is_stepping_here: see `TokenizerLock`.
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
        """The ids of the vocabulary, or more ids than a request can mask."""
        self._ids = itertools.count()  # next() is atomic
        self._longest = LongestToken(tokenizer)
        self._decode_token = (
            None
            if tokenizer is None
            else lru_cache(maxsize=2**16)(partial(_token_text, self._detokenizer))
        )
        self._tokenizer_lock = TokenizerLock(is_stepping_here)

    def make_batch(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[LlmRequest]:
        """:meth:`make_requests` for one or several prompts, with shared options or one set each."""
        batch = prompts_of(prompts)
        return self.make_requests(batch, params_of(sampling_params, len(batch)))

    def make_requests(
        self, prompts: Sequence[PlainPrompt], params: Sequence[SamplingParams]
    ) -> list[LlmRequest]:
        """Make requests and check that the executor can run each of them.

        Raises:
            RequestError: lists every reason and, of several prompts, which one.
        """
        requests = []
        for number, (prompt, own) in enumerate(zip(prompts, params, strict=True), 1):
            ids = self._reserve_ids(own)
            try:
                samples = self._make_samples(ids, prompt, own)
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                why = str(error).removeprefix(f"request {ids[0]}: ")
                raise RequestError(f"{place_of(number, len(prompts))}: {why}") from error
            for request in samples:
                request.prompt_index = number - 1
            requests += samples
        return requests

    def make_pending(
        self, prompt: Prompt, sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> PendingRequest:
        """Return a request whose strings are tokenised later, by the first thread that needs it.

        Raises:
            RequestError: lists every reason that can be found without the tokenizer.
        """
        (plain,) = prompts_of([prompt])
        (params,) = params_of(sampling_params, 1)
        ids = self._reserve_ids(params)
        plain = plain if isinstance(plain, str) else _listed(plain, ids[0])
        make = partial(self._make_samples, ids, plain, params)
        if self._tokenizer is None or not _has_texts(plain, params):
            pending = PendingRequest(ids, make, lambda: None)
            pending.result()
            return pending
        if isinstance(plain, str):
            self._check_text(plain, ids[0])
        else:
            self._check_ids(plain, ids[0])
        known = () if isinstance(plain, str) else plain
        self._validated(params, ids[0], known, tokenise=False)
        self._tokenizer_lock.check_not_held(ids[0])
        return PendingRequest(ids, make, partial(self._tokenizer_lock.check_not_held, ids[0]))

    def make_request(self, prompt: Prompt, params: SamplingParams) -> LlmRequest:
        """Make one request; ``enqueue`` checks whether it fits.

        Raises:
            RequestError: lists every reason.
        """
        (plain,) = prompts_of([prompt])
        request_id = next(self._ids)
        if params.n > 1:
            raise RequestError(f"request {request_id}: n={params.n}: expected 1 for one request")
        (request,) = self._tokenise([request_id], plain, params)
        return request

    def _reserve_ids(self, params: SamplingParams) -> list[int]:
        """Return an id for each of the ``n`` sequences of a prompt; one if there are too many."""
        return [next(self._ids) for _ in range(params.n if params.n <= MAX_SAMPLES else 1)]

    def _make_samples(
        self, ids: Sequence[int], prompt: PlainPrompt, params: SamplingParams
    ) -> list[LlmRequest]:
        """Make the ``n`` requests of a prompt and check that the executor can run them."""
        requests = self._tokenise(ids, prompt, params)
        for request in requests:
            self._executor.check_fits(request)
        return requests

    def _tokenise(
        self, ids: Sequence[int], prompt: PlainPrompt, params: SamplingParams
    ) -> list[LlmRequest]:
        if not _has_texts(prompt, params):
            return self._tokenised_requests(ids, prompt, params)
        return self._tokenizer_lock.run(
            ids[0], lambda: self._tokenised_requests(ids, prompt, params)
        )

    def _tokenised_requests(
        self, ids: Sequence[int], prompt: PlainPrompt, params: SamplingParams
    ) -> list[LlmRequest]:
        tokens = self._prompt_ids(prompt, ids[0], params)
        params = self._validated(params, ids[0], tokens)
        own = [params]
        if params.n > 1:
            seeds = [sample_seed(params.seed, index) for index in range(params.n)]
            own = [replace(params, n=1, seed=seed) for seed in seeds]
        return [
            self._request(request_id, prompt, tokens, each, index)
            for index, (request_id, each) in enumerate(zip(ids, own, strict=True))
        ]

    def _request(
        self,
        request_id: int,
        prompt: PlainPrompt,
        tokens: list[int],
        params: SamplingParams,
        sample_index: int,
    ) -> LlmRequest:
        text = None
        if self._detokenizer is not None and params.detokenize:
            text = RequestText(
                self._detokenizer,
                params.stop,
                params.min_tokens,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            )
        return LlmRequest(
            request_id,
            tokens,
            params,
            end_ids=self._facts.eos_token_ids,
            text=text,
            prompt=prompt if isinstance(prompt, str) else None,
            sample_index=sample_index,
            decode_token=self._decode_token,
            max_draft_len=self._pieces.plan.max_draft_len,
            max_seq_len=self._max_seq_len,
            label=self._pieces.label
            if self._pieces.changes_text(params.requested_options())
            else None,
        )

    def _prompt_ids(
        self, prompt: PlainPrompt, request_id: int, params: SamplingParams
    ) -> list[int]:
        if not isinstance(prompt, str):
            ids = _listed(prompt, request_id)
        else:
            self._check_text(prompt, request_id)
            try:
                options = {} if params.add_special_tokens else {"add_special_tokens": False}
                ids = encode(self._tokenizer, prompt, **options)
            except MTPPluginError as error:
                raise RequestError(f"request {request_id}: {error}") from error
        self._check_ids(ids, request_id)
        return ids

    def _check_ids(self, ids: Sequence[int], request_id: int) -> None:
        if not ids:
            raise RequestError(f"request {request_id}: the prompt is empty")
        vocab = self._facts.vocab_size
        wrong: list[object] = [
            t for t in ids if not isinstance(t, int) or isinstance(t, bool) or not 0 <= t < vocab
        ]
        if wrong:
            advice = "; call it for each text" if isinstance(wrong[0], str) else ""
            raise RequestError(
                f"request {request_id}: prompt ids must be integers in [0, {vocab}), got "
                f"{format_value(wrong[:3])}{advice}"
            )

    def _check_text(self, prompt: str, request_id: int) -> None:
        """Refuse a prompt that cannot be tokenised, before tokenising it."""
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
        """Refuse a prompt that is longer than ``max_seq_len`` tokens can be."""
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

    def _validated(
        self,
        params: SamplingParams,
        request_id: int,
        prompt: Sequence[int],
        *,
        tokenise: bool = True,
    ) -> SamplingParams:
        """Validate sampling options and return them with bad words as token ids.

        Args:
            prompt: the prompt's ids; empty: not known yet.
            tokenise: False: skip the checks that need the tokenizer.

        Raises:
            RequestError: lists every option that cannot be served.
        """
        unsupported = params.unsupported(self._pieces.served_options | {"n"})
        unsupported += _sample_problems(params)
        unsupported += self._pieces.refusals(params.requested_options())
        unsupported += self._stop_problems(params.stop, tokenise)
        if params.stop and not params.detokenize:
            unsupported.append("stop needs detokenize=True")
        words, problems = self._bad_words(params, tokenise)
        unsupported += problems
        unsupported += self._outside_vocabulary(params, words)
        unsupported += self._all_ids_masked(params, words, prompt)
        try:
            # the end ids do not depend on the prompt
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
        """Return problems of stop strings; sizes are checked first because the rest is slow."""
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
            if (problem := self._text_problem(word, tokenise)) is not None
        ]

    def _bad_words(
        self, params: SamplingParams, tokenise: bool
    ) -> tuple[tuple[tuple[int, ...], ...], list[str]]:
        """Return bad words as token ids, and their problems.

        As in vLLM, a string is also encoded with a leading space; these ids are added if they have
        the same length and another first id.
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
            if len(word) > LONG_BAD_WORD:  # before tokenising, which is slow
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
            given = len(params.bad_words) + len(params.bad_token_ids)
            twice = ", as a string also counts with a leading space" if count > given else ""
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

    def _all_ids_masked(
        self, params: SamplingParams, bad_words: Sequence[Sequence[int]], prompt: Sequence[int]
    ) -> Iterator[str]:
        if params.thinking_token_budget is not None:
            prompt = ()  # the end-of-thinking sequence is forced before these masks apply
        always, masked = (_masked_ids(params, bad_words, prefix) for prefix in ((), prompt))
        where = "" if masked == always else " after this prompt"
        allowed, bad = params.allowed_token_ids, f"{params.spelled('bad_words')} and bad_token_ids"
        if allowed is not None and masked.issuperset(allowed):
            yield f"allowed_token_ids: none is left{where} without {bad}"
        elif allowed is None and masked and masked.issuperset(self._all_ids):
            yield f"{bad}: no id of the vocabulary of {self._facts.vocab_size} is left{where}"

    def _text_problem(self, word: str, tokenise: bool) -> str | None:
        """Return why a stop string can never match decoded output, or None."""
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


def _sample_problems(params: SamplingParams) -> list[str]:
    if params.n > MAX_SAMPLES:
        return [f"n: at most {MAX_SAMPLES} are served, got {params.n}"]
    if params.n > 1 and params.is_greedy:
        return [f"n={params.n} needs sampling, as greedy sequences are equal; set temperature"]
    return []


def _token_text(detokenizer: Any, token: int) -> str | None:
    """Return the text of a token; None: the tokenizer has none."""
    try:
        text = detokenizer.decode([token], skip_special_tokens=False)
    except BaseException as error:
        if not is_failure(error):
            raise
        return None
    return text if isinstance(text, str) else None


def _masked_ids(
    params: SamplingParams, bad_words: Sequence[Sequence[int]], prompt: Sequence[int]
) -> set[int]:
    """Return the ids masked directly after a prompt; without a prompt: those always masked."""
    masked = {*params.bad_token_ids}
    for *beginning, last in bad_words:
        if list(prompt[max(0, len(prompt) - len(beginning)) :]) == beginning:
            masked.add(last)
    return masked


def _first_of(ids: Sequence[int]) -> str:
    """Format the first three ids and the number of the others."""
    shown = ", ".join(map(format_value, ids[:3]))
    return shown if len(ids) <= 3 else f"{shown} and {len(ids) - 3} more"


def _has_texts(prompt: PlainPrompt, params: SamplingParams) -> bool:
    """Whether the request needs the tokenizer."""
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
