"""Check on a GPU: SGLang that prefills and decodes in two servers gives the output of one engine.

python -m integration.sglang.split --json split.json               # all servers on one GPU
python -m integration.sglang.split --decode-gpu 1                   # on two
python -m integration.sglang.split --only min_p,top_k --drafts 0
python -m integration.sglang.split --backend mooncake_tcp --transports ''

Both servers get the same JSON; there is no router. The engine they are compared with has no drafts;
near ties are those of `integration.sglang.proof`. A third server prefills without the plugin: its
requests have to end with HTTP 500. The exit status is 1 if an output differs or is missing, or a
wrong request is served. Needs the packages nixl and nixl-cu13 1.5.1 of the backend.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from integration.sglang import checks
from integration.sglang.engine_process import (
    EngineError,
    EngineProcess,
    options_of_drafts,
    prepare,
)
from integration.sglang.proof import CASES, NUM_PROMPTS, Proof, cases_requests, ports

HOST = "127.0.0.1"
_VARIABLE = "MTP_PLUGIN_SGLANG"
KINDS = tuple(kind for kind in CASES if kind != "n")
"""SGLang does not serve ``n`` in two servers."""
REFUSED = {
    "without the plugin": "runs without mtp_plugin",
    "other options": "got other sampling options",
    "n": "send 2 requests",
    "after": "tokens",
}
"""What the errors of requests that must not be served say; a right one is served after them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file of the result")
    parser.add_argument("--folder", type=Path, default=Path("sglang_split"), help="of logs")
    parser.add_argument(
        "--only", type=lambda text: tuple(text.split(",")), default=KINDS, help="kinds of requests"
    )
    parser.add_argument("--drafts", default="3", help="K of both servers")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--margin", type=float, default=0.0625, help="of near ties, in logits")
    parser.add_argument("--attention", default="triton", help="attention backend")
    parser.add_argument("--decode-gpu", type=int, default=0, help="GPU of the one that decodes")
    parser.add_argument("--backend", default="nixl", help="--disaggregation-transfer-backend")
    parser.add_argument("--transports", default="tcp,cuda_copy,sm,self", help="UCX_TLS")
    parser.add_argument("--port", type=int, default=22000, help="first of twelve ports")
    parser.add_argument("--commit", help="of the result, where git does not know it")
    parser.add_argument("--options", type=json.loads, default={}, help="more options of engines")
    given = parser.parse_args(arguments)
    if unknown := set(given.only) - set(KINDS):
        parser.error(f"--only: unknown kind {', '.join(sorted(unknown))}")
    result = SplitProof(given).result_of_run()
    for kind, report in result.get("kinds", {}).items():
        sys.stdout.write(f"{kind:18} {json.dumps(report)}\n")
    sys.stdout.write(f"{json.dumps({k: result.get(k) for k in ('refused', 'matched')})}\n")
    return 0 if result["matched"] else 1


class SplitProof(Proof):
    """Two servers, engines to compare them with, and what was found of them."""

    def run(self) -> None:
        """Start all engines, then serve and compare."""
        given, model = self.given, prepare(self.given.folder)
        self.result["kind"] = "sglang-split"
        options = {
            "model_path": str(model),
            "dtype": given.dtype,
            "attention_backend": given.attention,
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "mem_fraction_static": 0.2,
            "max_running_requests": NUM_PROMPTS,
            "max_total_tokens": 40000,
            "disable_radix_cache": True,
            "log_level": "info",
            **given.options,
        }
        drafts = self.drafts[0]
        for index, (name, number) in enumerate([("k0", 0), ("one", drafts)][: 1 + bool(drafts)]):
            own = {"random_seed": 0, **ports(given.port + 8, index)}
            self.engines[name] = EngineProcess(name, given.folder, {**options, **own}, number, "{}")
        self.engines["pair"] = pair = Pair(given, options, drafts)
        for name in self.engines:
            self._started(name)
        for kind in given.only:
            requests = cases_requests({kind: CASES[kind]})
            outputs = self.run_all([*self.engines], requests)
            report = self.compare(kind, requests, outputs["k0"], outputs["pair"], "pair")
            report["acceptance_length"] = {
                name: round(_tokens(outputs[name]) / steps, 3)
                for name in self.engines
                if (steps := sum(output.get("steps", 0) for output in outputs[name]))
            }
            self.result.setdefault("kinds", {})[kind] = report
            sys.stderr.write(f"{kind}: {json.dumps(report)}\n")
            self.store()  # what follows may be cut off
        self.result["refused"] = pair.refusals(cases_requests({"": CASES["min_p"]})[0])

    def finished(self) -> dict[str, Any]:
        """Return the result with ``matched``."""
        kinds, refused = self.result.get("kinds", {}), self.result.get("refused", {})
        self.result["matched"] = (
            "errors" not in self.result
            and kinds.keys() == set(self.given.only)
            and all(kind["compared"] and not kind["different"] for kind in kinds.values())
            and bool(refused)
            and all(part in (refused[name] or "") for name, part in REFUSED.items())
        )
        return self.result


