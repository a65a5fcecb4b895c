"""The endpoints with the ``openai`` client."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from mtp_plugin import LLM, SamplingParams, serving
from tests.serving.conftest import Running, running, thinking_llm

PROMPT = "class HTTPServer:\n"


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_completion_is_the_output_of_generate(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0)
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=24))
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert (answer.object, answer.model) == ("text_completion", "tiny")
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)


def test_client_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(serving.__file__).parent / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(from openai.*?)```", page, re.DOTALL)
    names: dict[str, openai.OpenAI] = {}
    with thinking_llm() as llm, running(llm, model_name="thinking_model") as server:
        exec(code.replace("http://127.0.0.1:8000", server.url), names)
        names["client"].close()
    *reasoning, answer, length = capsys.readouterr().out.splitlines()
    assert (len(reasoning), answer) == (3, "17617")
    assert float(length) > 3


def test_streamed_completion_has_several_tokens_per_chunk(client: openai.OpenAI, llm: LLM) -> None:
    stream = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=24))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage.completion_tokens == 24
    assert len(chunks) < 24


def test_chat_renders_the_template(client: openai.OpenAI, llm: LLM) -> None:
    messages = [{"role": "user", "content": "an HTTP server"}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=16, temperature=0
    )
    (expected,) = llm.chat(messages, SamplingParams(max_tokens=16))
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=16, temperature=0, stream=True
    )
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == expected.text


def test_chat_passes_tools_and_template_variables(client: openai.OpenAI, llm: LLM) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    tools = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    answer = client.chat.completions.create(
        model="tiny",
        messages=messages,
        tools=tools,
        tool_choice="auto",
        max_tokens=4,
        temperature=0,
        extra_body={"chat_template_kwargs": {"begin": "def f():"}, "return_token_ids": True},
    )
    prompt = "# user: a\n# tool: find\ndef f():"
    expected = llm.get_tokenizer().encode(prompt)
    assert answer.choices[0].prompt_token_ids == expected


def test_n_gives_several_choices(client: openai.OpenAI, llm: LLM) -> None:
    options = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "n": 3}
    answer = client.completions.create(model="tiny", prompt=[PROMPT, "def f"], **options)
    expected = llm.generate([PROMPT, "def f"], SamplingParams(**options))
    texts = [completion.text for output in expected for completion in output.outputs]
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(6))
    stream = client.completions.create(
        model="tiny", prompt=[PROMPT, "def f"], stream=True, **options
    )
    found = [""] * 6
    finished = []
    for chunk in stream:
        choice = chunk.choices[0]
        found[choice.index] += choice.text
        finished += [choice.index] * (choice.finish_reason is not None)
    assert (found, sorted(finished)) == (texts, list(range(6)))


def test_logprobs_of_both_styles(client: openai.OpenAI, llm: LLM) -> None:
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=6, logprobs=2))
    values = [m[t].logprob for t, m in zip(expected.token_ids, expected.logprobs, strict=True)]
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2
    )
    found = answer.choices[0].logprobs
    assert found.token_logprobs == pytest.approx(values, abs=1e-4)
    assert "".join(found.tokens) == expected.text
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(6)]
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "a"}],
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 4
    for entry in content:
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert len(entry.top_logprobs) == 2
        assert bytes(entry.bytes).decode() == entry.token


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPT)
    answer = client.completions.create(
        model="tiny", prompt=ids, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1
    )
    (choice,) = answer.choices
    assert choice.text.startswith(PROMPT)
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == len(ids) + 1
    (expected,) = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=1))
    values = [m[t].logprob for t, m in zip(ids[1:], expected.prompt_logprobs[1:], strict=True)]
    assert choice.logprobs.token_logprobs[1:-1] == pytest.approx(values, abs=1e-4)


def test_acceptance_is_in_every_response(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, temperature=0)
    stats = answer.metrics["speculative_decoding"]
    assert len(stats["acceptance_histogram"]) == 4
    assert sum(stats["acceptance_histogram"]) == stats["num_spec_steps"]
    assert stats["num_spec_tokens"] == 3
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == stats["num_accepted_draft_tokens"] > 0
    assert details.rejected_prediction_tokens == (
        stats["num_draft_tokens"] - stats["num_accepted_draft_tokens"]
    )
    plain = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=40,
        temperature=0,
        extra_body={"speculative": False},
    )
    assert plain.choices[0].text == answer.choices[0].text
    assert plain.metrics["speculative_decoding"]["num_draft_tokens"] == 0


def test_concurrent_async_requests(server: Running, llm: LLM) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(
                        model="tiny", prompt=f"def f{i}(", max_tokens=8, temperature=0
                    )
                    for i in range(16)
                )
            )
        return [answer.choices[0].text for answer in answers]

    expected = llm.generate([f"def f{i}(" for i in range(16)], SamplingParams(max_tokens=8))
    assert asyncio.run(run()) == [output.text for output in expected]


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"


def test_models_are_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
