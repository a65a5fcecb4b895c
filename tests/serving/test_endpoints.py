"""Endpoints other than completions, and fields of their responses."""

from __future__ import annotations

import json
import re
import time
from math import prod

import pytest

from mtp_plugin import LLM, SamplingParams, __version__
from mtp_plugin.serving import page
from tests.serving.conftest import TEMPLATE, Running, running, tiny_llm

PROMPT = "class HTTPServer:\n"


def chunks_of(server: Running, path: str = "/v1/completions", **body: object) -> list[dict]:
    with server.client() as client:
        response = client.post(path, json={**body, "stream": True})
    assert response.headers["Content-Type"].startswith("text/event-stream")
    *events, last, end = response.text.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_version_models_and_health(server: Running, llm: LLM) -> None:
    assert server.get("/version").json() == {"version": __version__}
    (model,) = server.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", llm.max_seq_len)
    assert model["has_chat_template"] is True
    assert 0 <= time.time() - model["created"] < 3600
    health = server.get("/health")
    assert (health.status_code, health.content) == (200, b"")


@pytest.mark.parametrize(("temperature", "speculate"), [(0, True), (0, False), (0.8, True)])
def test_response_says_that_an_output_loops(
    server: Running, temperature: float, speculate: bool
) -> None:
    body = {"prompt": "class HTTPServer(socketserver.TCPServer):", "max_tokens": 200, "seed": 7}
    options = {"temperature": temperature, "top_p": 0.95, "speculate": speculate}
    answer = server.post("/v1/completions", **body, **options).json()
    loops = answer["metrics"]["speculative_decoding"]["looping"]
    assert loops is (temperature == 0 and speculate)


def test_texts_of_the_page_do_not_loop_with_its_settings(server: Running) -> None:
    page = server.get("/").text
    ids, texts = ("max", "temperature", "top_p", "seed"), page.split("const TEXTS = [")[1]
    found = [re.findall(rf'id="{name}" type="number" value="(.*?)"', page) for name in ids]
    max_tokens, temperature, top_p, seed = (float(value) for (value,) in found)
    options = {"temperature": temperature, "top_p": top_p, "seed": seed, "max_tokens": max_tokens}
    prompts = [json.loads(each)[1] for each in re.findall(r"^  (\[.*\]),$", texts, re.M)[:3]]
    for prompt in prompts:
        answer = server.post("/v1/completions", prompt=prompt, **options).json()
        assert answer["usage"]["completion_tokens"] > 64
        assert answer["metrics"]["speculative_decoding"]["looping"] is False


def test_tokenize_and_detokenize(server: Running, llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPT)
    answer = server.post("/tokenize", prompt=PROMPT, return_token_strs=True).json()
    assert (answer["tokens"], answer["count"]) == (ids, len(ids))
    assert answer["max_model_len"] == llm.max_seq_len
    assert answer["token_strs"] == llm.get_tokenizer().convert_ids_to_tokens(ids)
    assert server.post("/detokenize", tokens=ids).json() == {"prompt": PROMPT}
    assert server.post("/detokenize", tokens=[]).json() == {"prompt": ""}


def test_tokenize_of_a_conversation(server: Running, llm: LLM) -> None:
    messages = [{"role": "user", "content": "a"}]
    answer = server.post("/tokenize", messages=messages, add_generation_prompt=False).json()
    assert answer["tokens"] == llm.get_tokenizer().encode("# user: a\n")


def test_usage_is_in_every_chunk_on_request(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    *chunks, last = chunks_of(server, **body, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 12
    assert last["choices"] == []
    stats = last["metrics"]["speculative_decoding"]
    assert stats["num_spec_tokens"] == 3
    none, one, *more = stats["histogram"]
    assert stats["acceptance_histogram"] == [none + one, *more]
    assert sum(map(prod, enumerate(stats["histogram"]))) == 11  # the first is of the prompt
    *chunks, last = chunks_of(server, **body, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert all("usage" not in chunk for chunk in chunks_of(server, **body))


def test_draft_segments_are_the_text(server: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "return_draft_segments": True}
    choices = [chunk["choices"][0] for chunk in chunks_of(server, **body)]
    parts = [choice for choice in choices if "draft_segments" in choice]
    segments = [segment for choice in parts for segment in choice["draft_segments"]]
    assert "".join(segment["text"] for segment in segments) == "".join(
        choice["text"] for choice in choices
    )
    assert {segment["draft_position"] for segment in segments} == {0, 1, 2, 3}
    assert all(s["from_draft"] == (s["draft_position"] > 0) for s in segments)
    assert sum(choice["num_tokens"] for choice in parts) == 24
    assert sum(choice["num_steps"] for choice in parts) < 24


@pytest.mark.parametrize("options", [{}, {"n": 2, "temperature": 0.8, "seed": 1}])
def test_draft_segments_of_a_whole_response_are_timed(server: Running, options) -> None:
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **options}
    answers = [
        server.post("/v1/completions", **body, **more, return_draft_segments=True).json()
        for more in ({}, {"speculative": False}, {"speculate": False})
    ]
    for answer, positions in zip(answers, ({0, 1, 2, 3}, {0}, {0}), strict=True):
        for choice in answer["choices"]:
            segments = choice["draft_segments"]
            assert "".join(segment["text"] for segment in segments) == choice["text"]
            assert {segment["draft_position"] for segment in segments} <= positions
            times = [segment["seconds"] for segment in segments]
            assert 0 < times[0] < times[-1] <= choice["seconds"]
            assert times == sorted(times)
            assert choice["num_tokens"] == 24
            assert (choice["num_steps"] < 24) == (len(positions) > 1)
    plain = server.post("/v1/completions", **body).json()["choices"][0]
    assert "draft_segments" not in plain
    assert plain["text"] == answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]


def test_token_ids_and_echo_are_streamed(server: Running, llm: LLM) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    first, *rest = chunks_of(server, **body, echo=True)
    assert first["choices"][0]["text"] == PROMPT
    ids = llm.get_tokenizer().encode(PROMPT)
    assert first["choices"][0]["prompt_token_ids"] == ids
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=8))
    found = [t for chunk in rest for t in chunk["choices"][0].get("token_ids", [])]
    assert found == expected.token_ids


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_the_prompt_alone(server: Running, stream: bool) -> None:
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 0, "stream": stream, "logprobs": 2}
    if stream:
        usage = {"include_usage": True}
        first, last, end = chunks_of(server, **body, stream_options=usage)
        text, reason = first["choices"][0]["text"], last["choices"][0]["finish_reason"]
        assert last["choices"][0]["text"] == ""
    else:
        end = server.post("/v1/completions", **body).json()
        text, reason = end["choices"][0]["text"], end["choices"][0]["finish_reason"]
        logprobs = end["choices"][0]["logprobs"]
        assert "".join(logprobs["tokens"]) == PROMPT
        assert logprobs["token_logprobs"][0] is None
        assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert (text, reason) == (PROMPT, "length")
    assert end["usage"]["completion_tokens"] == 0


