"""Requests that are refused: status, error object, and that nothing gives HTTP 500."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtp_plugin.serving.protocol import ChatBody, CompletionBody
from tests.serving.conftest import Running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]

INVALID = "the body is not valid JSON"

# fmt: off
COMPLETION_ROWS: list[tuple[dict[str, Any], str | None, str]] = [
    # body in addition to a prompt, param, part of the message; other ranges: tests/requests
    ({"temperature": -1}, "temperature", "temperature must be a number >= 0, got -1"),
    ({"temperature": [1]}, "temperature", "temperature must be"),
    ({"top_k": 1.5}, "top_k", "top_k must be"),
    ({"min_p": 2}, "min_p", "min_p must be"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be an integer >= 1, got 0"),
    ({"max_tokens": True}, "max_tokens", "max_tokens must be"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "min_tokens 9 is above max_tokens 8"),
    ({"seed": 2**64}, "seed", "seed must be"),
    ({"stop": [""]}, "stop", "stop must be"),
    ({"stop": ["a"] * 65}, "stop", "stop: at most 64 strings are served, got 65"),
    ({"stop": {"a": 1}}, "stop", "stop must be"),
    ({"stop_token_ids": [10**7]}, "stop_token_ids", "outside the vocabulary"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "expected token ids as keys, got 'a'"),
    ({"logit_bias": {"1": "x"}}, "logit_bias", "logit_bias must be"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
    ({"logit_bias": [1]}, "logit_bias", "logit_bias: "),
    ({"allowed_token_ids": []}, "allowed_token_ids", "allowed_token_ids: names no id"),
    ({"bad_words": [""]}, "bad_words", "bad_words must be"),
    ({"logprobs": 21}, "logprobs", "logprobs must be an integer from 0 to 20, got 21"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "needs stream=false"),
    ({"n": 0}, "n", "n must be an integer >= 1, got 0"),
    ({"n": 129, "temperature": 1}, "n", "n: at most 128 sequences"),
    ({"n": 2, "temperature": 0}, "n", "n=2 needs sampling"),
    ({"best_of": 3}, "best_of", "best_of=3 is not enabled"),
    ({"use_beam_search": True}, "use_beam_search", "use_beam_search: beam search is not"),
    ({"stream": "yes"}, "stream", "stream: Input should be a valid boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream=true"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "stream_options.x: Extra in"),
    ({"response_format": {"type": "json_object"}}, "response_format", "only the type text"),
    ({"structured_outputs": {"json": {}}}, "structured_outputs", "guided decoding is not"),
    ({"guided_json": {}}, "guided_json", "guided decoding is not supported"),
    ({"lora_request": {}}, "lora_request", "LoRA adapters are not supported"),
    ({"suffix": "a"}, "suffix", "suffix: expected None or '', as nothing else is served"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differs from max_completion"),
    ({"temprature": 1}, "temprature", "temprature: unknown field"),
    ({"speculate": 1}, "speculate", "speculate: Input should be a valid boolean"),
    ({"speculative": 1}, "speculate", "speculate: Input should be a valid boolean"),
    (
        {"speculative": True, "speculate": False},
        "speculate",
        "speculative is speculate under another name; leave one out",
    ),
    (
        {"vllm_xargs": {"mtp_speculate": 0}, "speculate": True},
        "speculate",
        "vllm_xargs.mtp_speculate is speculate under another name; leave one out",
    ),
    ({"vllm_xargs": {"mtp_k": 1}}, "vllm_xargs", "mtp_max_draft_len, got 'mtp_k'"),
    ({"custom_params": {"thinking_budget": 5}}, "custom_params", "got 'thinking_budget'"),
    ({"custom_params": [1]}, "custom_params", "custom_params: expected an object, got [1]"),
    ({"vllm_xargs": {"mtp_max_draft_len": -1}}, "max_draft_len", "max_draft_len must be"),
    ({"vllm_xargs": {"mtp_speculate": 2}}, "speculate", "Input should be a valid boolean"),
    ({"detokenize": False}, "detokenize", "detokenize: a response has its text"),
    ({"top_p_min": 0.5}, "top_p_min", "top_p_min=0.5"),
    ({"thinking_budget": "a"}, "thinking_budget", "thinking_budget must be"),
    ({"verification": "rejection"}, "verification", "verification="),
    ({"relaxed_topk": 2, "temperature": 0}, "relaxed_topk", "relaxed_topk=2 is not enabled"),
    ({"prompt": []}, "prompt", "prompt: expected at least one"),
    ({"prompt": ""}, "prompt", "the prompt is empty"),
    ({"prompt": [[]]}, "prompt", "the prompt is empty"),
    ({"prompt": [10**7]}, "prompt", "prompt ids must be integers in"),
    ({"prompt": [True]}, "prompt", "prompt"),
    ({"prompt": {"text": "a"}}, "prompt", "prompt: expected a text, a list of token ids, or a"),
    ({"prompt": ["a", 1]}, "prompt", "or a list of these, got ['a', 1]"),
    ({f"f{i}": 1 for i in range(30)}, "f0", "f9: unknown field; and 20 more"),
    ({f"f{i}": 1 for i in range(300)}, None, "the body: at most 256 fields are served, got 303"),
    ({"prompt": ["a"] * 129}, "prompt", "at most 128 are served, got 129"),
    ({"prompt": [1] * 5000}, "prompt", "5000 tokens"),
    ({"prompt": "x " * 600_000}, "prompt", "at most 1048576 characters"),
    ({"prompt": "\ud800"}, "prompt", "prompt"),
]
CHAT_ROWS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "messages: List should have at least 1 item"),
    ({"messages": "hi"}, "messages", "messages: Input should be a valid list"),
    ({"messages": [{"content": "a"}]}, "messages", "messages.0.role: Field required"),
    ({"messages": IMAGE}, "messages", "0.content.0.type: only text is supported, got 'image_url'"),
    ({"max_completion_tokens": 0}, "max_tokens", "max_tokens must be an integer >= 1"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differs from max_completion"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"logprobs": 5}, "logprobs", "logprobs: Input should be a valid boolean"),
    ({"tool_choice": "required"}, "tool_choice", "expected none or auto"),
    ({"tools": "find"}, "tools", "tools: Input should be a valid list"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "a template in a request is not accepted"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "is not accepted"),
    ({"functions": []}, "functions", "expected tools instead"),
    ({"echo": True}, "echo", "echo: expected None or False, as nothing else is served, got True"),
    ({"reasoning_effort": 5}, "reasoning_effort", "reasoning_effort: Input should be a valid str"),
    ({"audio": {}, "modalities": ["audio"]}, "audio", "modalities: expected None or ['text']"),
    ({"priority": 3, "separate_reasoning": False}, "priority", "separate_reasoning: expected None"),
]
OTHER_ROWS: list[tuple[str, dict[str, Any] | bytes, str | None, str]] = [
    # path, body or content, param, part of the message; 413 for what exceeds the size
    (COMPLETIONS, {"model": "tiny"}, "prompt", "prompt: Field required"),
    ("/tokenize", {"prompt": 1}, "prompt", "prompt: Input should be a valid string"),
    ("/tokenize", {"messages": []}, "messages", "messages: List should have at least 1"),
    ("/detokenize", {"tokens": [-1]}, "tokens", "tokens.0: Input should be greater"),
    ("/detokenize", {"tokens": [2**70]}, "tokens", "tokens: expected ids below"),
    ("/detokenize", {"tokens": "a"}, "tokens", "tokens: Input should be a valid list"),
    (COMPLETIONS, b"", None, INVALID),
    (COMPLETIONS, b"\xff", None, INVALID),
    (COMPLETIONS, b"[]", None, "the body must be a JSON object"),
    (COMPLETIONS, b'{"prompt": NaN}', None, INVALID),
    (COMPLETIONS, b'{"seed": ' + b"9" * 5000 + b"}", None, INVALID),
    (COMPLETIONS, b'{"a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", None, "more than 65536 lists"),
    (COMPLETIONS, b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}", None, "nested deeper than 32"),
    (COMPLETIONS, b'{"prompt": [' + b"1," * 1_200_000 + b"1]}", None, "more than 1114112 elements"),
    (COMPLETIONS, b'{"a": 1' + b', "a": 1' * 2**16 + b"}", None, "more than 65536 fields"),
    (COMPLETIONS, b'{"prompt": "' + b"a" * 2**22 + b'"}', None, "the body exceeds 4194304 bytes"),
]
# fmt: on
ROWS = [
    *(
        (COMPLETIONS, {"prompt": "a", "max_tokens": 2, **body}, *row)
        for body, *row in COMPLETION_ROWS
    ),
    *((CHAT, {"messages": MESSAGES, **body}, *row) for body, *row in CHAT_ROWS),
    *OTHER_ROWS,
]


def check(response: Any, status: int, param: str | None, message: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert message in error["message"]
    assert "/" not in error["message"].replace("application/json", "")
    assert "Traceback" not in response.text


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[3]}")
def test_body_is_refused(server: Running, row: tuple[str, Any, str | None, str]) -> None:
    path, body, param, message = row
    model = {} if "tokenize" in path else {"model": "tiny"}
    content = body if isinstance(body, bytes) else json.dumps({**model, **body})
    with server.client(headers={"Content-Type": "application/json"}) as client:
        status = 413 if "exceeds" in message else 400
        check(client.post(path, content=content), status, param, message)


def test_other_content_types_paths_and_methods_are_refused(server: Running) -> None:
    with server.client() as client:
        form = client.post(COMPLETIONS, data={"prompt": "a"})
        check(form, 415, None, "expected application/json")
        check(client.post(COMPLETIONS, content=b"{}"), 415, None, "expected application/json")
        for status, path in ((404, "/v1/nothing"), (405, COMPLETIONS), (404, "/docs")):
            response = client.get(path)
            assert response.status_code == status
            message = response.json()["error"]["message"]
            assert f"GET {path}; expected one of POST /v1/completions, " in message


def test_every_field_at_fault_is_named_in_one_error(server: Running) -> None:
    response = server.post(
        COMPLETIONS,
        model="other",
        prompt="a",
        temperature=-1,
        top_p=7,
        stream="yes",
        unknown=1,
        response_format={"type": "json_object"},
        stop_token_ids=[10**7],
    )
    message = response.json()["error"]["message"]
    for field in (
        "model",
        "temperature",
        "top_p",
        "stream",
        "unknown",
        "response_format",
        "stop_token_ids",
    ):
        assert field in message
    response = server.post(COMPLETIONS, prompt="a", unknown=1, stop_token_ids=[10**7])
    message = response.json()["error"]["message"]
    assert "unknown" in message
    assert "stop_token_ids" in message
    assert "request " not in message


def test_ignored_fields_and_null_are_accepted(server: Running) -> None:
    response = server.post(
        COMPLETIONS,
        prompt="a",
        max_tokens=2,
        user="u",
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        temperature=None,
        stop=None,
        logit_bias=None,
    )
    assert response.status_code == 200


# --- any body ---

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["a", "auto", "text", "user", "coupled", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "1", "role", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_no_body_gives_a_server_error(server: Running, path: str) -> None:
    kind = {COMPLETIONS: CompletionBody, CHAT: ChatBody}.get(path)
    names = sorted(kind.model_fields) if kind else ["prompt", "messages", "tokens", "model"]
    sound: dict[str, Any] = {COMPLETIONS: {"prompt": "ab"}, CHAT: {"messages": MESSAGES}}.get(
        path, {}
    )
    fields = st.dictionaries(st.sampled_from(names) | st.text(max_size=5), VALUES, max_size=4)

    with server.client(headers={"Content-Type": "application/json"}) as client:

        @settings(
            max_examples=120,
            deadline=None,
            suppress_health_check=[HealthCheck.function_scoped_fixture],
        )
        @given(fields, st.booleans())
        def check_body(body: dict[str, Any], is_nearly_sound: bool) -> None:
            if is_nearly_sound:
                body = {**sound, **body}
            body.setdefault("max_tokens", 2) if kind else None
            response = client.post(path, content=json.dumps(body))
            assert response.status_code in (200, 400, 404), response.text
            if response.status_code != 200:
                assert response.json()["error"]["message"]
            elif body.get("stream"):
                assert '"error"' not in response.text

        check_body()
