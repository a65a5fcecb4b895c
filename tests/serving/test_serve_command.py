"""``mtp-plugin serve`` as a process."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from mtp_plugin.cli.serve import _name_of
from tests.serving.conftest import TRAINED

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "MTP_PLUGIN_API_KEY"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(*arguments: str, key: str | None = None) -> Iterator[tuple[str, subprocess.Popen]]:
    port = free_port()
    command = [sys.executable, "-m", "mtp_plugin", "serve", *arguments, "--port", str(port)]
    environment = ENVIRONMENT if key is None else {**ENVIRONMENT, "MTP_PLUGIN_API_KEY": key}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None, process.stderr.read()
            try:
                httpx.get(f"{url}/health", trust_env=False)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield url, process
    finally:
        process.kill()
        process.communicate()


def chat_equals_completion(url: str, expected: str) -> bool:
    """Whether a chat's answer is that of the prompt which its template gives."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="k")
    messages: Any = [{"role": "user", "content": "an HTTP server"}]
    options: Any = {"model": "tiny_model", "max_tokens": 8, "temperature": 0}
    answer = client.chat.completions.create(messages=messages, **options)
    same = client.completions.create(prompt=expected, **options)
    return answer.choices[0].message.content == same.choices[0].text


def test_serve_answers_and_ends_on_sigterm() -> None:
    with serving(TRAINED, "--metrics-prefix", "vllm", key="k") as (url, process):
        headers = {"Authorization": "Bearer k"}
        body = {"model": "tiny_model", "prompt": "def f(", "max_tokens": 4}
        with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=60) as client:
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200
            assert "vllm:num_requests_running" in client.get("/metrics").text
        assert httpx.get(f"{url}/v1/models", trust_env=False).status_code == 401
        assert chat_equals_completion(url, "# an HTTP server\n")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert process.returncode in (0, -signal.SIGTERM)
        assert "Traceback" not in err
        assert f"serving tiny_model on {url}" in err
        assert re.search(r"stopped after 3 sequences, \d+ prompt and 20 output tokens", err)


def test_default_name_of_a_model_is_that_of_its_folder() -> None:
    found = [_name_of(Path(path)) for path in ("/a/b", "/a/checkpoint", "/checkpoint")]
    assert found == ["b", "a", "checkpoint"]


def test_second_interrupt_ends_running_requests(tmp_path: Path) -> None:
    """Also where the log is closed, which does not end the server."""
    (tmp_path / "template.jinja").write_text("{{ messages[0].content }}(")
    with serving(TRAINED, "--chat-template", f"{tmp_path}/template.jinja") as (url, process):
        assert chat_equals_completion(url, "an HTTP server(")
        body = {"prompt": "def f(", "max_tokens": 1900, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, trust_env=False) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.stderr.close()
            process.stderr = None
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(30) in (0, 130)
