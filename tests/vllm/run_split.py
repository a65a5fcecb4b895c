"""Run requests in two vLLM engines: the first prefills, the second decodes.

``python -m tests.vllm.run_split JOB RESULT``. The settings of the first are ``prefill`` of the job.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from integration.vllm.requests import prompt_of, sampling_params
from tests.vllm import run_engine


def main() -> None:
    """Prefill in a process of its own, which lives until the requests have ended here."""
    file = Path(sys.argv[1])
    job = json.loads(file.read_text())
    (phase, requests), *_ = job["phases"].items()
    for engine in (job["engine"], job["prefill"]):
        folder = {"shared_storage_path": str(file.with_suffix(".kv"))}
        engine["kv_transfer_config"]["kv_connector_extra_config"] = folder
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    set_port()
    process = context.Process(target=prefill, args=(job["prefill"], requests, theirs))
    process.start()
    theirs.close()
    try:
        blocks = pipe.recv()
        job["phases"][phase] = [
            changed(request, extra_args={"kv_transfer_params": each})
            for request, each in zip(requests, blocks, strict=True)
        ]
        file.write_text(json.dumps(job))
        set_port()
        run_engine.main()
    finally:
        pipe.close()
        process.join()


def prefill(engine: dict[str, Any], requests: list[dict[str, Any]], pipe: Connection) -> None:
    """Send where the KV blocks of the requests are, and keep them until the pipe is closed.

    Without the plugin the requests are greedy: vLLM refuses ``min_p`` with drafts.
    """
    from vllm import LLM

    options: dict[str, Any] = {"max_tokens": 1}
    if "additional_config" not in engine:
        options |= {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0}
    options["extra_args"] = {
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}
    }
    requests = [changed(request, **options) for request in requests]
    llm = LLM(**engine)
    outputs = llm.generate(
        [prompt_of(request) for request in requests],
        [sampling_params(request["params"]) for request in requests],
    )
    pipe.send([output.kv_transfer_params for output in outputs])
    with suppress(EOFError):
        pipe.recv()


def changed(request: dict[str, Any], **params: Any) -> dict[str, Any]:
    """Return the request with other parameters."""
    return {**request, "params": request["params"] | params}


def set_port() -> None:
    """Set a free port for the handshakes of the next engine of NixlConnector."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(server.getsockname()[1])


if __name__ == "__main__":
    main()
