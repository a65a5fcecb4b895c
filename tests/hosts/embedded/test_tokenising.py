"""Coroutines' texts are tokenised in a thread, one at a time; what needs no tokenizer is refused
at once."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mtp_plugin.errors import ExecutorError, RequestError
from mtp_plugin.hosts.embedded import LLM, RequestHandle, RequestOutput
from tests.hosts.embedded.conftest import VOCAB, assert_drained, assert_idle
from tests.hosts.embedded.test_llm_api import Pieces, greedy


class Watched(Pieces):
    """Looks at the texts of requests; tags of thinking are read as an executor is built."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if "think>" not in text:
            self.texts.append(text)
            self.look(text)
        return super().encode(text, add_special_tokens)

    def look(self, text: str) -> None: ...


class Slow(Watched):
    """Takes its time over every text, and cannot bear two threads."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.inside = threading.Lock()
        self.threads: list[int] = []

    def look(self, text: str) -> None:
        assert self.inside.acquire(blocking=False), f"two threads tokenise, one of them {text}"
        self.threads.append(threading.get_ident())
        time.sleep(self.seconds)
        self.inside.release()


class Waiting(Watched):
    """Waits within a text until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.threads: list[int] = []

    def look(self, text: str) -> None:
        self.threads.append(threading.get_ident())
        self.reached.set()
        assert self.go_on.wait(20), text


async def _stream(llm: LLM, prompt: Any, params: Any) -> list[int]:
    return [token async for e in llm.stream_async(prompt, params) for token in e.token_ids]


async def _generate(llm: LLM, prompt: Any, params: Any) -> list[int]:
    return (await llm.generate_async(prompt, params)).token_ids


async def _submit(llm: LLM, prompt: Any, params: Any) -> list[int]:
    return (await llm.submit(prompt, params)).token_ids


async def _read(llm: LLM, prompt: Any, params: Any) -> list[int]:
    return [token async for event in llm.submit(prompt, params) for token in event.token_ids]


CALLS = [_stream, _generate, _submit, _read]


@pytest.mark.parametrize(
    ("call", "prompt", "options"),
    [
        *((call, "&'", {}) for call in CALLS),
        (_generate, [6, 7], {"stop": ("~~~",)}),
        (_generate, [6, 7], {"bad_words": ("~~~",)}),
    ],
)
def test_the_event_loop_goes_on_while_texts_are_tokenised(
    harness, target, call, prompt, options
) -> None:
    tokenizer = Waiting()
    llm = harness.llm(tokenizer=tokenizer)

    async def tick() -> None:
        while not tokenizer.reached.is_set():
            await asyncio.sleep(0.005)
        for _ in range(5):
            await asyncio.sleep(0.005)
        tokenizer.go_on.set()

    async def main() -> list[int]:
        ticking = asyncio.create_task(tick())
        tokens = await call(llm, prompt, greedy(6, **options))
        await ticking
        return tokens

    assert asyncio.run(asyncio.wait_for(main(), 30)) == target.greedy([6, 7], 6)
    assert tokenizer.texts
    assert threading.get_ident() not in tokenizer.threads
    assert_drained(llm)


def test_steps_go_on_while_a_text_is_tokenised(harness, target) -> None:
    tokenizer = Waiting()
    llm = harness.llm(tokenizer=tokenizer)

    async def main() -> tuple[list[int], list[int]]:
        text = asyncio.create_task(_generate(llm, "&'", greedy(6)))
        ids = await _generate(llm, [4, 5], greedy(40))
        tokenizer.go_on.set()
        return ids, await text

    ids, text = asyncio.run(asyncio.wait_for(main(), 30))
    assert (ids, text) == (target.greedy([4, 5], 40), target.greedy([6, 7], 6))


def test_one_thread_at_a_time_tokenises(harness, target) -> None:
    """Coroutines and threads alike."""
    tokenizer = Slow(0.01)
    llm = harness.llm(tokenizer=tokenizer)

    async def main() -> list[Any]:
        calls = [call(llm, "&'", greedy(4)) for call in CALLS]
        calls += [asyncio.to_thread(llm.generate, ["&'"] * 3, greedy(4)) for _ in range(2)]
        return await asyncio.gather(*calls)

    found = asyncio.run(asyncio.wait_for(main(), 30))
    found[4:] = [output.token_ids for outputs in found[4:] for output in outputs]
    assert found == [target.greedy([6, 7], 4)] * 10
    assert len(tokenizer.texts) == 10
    assert len(set(tokenizer.threads)) <= 3


# --- refusals ---


class Vocabulary(Watched):
    """Has no token of more than three characters."""

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(VOCAB)}

    def look(self, text: str) -> None:
        raise AssertionError(f"no text was to be tokenised, got {text}")


