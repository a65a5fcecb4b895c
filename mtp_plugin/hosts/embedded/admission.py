"""Validates prompts and sampling options and makes requests of them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from mtp_plugin.errors import ExecutorError, MTPPluginError, RequestError, format_value
from mtp_plugin.hosts.embedded.call import Call
from mtp_plugin.hosts.embedded.models import ModelFacts
from mtp_plugin.hosts.embedded.py_executor import PyExecutor
from mtp_plugin.hosts.embedded.request import LlmRequest
from mtp_plugin.requests.detokenizer import RequestText
from mtp_plugin.requests.options import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, SamplingParams
from mtp_plugin.requests.prompts import PlainPrompt, Prompt, params_of, place_of, prompts_of
from mtp_plugin.requests.seeds import sample_seed
from mtp_plugin.requests.stopping import MAX_STOP_LEN, MAX_STOP_STRINGS, StopRule
from mtp_plugin.requests.tokenizer import (
    LongestToken,
    detokenizer_of,
    encode,
    is_failure,
    shortened,
    stop_token,
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
    """

    def __init__(
        self,
        executor: PyExecutor,
        facts: ModelFacts,
        pieces: SpeculativePieces,
        *,
        tokenizer: Any,
        max_seq_len: int,
    ) -> None:
        self._executor = executor
        self._facts = facts
        self._pieces = pieces
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer_of(tokenizer)
        self._max_seq_len = max_seq_len
        self._ids = itertools.count()  # next() is atomic
        self._longest = LongestToken(tokenizer)
        self._decode_token = (
            None
            if tokenizer is None
            else lru_cache(maxsize=2**16)(partial(_token_text, self._detokenizer))
        )
        self._lock = threading.RLock()
        """Lets one thread at a time use the tokenizer, which need not be thread-safe."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mtp-tokenizing")
        """Tokenizes for event loops."""

    # ---- requests ---------------------------------------------------------------------------

    def make_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[LlmRequest]:
        """Make requests that the executor can run, with shared options or one set per prompt.

        Raises:
            RequestError: lists every reason and, of several prompts, which one.
        """
        plain = prompts_of(prompts)
        requests = []
        for index, params in enumerate(params_of(sampling_params, len(plain))):
            place = place_of(index + 1, len(plain)) if len(plain) > 1 else None
            samples = self.make(self._reserve_ids(params), plain[index], params, place)
            for request in samples:
                request.prompt_index = index
            requests += samples
        return requests

    def make_call(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        in_thread: bool,
    ) -> Call:
        """Return the call of one prompt.

        Args:
            in_thread: strings are tokenised in a thread, whose errors the call raises.

        Raises:
            RequestError: lists every reason; with ``in_thread`` those that need no tokenizer.
        """
        (plain,) = prompts_of([prompt])
        (params,) = params_of(sampling_params, 1)
        ids = self._reserve_ids(params)
        if not in_thread or self._tokenizer is None or not _has_texts(plain, params):
            return Call.of(self.make(ids, plain, params))
        with _named_errors(ids[0]):
            if isinstance(plain, str):
                self._check_text(plain)
            else:
                self._check_ids(plain)
            self._validated(params, () if isinstance(plain, str) else plain, tokenise=False)
        return Call(ids, self._pool.submit(self.make, ids, plain, params))

    def _reserve_ids(self, params: SamplingParams) -> list[int]:
        """Return an id for each of the ``n`` sequences of a prompt; one if there are too many."""
        return [next(self._ids) for _ in range(params.n if params.n <= MAX_SAMPLES else 1)]

    def make(
        self,
        ids: Sequence[int],
        prompt: PlainPrompt,
        params: SamplingParams,
        place: str | None = None,
    ) -> list[LlmRequest]:
        """Make the ``n`` requests of a prompt, with these ids.

        Raises:
            RequestError: calls the prompt by ``place``, else by its first id.
        """
        with _named_errors(ids[0], place):
            with self._lock if _has_texts(prompt, params) else nullcontext():
                requests = self._tokenise(ids, prompt, params)
            for request in requests:
                self._executor.check_fits(request)
            return requests

    def _tokenise(
        self, ids: Sequence[int], prompt: PlainPrompt, params: SamplingParams
    ) -> list[LlmRequest]:
        if isinstance(prompt, str):
            self._check_text(prompt)
            options = {} if params.add_special_tokens else {"add_special_tokens": False}
            tokens = encode(self._tokenizer, prompt, **options)
        else:
            tokens = list(prompt)
        self._check_ids(tokens)
        params, stop_tokens = self._validated(params, tokens)
        samples = [params]
        if params.n > 1:
            seeds = [sample_seed(params.seed, index) for index in range(params.n)]
            samples = [replace(params, n=1, seed=seed) for seed in seeds]
        is_labelled = self._pieces.changes_text(params.requested_options())
        return [
            LlmRequest(
                request_id,
                tokens,
                own,
                end_ids=self._facts.eos_token_ids,
                text=self._text_of(own, stop_tokens),
                prompt=prompt if isinstance(prompt, str) else None,
                sample_index=index,
                decode_token=self._decode_token,
                max_draft_len=self._pieces.plan.max_draft_len,
                max_seq_len=self._max_seq_len,
                label=self._pieces.label if is_labelled else None,
            )
            for index, (request_id, own) in enumerate(zip(ids, samples, strict=True))
        ]

    def _text_of(
        self, params: SamplingParams, stop_tokens: Mapping[int, str]
    ) -> RequestText | None:
        if self._detokenizer is None or not params.detokenize:
            return None
        return RequestText(
            self._detokenizer,
            params.stop,
            params.min_tokens,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            stop_tokens=stop_tokens,
        )

    # ---- prompts ----------------------------------------------------------------------------

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids:
            raise RequestError("the prompt is empty")
        vocab = self._facts.vocab_size
        wrong: list[object] = [
            t for t in ids if not isinstance(t, int) or isinstance(t, bool) or not 0 <= t < vocab
        ]
        if wrong:
            advice = "; call it for each text" if isinstance(wrong[0], str) else ""
            raise RequestError(
                f"prompt ids must be integers in [0, {vocab}), got "
                f"{format_value(wrong[:3])}{advice}"
            )

    def _check_text(self, prompt: str) -> None:
        """Refuse a prompt that cannot be tokenised, before tokenising it."""
        if self._tokenizer is None:
            raise RequestError(
                "a text prompt needs a tokenizer, the checkpoint has no tokenizer.json"
            )
        if len(prompt) > max(LONG_PROMPT, self._max_seq_len):
            most = self._longest.most_characters(self._max_seq_len)
            if most is not None and len(prompt) > most:
                raise RequestError(
                    f"the prompt has {len(prompt)} characters, max_seq_len ({self._max_seq_len}) "
                    f"tokens of this tokenizer have at most {most}"
                )
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is no valid Unicode text: {error}") from error

    # ---- options ----------------------------------------------------------------------------

    def _validated(
        self, params: SamplingParams, prompt: Sequence[int], *, tokenise: bool = True
    ) -> tuple[SamplingParams, dict[int, str]]:
        """Validate sampling options and return them with token ids for their words.

        Bad words are token ids; stop strings that are special tokens are stop ids too, and are
        returned by their ids.

        Args:
            prompt: the prompt's ids; empty: not known yet.
            tokenise: False: skip the checks that need the tokenizer.

        Raises:
            RequestError: lists every option that cannot be served.
        """
        words, word_problems = self._bad_words(params, tokenise)
        stop_tokens, stop_problems = self._stops(params, tokenise)
        unsupported = [
            *params.unsupported(self._pieces.served_options | {"n"}),
            *_sample_problems(params),
            *self._pieces.refusals(params.requested_options()),
            *stop_problems,
            *word_problems,
            *self._outside_vocabulary(params, words),
            *self._all_ids_masked(params, words, prompt),
        ]
        if stop_tokens:
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *stop_tokens))
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
            raise RequestError(f"not supported: {', '.join(unsupported)}")
        if words != params.bad_words:
            params = replace(params, bad_words=words)
        return params, stop_tokens

    def _stops(self, params: SamplingParams, tokenise: bool) -> tuple[dict[int, str], list[str]]:
        """Return the stop strings that are special tokens by their ids, and problems of all."""
        tokens: dict[int, str] = {}
        problems: list[str] = []
        longest = max(map(len, params.stop), default=0)
        if len(params.stop) > MAX_STOP_STRINGS:
            problems.append(
                f"stop: at most {MAX_STOP_STRINGS} strings are served, got {len(params.stop)}"
            )
        elif longest > MAX_STOP_LEN:
            problems.append(
                f"stop: at most {MAX_STOP_LEN} characters of a string are served, got {longest}"
            )
        elif params.stop and self._tokenizer is None:
            problems.append(
                f"stop={format_value(params.stop)} (the checkpoint has no tokenizer.json)"
            )
        else:  # the rest is slow for long strings
            for word in params.stop:
                try:
                    _check_unicode(word)
                    token = self._stop_token(word, params) if tokenise else None
                except MTPPluginError as error:
                    problems.append(f"stop={shortened(word)} ({error})")
                else:
                    if token is not None:
                        tokens.setdefault(token, word)
        if params.stop and not params.detokenize:
            problems.append("stop needs detokenize=True")
        return tokens, problems

    def _stop_token(self, word: str, params: SamplingParams) -> int | None:
        skips = params.skip_special_tokens
        token = stop_token(self._tokenizer, word, skip_special_tokens=skips)
        if token is not None and token >= self._facts.vocab_size:
            raise RequestError(
                f"its token {token} is outside the vocabulary of {self._facts.vocab_size}"
            )
        return token

    def _bad_words(
        self, params: SamplingParams, tokenise: bool
    ) -> tuple[tuple[tuple[int, ...], ...], list[str]]:
        """Return bad words as token ids, and their problems."""
        words: dict[tuple[int, ...], None] = {}
        problems: list[str] = []
        name = params.spelled("bad_words")
        for word in params.bad_words:
            if isinstance(word, tuple):
                words[word] = None
            elif self._tokenizer is not None and len(word) > LONG_BAD_WORD:  # slow to tokenise
                problems.append(
                    f"{name}: at most {LONG_BAD_WORD} characters of a word are served, got "
                    f"{len(word)}"
                )
            else:
                try:
                    words.update(dict.fromkeys(self._word_ids(word, tokenise)))
                except MTPPluginError as error:
                    problems.append(f"{name}={format_value(word)} ({error})")
        count = len(words) + len(params.bad_token_ids)
        if count > MAX_BAD_WORDS:
            given = len(params.bad_words) + len(params.bad_token_ids)
            twice = ", as a string also counts with a leading space" if count > given else ""
            problems.append(
                f"{name} and bad_token_ids: at most {MAX_BAD_WORDS} are served, got {count}{twice}"
            )
        return tuple(words), problems

    def _word_ids(self, word: str, tokenise: bool) -> list[tuple[int, ...]]:
        """Return the ids of a bad word.

        As in vLLM, a string is also encoded with a leading space; these ids are added if they have
        the same length and another first id.
        """
        if self._tokenizer is None:
            raise RequestError("the checkpoint has no tokenizer.json")
        _check_unicode(word)
        if not tokenise:
            return []
        bare = word.lstrip(" ")
        plain = tuple(self._encode(bare or word))
        spaced = tuple(self._encode(f" {bare}")) if bare else plain
        if not plain:
            raise RequestError("it has no tokens")
        if len(plain) > MAX_BAD_WORD_LEN:
            raise RequestError(
                f"at most {MAX_BAD_WORD_LEN} tokens of a word are served, got {len(plain)}"
            )
        has_two_forms = len(spaced) == len(plain) and spaced[0] != plain[0]
        return [plain, spaced] if has_two_forms else [plain]

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
                shown = ", ".join(map(format_value, wrong[:3]))
                more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
                verb = "is" if len(wrong) == 1 else "are"
                yield (
                    f"{params.spelled(name)}: {shown}{more} {verb} outside the vocabulary of "
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
        vocab = self._facts.vocab_size
        if allowed is not None and masked.issuperset(allowed):
            yield f"allowed_token_ids: none is left{where} without {bad}"
        # a request can mask MAX_BAD_WORDS ids
        elif allowed is None and masked.issuperset(range(min(vocab, MAX_BAD_WORDS + 1))):
            yield f"{bad}: no id of the vocabulary of {vocab} is left{where}"

    def _encode(self, text: str) -> list[int]:
        return encode(self._tokenizer, text, add_special_tokens=False)


@contextmanager
def _named_errors(request_id: int, place: str | None = None) -> Iterator[None]:
    """Begin messages with the request, or with the place of its prompt."""
    try:
        yield
    except ExecutorError:  # no error of the request
        raise
    except MTPPluginError as error:
        own = f"request {request_id}"
        why = str(error).removeprefix(f"{own}: ")
        raise RequestError(f"{place or own}: {why}") from error


def _check_unicode(word: str) -> None:
    try:
        word.encode()
    except UnicodeEncodeError:
        raise RequestError("it is no valid Unicode text") from None


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


def _has_texts(prompt: PlainPrompt, params: SamplingParams) -> bool:
    """Whether the request needs the tokenizer."""
    words = (prompt, *params.stop, *params.bad_words)
    return any(isinstance(word, str) for word in words)
