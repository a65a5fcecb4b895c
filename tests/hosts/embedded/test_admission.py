"""What is refused before it starts: one table of requests and one of executors, exact messages."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from mtp_plugin.errors import ConfigError, ExecutorError, MTPPluginError, PluginError, RequestError
from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.hosts.embedded.models import load_model
from mtp_plugin.tools.check import make_prompts
from tests.hosts.embedded.conftest import VOCAB, assert_drained, assert_idle

END = VOCAB - 1


class Characters:
    """One character per token; the last id is a special token."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens
        return [END if c == "\0" else ord(c) for c in text.replace("<end>", "\0")]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        end = "" if skip_special_tokens else "<end>"
        return "".join(end if t == END else chr(t) for t in token_ids)


class Mute(Characters):
    """Decodes nothing."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> Any:
        del ids, skip_special_tokens


class Odd(Characters):
    """Fails on a text, or gives something else than ids."""

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        if "boom" in text:
            raise KeyError("two\nlines")
        return ["a"] if "text" in text else super().encode(text, add_special_tokens)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        del token_ids, skip_special_tokens
        raise ZeroDivisionError("nothing to decode with")

    def get_vocab(self) -> dict[str, int]:
        return {"ab": 0, "c": 1}


class Case(NamedTuple):
    prompts: Any
    message: str
    params: Any = None
    tokenizer: Any = None
    options: dict[str, Any] | None = None


SHORT = {"max_seq_len": 16}
IDS = "request 0: prompt ids must be integers in [0, 128), got "
LONG = "the prompt has {} tokens, max_seq_len is 16 and one token must fit after it"
LISTS = "prompts: expected text or lists of token ids, got "
LIST = "expected text or a list of token ids, got "
UNSUPPORTED = "request 0: not supported: "
BEST_OF = (
    "best_of={} is not enabled; write n, and choose among outputs by their cumulative_logprob, "
)
REQUESTS = [
    Case([[]], "request 0: the prompt is empty"),
    Case("", "request 0: the prompt is empty", tokenizer=Characters()),
    Case(
        "hello",
        "request 0: a text prompt needs a tokenizer, the checkpoint has no tokenizer.json",
    ),
    Case([[1, 128]], IDS + "[128]"),
    Case("é", IDS + "[233]", tokenizer=Characters()),
    Case([[-1, 3, -2, -3, -4]], IDS + "[-1, -2, -3]"),
    Case([[3, 4.0]], IDS + "[4.0]"),
    Case([True, False], IDS + "[True, False]"),
    Case([[10**5000]], IDS + "[an integer of 16610 bits]"),
    Case(None, LISTS + "NoneType"),
    Case(b"ab", LISTS + "bytes"),
    Case(torch.tensor([1, 2]), LISTS + "Tensor"),
    Case([b"ab"], f"prompt 1 of 1: {LIST}bytes"),
    Case([[1], None], f"prompt 2 of 2: {LIST}NoneType"),
    Case([[1] * 16], "request 0: " + LONG.format(16), options=SHORT),
    Case(
        [[1] * 10],
        "request 0: 30 tokens (prompt and max_new_tokens) need 8 KV blocks, the cache has 7",
        SamplingParams(max_new_tokens=20),
        options={"kv_cache_config": {"tokens_per_block": 4, "max_tokens": 31}},
    ),
    Case(
        [[1] * 33],
        "request 0: the prompt has 33 tokens, max_num_tokens is 32 and enable_chunked_prefill is "
        "false",
        options={"max_num_tokens": 32, "enable_chunked_prefill": False},
    ),
    # R31: every reason at once
    Case(
        [[1]],
        f"{UNSUPPORTED}{BEST_OF.format(3)}length_penalty=2.0, no_repeat_ngram_size=2, "
        "guided_decoding='json', stop=('END',) (the checkpoint has no tokenizer.json), "
        "stop_token_ids: 128, 999 are outside the vocabulary of 128",
        SamplingParams(
            **{"temperature": 0.7, "min_p": 0.1, "n": 2, "best_of": 3, "length_penalty": 2.0},
            **{"no_repeat_ngram_size": 2, "guided_decoding": "json", "stop": ("END",)},
            stop_token_ids=(128, 3, 999),
        ),
    ),
    Case(
        [[1]],
        f"{UNSUPPORTED}{BEST_OF.format(2)}min_tokens=2 and 33 ids that end the text: at most 32 "
        "can be held back",
        SamplingParams(min_tokens=2, stop_token_ids=tuple(range(33)), ignore_eos=True, best_of=2),
    ),
    Case(
        "ab",
        UNSUPPORTED + "stop='x<end>' (special tokens are no text: give one of them alone, their "
        "ids in stop_token_ids, or skip_special_tokens=False)",
        SamplingParams(stop=("x", "<end>", "x<end>")),
        Characters(),
    ),
    Case(
        "ab",
        UNSUPPORTED + "stop='a\\udc80' (it is no valid Unicode text)",
        SamplingParams(stop=("x", "a\udc80")),
        Characters(),
    ),
    Case(
        "ab",
        UNSUPPORTED + "stop: at most 1024 characters of a string are served, got 1000000",
        SamplingParams(stop=("x", "a" * 10**6)),
        Characters(),
    ),
    Case(
        "boom" * 20,
        "request 0: the tokenizer Odd cannot encode 'boomboomboomboomboomboomboomboomboomboom...': "
        "KeyError: 'two\\nlines'",
        tokenizer=Odd(),
    ),
    Case(
        "text",
        "request 0: the tokenizer Odd gave no ids for 'text': expected integers, got str",
        tokenizer=Odd(),
    ),
    Case(
        "ab",
        UNSUPPORTED + "stop='a' (the tokenizer Odd cannot decode [97]: "
        "ZeroDivisionError: nothing to decode with), stop='boom' (the tokenizer Odd cannot encode "
        "'boom': KeyError: 'two\\nlines'), bad_words='boom' (the tokenizer Odd cannot encode "
        "'boom': KeyError: 'two\\nlines')",
        SamplingParams(stop=("a", "boom"), bad_words=("boom",)),
        Odd(),
    ),
    Case(
        [[3]],
        UNSUPPORTED + "stop='a' (the tokenizer Mute gave no text for [97], but None)",
        SamplingParams(stop=("a",)),
        Mute(),
    ),
    # too long whatever its tokens are; a shorter text is tokenised
    Case(
        "boom" * 2**15,
        "request 0: the prompt has 131072 characters, max_seq_len (16) tokens of this tokenizer "
        "have at most 32",
        tokenizer=Odd(),
        options=SHORT,
    ),
    Case("a" * 2**16, "request 0: " + LONG.format(2**16), tokenizer=Odd(), options=SHORT),
    Case([[1], [500], [2]], "prompt 2 of 3: " + IDS.removeprefix("request 0: ") + "[500]"),
    Case([[1], [1] * 16, [500]], "prompt 2 of 3: " + LONG.format(16), options=SHORT),
    Case(
        [[1], [2]],
        "prompt 2 of 2: not supported: n=2 needs sampling, as greedy sequences are equal; set "
        "temperature",
        [SamplingParams(), SamplingParams(n=2)],
    ),
    *(
        Case([[1]], UNSUPPORTED + message, SamplingParams(**options))
        for options, message in (
            ({"n": 2}, "n=2 needs sampling, as greedy sequences are equal; set temperature"),
            ({"n": 129, "temperature": 1}, "n: at most 128 are served, got 129"),
        )
    ),
    Case({}, "prompts: expected either prompt (text) or prompt_token_ids (ids), got neither"),
    Case(
        {"prompt": "a", "prompt_token_ids": [1]},
        "prompts: expected either prompt (text) or prompt_token_ids (ids), got prompt and "
        "prompt_token_ids",
    ),
    Case({"prompt": [1]}, "prompts: prompt: expected text, got list"),
    Case(
        {"prompt_token_ids": "a"},
        "prompts: prompt_token_ids: expected a list of token ids, got str",
    ),
    Case(
        [{"prompt": "a"}, {"image": 1}],
        "prompt 2 of 2: expected prompt or prompt_token_ids, got 'image'",
    ),
    *(
        Case([[1]], f"sampling_params: expected SamplingParams, got {type(odd).__name__}", odd)
        for odd in (3, {"max_new_tokens": 3})
    ),
    Case([[1], [2]], "2 prompts, but 1 sampling parameters", [SamplingParams()]),
    Case(
        [[1]],
        "prompt 1 of 1: sampling_params: expected SamplingParams, got dict",
        [{"max_new_tokens": 3}],
    ),
    Case(
        [[1], [2]],
        "prompt 2 of 2: sampling_params: expected SamplingParams, got NoneType",
        [SamplingParams(), None],
    ),
]


@pytest.mark.thinned("call")
@pytest.mark.parametrize("case", REQUESTS, ids=lambda case: case.message[:50])
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_requests_refused_before_anything_starts(harness, case: Case, call: str) -> None:
    llm = harness.llm(tokenizer=case.tokenizer, **(case.options or {}))
    with pytest.raises(RequestError, match=f"^{re.escape(case.message)}$") as caught:
        getattr(llm, call)(case.prompts, case.params)
    assert isinstance(caught.value, (MTPPluginError, ValueError))
    assert_idle(llm)
    assert llm.executor.num_steps == 0
    assert_drained(llm)


@pytest.mark.parametrize("ids", [range(10**12), range(10**30)])
def test_range_longer_than_any_vocabulary_is_refused(harness, ids: range) -> None:
    llm = harness.llm()
    for call in (llm.generate, llm.submit, lambda prompt: llm.generate([prompt])):
        with pytest.raises(RequestError, match="expected at most 1048576 token ids, got range"):
            call(ids)


def test_a_list_counts_from_its_own_start(harness) -> None:
    """Independent of previous requests."""
    llm = harness.llm()
    llm.generate([[1], [2]], SamplingParams(max_new_tokens=1))
    with pytest.raises(RequestError, match=r"^prompt 1 of 2: the prompt is empty$"):
        llm.generate([[], [500]])
    with pytest.raises(RequestError, match=r"^request \d+: the prompt is empty$"):
        llm.generate([[]])


def test_no_prompts_give_no_outputs(harness) -> None:
    assert harness.llm().generate([]) == []


def test_a_long_prompt_gives_only_our_own_error(harness) -> None:
    """transformers warns of its own limit at the same text."""
    vocab = {chr(code): code for code in range(VOCAB)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab, [])), model_max_length=8
    )
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        llm = harness.llm(max_seq_len=16, tokenizer=tokenizer)
        with pytest.raises(RequestError, match=r"^request 0: the prompt has 40 tokens"):
            llm.generate("x" * 40, SamplingParams(stop=("y" * 12,)))
        assert make_prompts(["z" * 12], tokenizer, VOCAB, 1, seed=0) == [[ord("z")] * 12]
    finally:
        logger.removeHandler(handler)
    assert [record.getMessage() for record in records] == []


# --- PyExecutor.enqueue ---


def test_an_id_in_use_is_refused(harness) -> None:
    llm = harness.llm()
    request = llm.make_request([1, 2], SamplingParams())
    llm.executor.enqueue(request)
    with pytest.raises(RequestError, match=r"^request 0: the id is in use$"):
        llm.executor.enqueue(request)
    llm.shutdown()


def test_enqueue_takes_requests_alone(harness) -> None:
    with pytest.raises(RequestError) as error:
        harness.llm().executor.enqueue([1, 2, 3])
    assert str(error.value) == "enqueue: expected an LlmRequest, got [1, 2, 3]"


def test_enqueue_checks_the_size_too(harness) -> None:
    request = harness.llm().make_request([1] * 8, SamplingParams(max_new_tokens=100))
    llm = harness.llm(kv_cache_config={"max_tokens": 64})
    with pytest.raises(RequestError, match=r"^request 0: 108 tokens .* need \d+ KV blocks"):
        llm.executor.enqueue(request)
    assert_idle(llm)


def test_history_rows_need_budget(harness) -> None:
    """A host whose plan costs more history than a step has tokens."""
    llm = harness.llm(vanilla=True, max_num_tokens=32)
    scheduler = llm.executor.scheduler
    scheduler.plan = dataclasses.replace(scheduler.plan, history_rows=32)
    with pytest.raises(
        RequestError,
        match=r"^request 0: max_num_tokens 32 cannot hold one prompt token and 32 history rows$",
    ):
        llm.generate([[1, 2]])
    scheduler.plan = dataclasses.replace(scheduler.plan, history_rows=31)
    llm.executor.check_fits(llm.make_request([1, 2], SamplingParams(max_new_tokens=2)))


def test_cancel_of_an_unknown_or_finished_id_changes_nothing(harness) -> None:
    llm = harness.llm()
    assert not llm.executor.cancel(3)
    (output,) = llm.generate([[1, 2]], SamplingParams(max_new_tokens=2, ignore_eos=True))
    assert not llm.executor.cancel(output.request_id)
    assert output.finish_reason == "length"


CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate([[1]]),
    "stream": lambda llm: next(llm.stream([[1]])),
    "stream_async": lambda llm: asyncio.run(llm.generate_async([1])),
    "submit": lambda llm: llm.submit([1]),
    "step": lambda llm: llm.executor.step(),
    "enqueue": lambda llm: llm.executor.enqueue(llm.make_request([1], SamplingParams())),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_after_shutdown_every_call_is_refused(harness, call: Callable[[LLM], object]) -> None:
    llm = harness.llm()
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(ExecutorError, match=r"^the executor was shut down$"):
        call(llm)
    assert_drained(llm)


# --- executors that cannot be built ---


RELAXED = {"use_relaxed_acceptance_for_thinking": True}
EXECUTORS: list[tuple[dict[str, Any], type[MTPPluginError], str]] = [
    (
        {"max_seq_len": 513},
        ConfigError,
        "max_seq_len: 513 is above the model's 512 positions",
    ),
    (
        {"kv_cache_config": {"tokens_per_block": 32, "max_tokens": 31}},
        ConfigError,
        "kv_cache_config.max_tokens: 31 holds no block of 32 tokens",
    ),
    (
        {"k": 0, "speculative_config": {"decoding_type": "none", "bogus": True}},
        ConfigError,
        "speculative_config: decoding_type 'none' takes no options, got bogus",
    ),
    (
        {"dtype": "bfloat16"},
        ConfigError,
        "dtype: bfloat16 was requested, the loaded model is torch.fl",
    ),
    (
        {"enable_chunked_prefill": False, "chunk_policy": lambda *_: 1},
        ConfigError,
        "chunk_policy: enable_chunked_prefill is false, so there is none",
    ),
    (
        {"k": 0, "speculative_config": {"decoding_type": "Medusa", "heads": 3}},
        PluginError,
        "decoding_type 'Medusa' has no plugin; known:",
    ),
    (
        {"speculative": RELAXED},
        ConfigError,
        "begin_thinking_phase_token: no id is set and no tokenizer is loaded to look '<think>' up",
    ),
    (
        {
            "speculative": {
                **RELAXED,
                "begin_thinking_phase_token": 3,
                "end_thinking_phase_token": 128,
            }
        },
        ConfigError,
        "end_thinking_phase_token: 128 is outside the vocabulary of 128",
    ),
    (
        {"speculative": RELAXED, "tokenizer": Characters()},
        ConfigError,
        "begin_thinking_phase: '<think>' must be one token",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), EXECUTORS)
def test_executors_refused(
    harness, options: dict[str, Any], error: type[MTPPluginError], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        harness.llm(**options)


def test_a_shared_model_needs_enough_mtp_layers(harness) -> None:
    model = load_model(harness.path, num_mtp_layers=1)
    spec = {"decoding_type": "MTP", "max_draft_len": 3, "use_mtp_vanilla": True}
    with pytest.raises(
        ConfigError, match=r"^the loaded model has 1 MTP layers, this config needs 3$"
    ):
        LLM({"model": harness.path, "speculative_config": spec}, model=model)


def test_cuda_without_a_device(harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigError, match=r"^device: cuda was requested, but torch sees no CUDA device$"
    ):
        harness.llm(device="cuda")
