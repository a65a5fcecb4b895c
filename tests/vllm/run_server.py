"""Start ``vllm serve`` and send requests with the ``openai`` client.

``python -m tests.vllm.run_server JOB RESULT``.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

START_SECONDS = 200
OWN_OPTIONS = {"top_k", "min_p", "ignore_eos", "vllm_xargs"}
"""Options of vLLM that the OpenAI API does not have."""


def main() -> None:
    """Run the job in the file of the first argument."""
    job = json.loads(Path(sys.argv[1]).read_text())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", *arguments(job["engine"])]
    server = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)])
    try:
        wait_until_ready(server, f"http://127.0.0.1:{port}/health")
        result = {
            name: {"outputs": send(port, job["engine"]["model"], requests)}
            for name, requests in job["phases"].items()
        }
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
    Path(sys.argv[2]).write_text(json.dumps(result))


def arguments(settings: dict[str, Any]) -> list[str]:
    """Return the arguments of ``vllm serve`` for keyword arguments of ``vllm.LLM``."""
    settings = {key: value for key, value in settings.items() if key != "disable_log_stats"}
    result = [settings.pop("model")]
    for key, value in settings.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            result.append(f"--{name}" if value else f"--no-{name}")
        else:
            result += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return result


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    """Wait for the server's health check."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError("the server did not start")


def send(port: int, model: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send all requests at once."""
    import openai

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120)

    def one(request: dict[str, Any]) -> dict[str, Any]:
        params = dict(request["params"])
        own = {key: params.pop(key) for key in OWN_OPTIONS & params.keys()}
        try:
            answer = client.completions.create(
                model=model, prompt=request["prompt"], extra_body=own, **params
            )
        except openai.APIStatusError as error:
            return {"status": error.status_code, "error": error.message}
        choice = answer.choices[0]
        return {"text": choice.text, "finish_reason": choice.finish_reason}

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(one, requests))


if __name__ == "__main__":
    main()
