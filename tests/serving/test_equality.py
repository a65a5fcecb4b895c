"""Output over HTTP equals that of `LLM.generate` for random requests with random options."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from mtp_plugin import LLM, SamplingParams
from tests.serving.conftest import Running

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPTS = ["class HTTPServer:\n", "def f(a):\n    ", "import ", "# a comment\n", "for i in "]


def request_of(rng: random.Random, ids: list[int]) -> dict[str, Any]:
    """Return a body; its options have the same names in `SamplingParams`."""

    def some(share: float = 0.25) -> bool:
        return rng.random() < share

    body: dict[str, Any] = {
        "max_tokens": rng.choice((1, 2, 5, 12, 24)),
        "temperature": rng.choice((0, 0, 0.6, 1.0, 1.3)),
        "seed": rng.getrandbits(32),
        "ignore_eos": some(0.5),
    }
    for name, values in (
        ("top_k", (0, 1, 5, 50)),
        ("top_p", (0.95, 0.9, 0.5)),
        ("min_p", (0.05, 0.3)),
        ("repetition_penalty", (0.8, 1.1, 1.5)),
        ("presence_penalty", (-0.5, 0.4)),
        ("frequency_penalty", (-0.1, 0.3)),
        ("max_draft_len", (0, 1, 2)),
        ("logprobs", (0, 2)),
        ("include_stop_str_in_output", (True,)),
        ("skip_special_tokens", (False,)),
        ("thinking_token_budget", (-1,)),
    ):
        if some():
            body[name] = rng.choice(values)
    if some():
        body["logit_bias"] = {str(t): rng.uniform(-3, 3) for t in rng.sample(ids, 5)}
    if some():
        body["bad_words"] = [rng.choice(("self", "def", "return", "in"))]
    if some():
        body["stop"] = ["".join(rng.choices(LETTERS, k=rng.randint(1, 2))) for _ in range(3)]
    if some():
        body["stop_token_ids"] = rng.sample(ids, 5)
    if some():
        body["min_tokens"] = rng.randint(0, body["max_tokens"])
    if some():
        body["speculate"] = False
    if some() and body["temperature"] and body.get("top_k") != 1:
        body["n"] = rng.choice((2, 3))
    return body


def params_of(body: dict[str, Any]) -> SamplingParams:
    options = dict(body)
    if "logit_bias" in options:
        options["logit_bias"] = {int(t): bias for t, bias in options["logit_bias"].items()}
    return SamplingParams(**options)


def whole_and_streamed(server: Running, body: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the choices of a whole response and of a stream."""
    whole = server.post("/v1/completions", **body)
    assert whole.status_code == 200, whole.text
    streamed = server.post("/v1/completions", **body, stream=True)
    choices: dict[int, dict[str, Any]] = {}
    for line in streamed.text.splitlines():
        if not line.startswith("data: {"):
            continue
        (chunk,) = json.loads(line[6:])["choices"]
        own = choices.setdefault(chunk["index"], {"text": "", "token_ids": [], "logprobs": []})
        own["text"] += chunk["text"]
        own["token_ids"] += chunk.get("token_ids", [])
        own["logprobs"] += (chunk["logprobs"] or {}).get("token_logprobs", [])
        own["finish_reason"] = chunk["finish_reason"]
        own["stop_reason"] = chunk.get("stop_reason")
    found = whole.json()["choices"]
    for choice in found:
        choice["logprobs"] = (choice["logprobs"] or {}).get("token_logprobs", [])
    return [found, [choices[index] for index in sorted(choices)]]


def check_request(server: Running, llm: LLM, number: int) -> None:
    rng = random.Random(number)
    text = rng.choice(PROMPTS) + "".join(rng.choices(LETTERS, k=rng.randint(0, 4)))
    ids = llm.get_tokenizer().encode("\n".join(PROMPTS))
    body = request_of(rng, sorted(set(ids)))
    prompt: Any = text if number % 2 else llm.get_tokenizer().encode(text)
    (expected,) = llm.generate([prompt], params_of(body))
    body |= {"prompt": prompt, "return_token_ids": True}
    for choices in whole_and_streamed(server, body):
        assert len(choices) == len(expected.outputs)
        for choice, output in zip(choices, expected.outputs, strict=True):
            assert choice["token_ids"] == output.token_ids
            assert choice["text"] == output.text
            assert choice["finish_reason"] == output.finish_reason
            assert choice["stop_reason"] == output.stop_reason
            if output.logprobs is not None:
                pairs = zip(output.token_ids, output.logprobs, strict=True)
                values = [known[token].logprob for token, known in pairs]
                assert choice["logprobs"] == pytest.approx(values, abs=1e-3)


MORE = [pytest.param(number, marks=pytest.mark.full) for number in range(12, 100)]


