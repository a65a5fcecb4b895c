"""Thinking and answer are separated, streamed and whole."""

from __future__ import annotations

import json
import random

import pytest

from mtp_plugin import SamplingParams
from mtp_plugin.requests.thinking import ThinkingEnd
from mtp_plugin.serving.reasoning import ANSWER, THINKING, ReasoningSplit, ThinkingTracker
from tests.serving.conftest import running, thinking_llm, tiny_llm

TAGS = ThinkingEnd(begin=100, end=(101, 102), end_token=-1)
SPECIAL = {100: "", 101: "", 102: ""}
VISIBLE = {100: "<think>", 101: "</", 102: "think>"}


def split_in_runs(tags, texts, prompt, tokens, sizes) -> dict[str, str]:
    def decode(ids: list[int]) -> str:
        return "".join(texts.get(token, chr(token)) for token in ids)

    split = ReasoningSplit(tags, prompt, decode)
    found = {THINKING: "", ANSWER: ""}
    position = 0
    while position < len(tokens):
        run = tokens[position : position + next(sizes)]
        position += len(run)
        for phase, text in split.push(run, decode(run), is_last=position >= len(tokens)):
            found[phase] += text
    return found


@pytest.mark.parametrize("texts", [SPECIAL, VISIBLE])
@pytest.mark.parametrize(
    ("prompt", "tokens", "thinking", "answer"),
    [
        ([], [100, 65, 66, 101, 102, 67, 68], "AB", "CD"),
        ([100], [65, 66, 101, 102, 67], "AB", "C"),
        ([100, 65, 101, 102], [66, 67], "", "BC"),
        ([], [65, 66], "", "AB"),
        ([100], [65, 66], "AB", ""),
        ([], [65, 100, 66, 101, 102, 67, 100, 68], "BD", "AC"),
        ([100], [101, 102, 65], "", "A"),
    ],
)
def test_split_does_not_depend_on_the_runs(texts, prompt, tokens, thinking, answer) -> None:
    rng = random.Random(1)
    for _ in range(20):
        sizes = iter(lambda: rng.randint(1, 4), 0)
        found = split_in_runs(TAGS, texts, prompt, tokens, sizes)
        assert found == {THINKING: thinking, ANSWER: answer}


def test_unfinished_end_tag_is_thinking_text() -> None:
    found = split_in_runs(TAGS, VISIBLE, [100], [65, 101, 66, 101], iter(lambda: 1, 0))
    assert found == {THINKING: "A</B</", ANSWER: ""}


def test_single_end_token() -> None:
    tags = ThinkingEnd(begin=100, end=(104, 105), end_token=103)
    found = split_in_runs(tags, {103: "</t>"}, [100], [65, 103, 66], iter(lambda: 3, 0))
    assert found == {THINKING: "A", ANSWER: "B"}


def test_without_tags_everything_is_answer() -> None:
    found = split_in_runs(None, {}, [100], [65, 66], iter(lambda: 1, 0))
    assert found == {THINKING: "", ANSWER: "AB"}
    assert ThinkingTracker(None, [100]).phase == ANSWER


def test_chat_has_reasoning_content() -> None:
    messages = [{"role": "user", "content": "an HTTP server"}]
    options = {"max_tokens": 60, "temperature": 1.0, "seed": 5}
    with tiny_llm() as llm:
        (plain,) = llm.chat(messages, SamplingParams(**options))
        # tokens that occur once, as tags
        every = plain.prompt_token_ids + plain.token_ids
        once = [token for token in plain.token_ids if every.count(token) == 1]
    begin, end = once[1], once[-2]
    tags = {"begin_thinking_phase_token": begin, "end_thinking_phase_token": end}
    speculative = {"decoding_type": "MTP", "max_draft_len": 3, **tags}
    with tiny_llm(speculative_config=speculative) as llm, running(llm) as server:
        body = {"messages": messages, **options}
        answer = server.post("/v1/chat/completions", **body).json()
        message = answer["choices"][0]["message"]
        decode = llm.get_tokenizer().decode
        parts = message["content"], message["reasoning_content"]
        assert all(parts)
        ids = plain.token_ids
        inside = ids[ids.index(begin) + 1 : ids.index(end)]
        assert message["reasoning_content"] == decode(inside)
        outside = decode(ids[: ids.index(begin)]) + decode(ids[ids.index(end) + 1 :])
        assert message["content"] == outside
        thinking = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert thinking == len(inside) + 2
        with server.client() as client:
            response = client.post("/v1/chat/completions", json={**body, "stream": True})
        streamed = {"content": "", "reasoning_content": ""}
        for line in response.text.splitlines():
            if line.startswith("data: {"):
                for name, text in json.loads(line[6:])["choices"][0]["delta"].items():
                    if name in streamed:
                        streamed[name] += text
        assert (streamed["content"], streamed["reasoning_content"]) == parts
        assert 'phase="thinking"' in server.get("/metrics").text


def test_bundled_thinking_model_answers_sums_over_chat() -> None:
    """With reasoning, the same without drafts, and no output loops."""
    sums = {"Sum of 2129, 7237, 2720, 5531?": "17617", "Add 1234, 5678, 9012, 3456.": "19380"}
    with thinking_llm() as llm, running(llm) as server:
        for question, answer in sums.items():
            body = {"messages": [{"role": "user", "content": question}], "temperature": 0.8}
            body |= {"top_p": 0.95, "seed": 7}
            with_mtp, without = (
                server.post("/v1/chat/completions", **body, speculate=given).json()
                for given in (True, False)
            )
            message = with_mtp["choices"][0]["message"]
            assert message == without["choices"][0]["message"]
            assert message["content"] == answer
            assert answer in message["reasoning_content"]
            stats = with_mtp["metrics"]["speculative_decoding"]
            assert stats["mean_acceptance_length"] > 3
            assert stats["looping"] is False