AT_ONCE = [
    ([], {}, "the prompt is empty"),
    ([1, VOCAB], {}, f"prompt ids must be integers in \\[0, {VOCAB}\\), got \\[{VOCAB}\\]"),
    ("x" * 10**5, {}, r"the prompt has 100000 characters, max_seq_len \(128\) tokens of this"),
    ("\ud800", {}, "the prompt is no valid Unicode text"),
    ([1], {"stop": ("x" * 10**6,)}, "not supported: stop: at most [0-9]+ characters of a string"),
    (
        [1],
        {"bad_words": ("x" * 1025,)},
        "not supported: bad_words: at most 1024 characters of a word",
    ),
    ("abc", {"allowed_token_ids": (VOCAB,)}, "not supported: allowed_token_ids: 128 is outside"),
]


@pytest.mark.parametrize(("prompt", "options", "message"), AT_ONCE)
def test_what_needs_no_tokenizer_is_refused_at_the_call(harness, prompt, options, message) -> None:
    llm = harness.llm(tokenizer=Vocabulary())
    with pytest.raises(RequestError, match=f"^request 0: {message}"):
        llm.stream_async(prompt, greedy(**options))

    async def main() -> None:
        with pytest.raises(RequestError, match=f"^request 1: {message}"):
            llm.submit(prompt, greedy(**options))
        with pytest.raises(RequestError, match=f"^request 2: {message}"):
            await llm.generate_async(prompt, greedy(**options))

    asyncio.run(main())
    assert_idle(llm)
    assert not llm._engine._calls


def test_a_vocabulary_is_read_once_for_its_size(harness) -> None:
    """A large one takes longer than the event loop should wait, for every long prompt."""
    reads = []

    class Growing(Vocabulary):
        def __len__(self) -> int:
            return VOCAB + len(self.texts)

        def get_vocab(self) -> dict[str, int]:
            reads.append(len(self))
            return {"x" * len(self): 0}

    tokenizer = Growing()
    llm = harness.llm(tokenizer=tokenizer, max_seq_len=64)
    for added in (0, 0, 1, 1):
        tokenizer.texts = ["added"] * added
        most = 64 * (VOCAB + added)
        with pytest.raises(RequestError, match=f"tokens of this tokenizer have at most {most}$"):
            llm.stream_async("x" * 10**5)
    assert reads == [VOCAB, VOCAB + 1]


class WithoutLength(Vocabulary):
    def __len__(self) -> int:
        raise KeyError("no length")


class WithoutVocabulary(Vocabulary):
    def get_vocab(self) -> dict[str, int]:
        raise KeyError("no vocabulary")


@pytest.mark.parametrize(
    ("tokenizer", "error"),
    [(WithoutLength, "no length"), (WithoutVocabulary, "no vocabulary")],
)
def test_tokenizer_whose_vocabulary_cannot_be_read_is_named(harness, tokenizer, error) -> None:
    llm = harness.llm(tokenizer=tokenizer())
    message = f"the tokenizer {tokenizer.__name__} cannot return its vocabulary: KeyError: "
    with pytest.raises(RequestError, match=f"^request 0: {message}'{error}'$"):
        llm.stream_async("x" * 10**5)
    assert len(llm.generate([[1, 2]], greedy(3))[0].token_ids) == 3