@pytest.mark.parametrize("number", [*range(12), *MORE])
def test_output_over_http_is_that_of_generate(server: Running, llm: LLM, number: int) -> None:
    check_request(server, llm, number)


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize(
    ("stop", "token", "bias", "seed"), [("</think>", 2, 18.0, 0), ("<|endoftext|>", 0, 7.0, 4)]
)
def test_stop_string_that_is_a_special_token(
    server: Running, llm: LLM, stop: str, token: int, bias: float, seed: int, skips: bool
) -> None:
    """The text is cut before it, as before a stop id, and the stop reason is the string."""
    prompt = llm.get_tokenizer().encode("class HTTPServer:\n")
    body: dict[str, Any] = {"temperature": 1, "max_tokens": 20, "logit_bias": {str(token): bias}}
    body |= {"seed": seed, "skip_special_tokens": skips}
    (plain,) = llm.generate([prompt], params_of({**body, "stop_token_ids": [token]}))
    assert 1 < len(plain.token_ids) < 20
    for keeps in (False, True):
        own = {**body, "stop": ["never", stop], "include_stop_str_in_output": keeps}
        (found,) = llm.generate([prompt], params_of(own))
        assert found.token_ids == plain.token_ids
        assert found.text == plain.text.removesuffix(stop) + stop * keeps
        assert (found.finish_reason, found.stop_reason) == ("stop", stop)
        for (choice,) in whole_and_streamed(
            server, {**own, "prompt": prompt, "return_token_ids": True}
        ):
            assert choice["token_ids"] == found.token_ids
            assert (choice["text"], choice["stop_reason"]) == (found.text, stop)


def test_special_token_as_stop_string_is_masked_before_min_tokens(llm: LLM) -> None:
    params = SamplingParams(stop="</think>", min_tokens=5, logit_bias={2: 99.0})
    (output,) = llm.generate(["class HTTPServer:\n"], params)
    assert (len(output.token_ids), output.stop_reason) == (6, "</think>")


def joined(first: Any, second: Any) -> Any:
    """Join a field of two chunks: texts, lists and counts are added."""
    if isinstance(first, dict) and isinstance(second, dict):
        return {key: joined(first.get(key), second.get(key)) for key in {**first, **second}}
    return second if first is None else first if second is None else first + second


def without_empty(value: Any) -> Any:
    """Leave out empty fields, and the seconds that streams do not have."""
    if not isinstance(value, dict):
        return value
    kept = {key: without_empty(each) for key, each in value.items() if key != "seconds"}
    return {key: each for key, each in kept.items() if each not in (None, "", [], {})}


def near(value: Any) -> Any:
    """Compare log-probabilities up to rounding: two runs may batch their prompts differently."""
    if isinstance(value, list):
        return [near(each) for each in value]
    if isinstance(value, dict):
        return {key: near(each) for key, each in value.items()}
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


LONG = "class HTTPServer:\n    def handle(self):\n" * 3
CHAT = {"messages": [{"role": "user", "content": "a"}]}
SAMPLED = {"temperature": 1, "seed": 5, "max_tokens": 12}
THINKS = {"chat_template_kwargs": {"begin": "<think>"}, "thinking_token_budget": 4}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": LONG, "echo": True, "logprobs": 2, "max_tokens": 7, "temperature": 0},
        {"prompt": LONG, "echo": True, "logprobs": 2, "max_tokens": 0},
        {"prompt": [LONG, "import "], "echo": True, "logprobs": 0, "n": 2, **SAMPLED},
        {"prompt": LONG, "echo": True, "n": 2, **SAMPLED},
        {"prompt": [[451, 201], [5]], "logprobs": 3, "stop": "</think>", **SAMPLED},
        {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2, **SAMPLED},
        {**CHAT, **THINKS, **SAMPLED},
        {**CHAT, **THINKS, "logprobs": True, "skip_special_tokens": False, **SAMPLED},
    ],
)
def test_stream_has_every_field_of_the_whole_answer(server: Running, body: dict[str, Any]) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    body = {**body, "return_token_ids": True, "return_draft_segments": True}
    whole = server.post(path, **body).json()
    stream = server.post(path, **body, stream=True, stream_options={"include_usage": True}).text
    events = [line[6:] for line in stream.splitlines() if line.startswith("data: {")]
    *chunks, last = map(json.loads, events)
    if "chat_template_kwargs" in body:
        assert whole["choices"][0]["message"]["reasoning_content"]
        assert whole["choices"][0]["message"]["content"]
    found: dict[int, Any] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice.pop("index")
            choice["message"] = choice.pop("delta", None)
            found[index] = joined(found.get(index), choice)
    for choice in whole["choices"]:
        for segment in choice.get("draft_segments", ()):
            del segment["seconds"]
        assert without_empty(found[choice.pop("index")]) == near(without_empty(choice))
    assert {**last, "choices": whole["choices"], "object": "", "id": "", "created": 0} == {
        **whole,
        "object": "",
        "id": "",
        "created": 0,
    }