class Pair:
    """A server that prefills, one that decodes, and one that prefills without the plugin; has the
    methods of `EngineProcess`."""

    name, num_drafts = "pair", 0

    def __init__(self, given: argparse.Namespace, options: dict[str, Any], drafts: int) -> None:
        self._folder, self._rooms = given.folder, random.Random(given.port)
        self._pool, self._posts = (ThreadPoolExecutor(NUM_PROMPTS) for _ in range(2))
        self._outputs: list[Future[Any]] = []
        self._urls: dict[str, str] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._bootstrap = {"prefill": given.port + 6, "foreign": given.port + 7}
        options = {**options, **options_of_drafts(drafts)}
        for index, name in enumerate(("prefill", "decode", "foreign")):
            own = {
                **ports(given.port, index),
                "disaggregation_mode": "decode" if name == "decode" else "prefill",
                "disaggregation_transfer_backend": given.backend,
                "random_seed": index,
                "base_gpu_id": given.decode_gpu if name == "decode" else 0,
            }
            if name in self._bootstrap:
                own["disaggregation_bootstrap_port"] = self._bootstrap[name]
            self._urls[name] = f"http://{HOST}:{own['port']}"
            environment = dict(os.environ)
            if given.transports:
                environment["UCX_TLS"] = given.transports
            environment.pop(_VARIABLE, None)
            if name != "foreign":
                environment[_VARIABLE] = "{}"
            with (given.folder / f"{name}.log").open("wb") as log:
                self._processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "sglang.launch_server", *flags({**options, **own})],
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def send(self, command: str, requests: list[dict[str, Any]]) -> None:  # noqa: ARG002
        """Begin to serve requests."""
        self._outputs = [self._pool.submit(self.serve, request) for request in requests]

    def call(self, command: str, seconds: float, **arguments: Any) -> Any:
        """Serve requests and return their outputs."""
        self.send(command, **arguments)
        return self.result(seconds)

    def result(self, seconds: float) -> Any:
        """Return the outputs of the requests that `send` began; at first, wait until all servers
        are ready, and return the seconds that it took.

        Raises:
            EngineError: a server ended, or does not answer in time.
        """
        started = time.monotonic()
        if self._outputs:
            return [output.result(seconds) for output in self._outputs]
        for name, process in self._processes.items():
            while not _is_ready(f"{self._urls[name]}/health"):
                if process.poll() is not None or time.monotonic() > started + seconds:
                    raise EngineError(f"{name} ended, or is not ready:\n{self._log(name)[-4000:]}")
                time.sleep(1)
            if ("mtp_plugin on: verification" in self._log(name)) != (name != "foreign"):
                raise EngineError(f"{name}: the plugin is on, or off, in the wrong server")
        return round(time.monotonic() - started, 1)

    def serve(
        self,
        request: dict[str, Any],
        prefiller: str = "prefill",
        other: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Send a request to both servers, and return the output of the one that decodes.

        Args:
            other: what the server that prefills gets in place of ``request``.
        """
        room = {
            "bootstrap_host": HOST,
            "bootstrap_port": self._bootstrap[prefiller],
            "bootstrap_room": self._rooms.getrandbits(62) + 1,
        }
        url = f"{self._urls[prefiller]}/generate"
        sent = self._posts.submit(_post, url, {**(other or request), **room})
        status, output = _post(f"{self._urls['decode']}/generate", {**request, **room})
        sent.result(checks.SECONDS)
        if status != 200:
            return {"error": f"HTTP {status}: {json.dumps(output)}"}
        info = output["meta_info"]
        return {
            "tokens": [output["output_ids"]],
            "finish": [info.get("finish_reason")],
            "steps": info.get("spec_verify_ct") or 0,
        }

    def refusals(self, request: dict[str, Any]) -> dict[str, str | None]:
        """Return the errors of requests that must not be served; see `REFUSED`."""
        params = request["sampling_params"]
        stripped = {**request, "sampling_params": {**params, "min_p": 0.0}}
        several = {**request, "sampling_params": {**params, "n": 2}}
        outputs = {
            "without the plugin": self.serve(request, "foreign"),
            "other options": self.serve(request, other=stripped),
            "n": self.serve(several),
        }
        found = {name: output.get("error") for name, output in outputs.items()}
        after = self.serve(request)
        return found | {"after": after.get("error") or f"{len(after['tokens'][0])} tokens"}

    def stop(self) -> None:
        """End all servers and the processes that they started."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        for pool in (self._pool, self._posts):
            pool.shutdown(wait=False, cancel_futures=True)

    def log_lines(self, part: str) -> list[str]:
        """Return the lines of the log of the server that decodes which have ``part``."""
        return [line for line in self._log("decode").splitlines() if part in line]

    def _log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")


def flags(options: dict[str, Any]) -> list[str]:
    """Return options of SGLang's ``Engine`` as words of its command line."""
    words = []
    for name, value in options.items():
        given = value if isinstance(value, list) else [value]
        if value is not False:
            words += [f"--{name.replace('_', '-')}", *(str(v) for v in given if v is not True)]
    return words


def _post(url: str, content: dict[str, Any]) -> tuple[int, Any]:
    """Return status and content of an answer."""
    body = json.dumps(content).encode()
    headers = {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(url, body, headers)
        with urllib.request.urlopen(request, timeout=checks.SECONDS) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError as error:
        return 0, str(error)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _tokens(outputs: list[dict[str, Any]]) -> int:
    return sum(len(tokens) for output in outputs for tokens in output.get("tokens", ()))


if __name__ == "__main__":
    sys.exit(main())