def test_tokenizer_regex_that_backtracks_is_a_named_error(harness) -> None:
    """Its panic derives from BaseException."""
    tokenizer = Tokenizer(models.WordLevel({"a": 1, "<think>": 2, "</think>": 3}, unk_token="a"))
    tokenizer.add_special_tokens(["<think>", "</think>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+c"), "isolated")
    llm = harness.llm(tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    text = "a" * 60
    for prompt, options in (
        (text, {}),
        ([1], {"stop": text}),
        ([1], {"bad_words": (text,)}),
    ):
        with pytest.raises(RequestError, match=r"cannot encode 'a+\.\.\.': PanicException"):
            llm.generate([prompt], greedy(**options))
    assert_drained(llm)


def test_decoding_that_panics_ends_the_request_with_an_error(harness) -> None:
    class PanicException(BaseException):
        pass

    class Panicking(Watched):
        def decode(self, ids: list[int], **options: Any) -> str:
            raise PanicException(f"out of range: {ids} {options}")

    (output,) = harness.llm(tokenizer=Panicking()).generate([[1]], greedy(3))
    assert output.finish_reason == "error"
    assert "PanicException: out of range" in output.error


class Wrong(Watched):
    """Cannot read one letter."""

    def look(self, text: str) -> None:
        if "!" in text:
            raise LookupError("no\nsuch letter")


LATER = [
    ("", {}, "the prompt is empty"),
    ("a!", {}, r"the tokenizer Wrong cannot encode 'a!': LookupError: no such letter"),
    ("a" * 128, {}, "the prompt has 128 tokens, max_seq_len is 128 and one token must fit"),
    ("a", {"stop": ("!",)}, r"not supported: stop='!' \(the tokenizer Wrong cannot encode '!'"),
]


@pytest.mark.parametrize(
    ("call", "prompt", "options", "message"),
    [(call, *later) for call, later in zip(CALLS, LATER, strict=True)],
)
def test_errors_of_tokens_are_raised_where_they_are_awaited(
    harness, call, prompt, options, message
) -> None:
    llm = harness.llm(tokenizer=Wrong())
    with pytest.raises(RequestError, match=f"^request 0: {message}"):
        asyncio.run(asyncio.wait_for(call(llm, prompt, greedy(**options)), 30))
    with pytest.raises(RequestError, match=f"^request 1: {message}"):
        llm.submit(prompt, greedy(**options))
    assert_idle(llm)
    assert not llm._engine._calls


# --- handles ---


def test_a_refused_handle_raises_for_every_reader(harness) -> None:
    llm = harness.llm(tokenizer=Wrong())

    async def main() -> RequestHandle:
        handle = llm.submit("!")
        assert not handle.is_finished
        for _ in range(2):
            with pytest.raises(RequestError, match="no such letter"):
                await handle
        assert handle.is_finished
        return handle

    handle = asyncio.run(asyncio.wait_for(main(), 30))
    with pytest.raises(RequestError, match="no such letter"):
        handle.result()
    assert not handle.abort()


@pytest.mark.parametrize("by_id", [True, False])
def test_aborting_a_handle_whose_text_is_being_tokenised(harness, by_id) -> None:
    tokenizer = Waiting()
    llm = harness.llm(tokenizer=tokenizer)

    async def main() -> RequestOutput:
        handle = llm.submit("&'", greedy(100))
        assert await asyncio.to_thread(tokenizer.reached.wait, 20)
        assert llm.abort(handle.request_id) if by_id else handle.abort()
        assert not handle.is_finished
        tokenizer.go_on.set()
        return await handle

    output = asyncio.run(asyncio.wait_for(main(), 30))
    assert (output.finish_reason, output.token_ids) == ("abort", [])
    assert output.prompt_token_ids == [6, 7]
    assert_drained(llm)


def test_abandoned_prompts_are_not_tokenised(harness) -> None:
    tokenizer = Waiting()
    llm = harness.llm(tokenizer=tokenizer)

    async def main() -> None:
        first = llm.submit("&'", greedy(4))
        assert await asyncio.to_thread(tokenizer.reached.wait, 20)
        dropped = llm.submit("a", greedy(4))
        cancelled = asyncio.create_task(llm.generate_async("b", greedy(4)))
        stream = llm.stream_async("c", greedy(4))
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.05)
        del dropped, stream
        cancelled.cancel()
        waiting.cancel()
        await asyncio.sleep(0)
        tokenizer.go_on.set()
        await first
        await llm.submit("d", greedy(4))

    asyncio.run(asyncio.wait_for(main(), 30))
    assert tokenizer.texts == ["&'", "d"]
    assert_drained(llm)
    assert_idle(llm)
    assert not llm._engine._calls


def test_a_handle_outlives_its_loop(harness, target) -> None:
    """The caller of `result` tokenises, unless a thread has begun to."""
    llm = harness.llm(tokenizer=Slow(0.05))

    async def main() -> list[RequestHandle]:
        return [llm.submit("&'", greedy(6)) for _ in range(3)]

    handles = asyncio.run(main())
    assert [handle.result().token_ids for handle in handles] == [target.greedy([6, 7], 6)] * 3
    assert_drained(llm)


def test_a_result_within_a_loop_tokenises_by_itself(harness, target) -> None:
    llm = harness.llm(tokenizer=Pieces())

    async def main() -> list[int]:
        return llm.submit("&'", greedy(6)).result().token_ids

    assert asyncio.run(main()) == target.greedy([6, 7], 6)


def test_shutdown_reaches_who_is_being_tokenised(harness) -> None:
    tokenizer = Waiting()
    llm = harness.llm(tokenizer=tokenizer)

    async def main() -> list[Any]:
        handle = llm.submit("&'", greedy(4))
        calls = (handle.aresult(), _stream(llm, "&'", None), _generate(llm, "&'", None))
        tasks = [asyncio.create_task(call) for call in calls]
        assert await asyncio.to_thread(tokenizer.reached.wait, 20)
        llm.shutdown()
        assert handle.is_finished
        tokenizer.go_on.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(asyncio.wait_for(main(), 30))
    assert [str(error) for error in found] == ["the executor was shut down"] * 3
    assert {type(error) for error in found} == {ExecutorError}