def test_reasoning_effort_is_a_variable_of_the_template(server: Running, llm: LLM) -> None:
    llm.tokenizer.chat_template = "effort {{ reasoning_effort }}"
    try:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        body["return_token_ids"] = True
        answer = server.post("/v1/chat/completions", **body, reasoning_effort="low").json()
    finally:
        llm.tokenizer.chat_template = TEMPLATE
    ids = llm.get_tokenizer().encode("effort low")
    assert answer["choices"][0]["prompt_token_ids"] == ids


def test_prompt_logprobs_have_the_format_of_vllm(server: Running) -> None:
    body = {"prompt": "def f(", "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    (choice,) = server.post("/v1/completions", **body).json()["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for known in others:
        assert all(set(one) == {"logprob", "rank", "decoded_token"} for one in known.values())


def test_temperature_defaults_to_1_and_tokens_to_16(server: Running, llm: LLM) -> None:
    answer = server.post("/v1/completions", prompt=PROMPT, seed=4, ignore_eos=True).json()
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=4, ignore_eos=True)
    expected = llm.generate(PROMPT, params)
    assert answer["choices"][0]["text"] == expected.text
    assert answer["usage"]["completion_tokens"] == 16


def test_chat_without_maximum_ends_at_max_seq_len(server: Running, llm: LLM) -> None:
    unit = len(llm.get_tokenizer().encode("def f(a):\n" * 10)) // 10
    content = "def f(a):\n" * ((llm.max_seq_len - 100) // unit)
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0}
    body["ignore_eos"] = True
    answer = server.post("/v1/chat/completions", **body).json()
    assert answer["usage"]["total_tokens"] == llm.max_seq_len
    assert answer["choices"][0]["finish_reason"] == "length"


# --- the page ---


def test_page_loads_nothing_and_allows_only_its_own_script(server: Running) -> None:
    response = server.get("/")
    policy = response.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "connect-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    text, _ = page._content()
    assert response.text == text
    assert "http:" not in text.replace("http-equiv", "")
    assert "https:" not in text
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert unsafe not in text
    assert "textContent" in text
    assert "onclick" not in text
    assert "style=" not in text


def test_page_reads_fields_that_exist(server: Running) -> None:
    answer = server.post(
        "/v1/completions",
        prompt=PROMPT,
        max_tokens=4,
        return_draft_segments=True,
        return_token_ids=True,
    ).json()
    (choice,) = answer["choices"]
    segment, stats = choice["draft_segments"][0], answer["metrics"]["speculative_decoding"]
    for names, fields in (
        (("draft_segments", "num_tokens", "num_steps", "seconds", "token_ids"), choice),
        (("text", "draft_position", "seconds"), segment),
        (("acceptance_histogram", "draft_acceptance_rate", "num_spec_tokens"), stats),
    ):
        for name in names:
            assert name in fields
            assert name in page._content()[0]


def test_verification_method_and_relaxed_acceptance_of_a_request() -> None:
    speculative = {
        "decoding_type": "MTP",
        "max_draft_len": 3,
        "mtp": {"verification": ["coupled", "rejection"]},
        "use_relaxed_acceptance_for_thinking": True,
        "relaxed_topk": 4,
        "relaxed_delta": 0.8,
        "begin_thinking_phase_token": 5,
        "end_thinking_phase_token": 6,
    }
    options = {"prompt": PROMPT, "max_tokens": 12}
    with tiny_llm(speculative_config=speculative) as llm, running(llm) as server:
        for fields in (
            {"temperature": 0.8, "seed": 1, "verification": "rejection"},
            {"temperature": 0.8, "seed": 1, "verification": "coupled", "draft_sampling": "greedy"},
            {"temperature": 0, "relaxed_topk": 2, "relaxed_delta": 0.5},
            {"temperature": 0, "relaxed_acceptance": False},
        ):
            expected = llm.generate(PROMPT, SamplingParams(max_tokens=12, **fields))
            answer = server.post("/v1/completions", **options, **fields)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == expected.text
        refused = server.post("/v1/completions", **options, verification="block")
        assert refused.json()["error"]["param"] == "verification"
