"""An SGLang engine in a process of its own, that answers over a pipe."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import time
import traceback
import uuid
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "integration" / "tiny_model" / "checkpoint"
START_SECONDS = 420.0
SETTLING, LEAST_STEPS = 4, 10
"""Outputs after which no prefill of another request of the batch is left; timed steps."""
_ENTRY_POINTS = {
    "mtp_plugin": "mtp_plugin.hosts.sglang:register",
    "mtp_plugin_defects": "integration.sglang.defects:register",
}
_VARIABLE = "MTP_PLUGIN_SGLANG"


class EngineError(RuntimeError):
    """An engine failed, hung or ended; the message holds the end of its log."""


def prepare(folder: Path) -> Path:
    """Set up what all engines share, and return the folder of the checkpoint.

    Args:
        folder: of logs. SGLang serves one MTP layer of this family, so the checkpoint is copied
            with another configuration. The entry points of planted defects are written there, and
            of the package if it is not installed but on the Python path.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends the engines
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    info = folder / "entry_points" / "mtp_plugin_of_proof-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mtp-plugin-of-proof\nVersion: 0\n")
    installed = entry_points(group="sglang.srt.plugins").names
    lines = [f"{name} = {to}\n" for name, to in _ENTRY_POINTS.items() if name not in installed]
    (info / "entry_points.txt").write_text("".join(["[sglang.srt.plugins]\n", *lines]))
    paths = [str(ROOT), str(info.parent)]
    sys.path[:0] = paths
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), *paths]
    os.environ.update(
        PYTHONPATH=os.pathsep.join(paths), HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1"
    )
    model = folder / "one_layer"
    shutil.copytree(CHECKPOINT, model, dirs_exist_ok=True)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (model / "config.json").write_text(json.dumps(config))
    return model


def options_of_drafts(num_drafts: int) -> dict[str, Any]:
    """Return the options of SGLang for K drafts a step of MTP layers; none for 0."""
    if not num_drafts:
        return {}
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": num_drafts,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": num_drafts + 1,
    }


class EngineProcess:
    """One engine.

    Args:
        name: of its log. options: of SGLang's ``Engine``. num_drafts: K; 0: no drafts. plugin:
            value of the plugin's variable; None: off. environment: further variables. cores: the
            only CPU cores that it uses; empty: all that this process may use.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        options: dict[str, Any],
        num_drafts: int,
        plugin: str | None,
        environment: dict[str, str] | None = None,
        cores: Sequence[int] = (),
    ) -> None:
        self.name, self.log, self.num_drafts = name, folder / f"{name}.log", num_drafts
        options = {**options, **options_of_drafts(num_drafts)}
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, str(self.log), options, plugin, environment or {}, cores)
        self._process = context.Process(target=_serve, args=arguments)  # it starts processes
        self._process.start()
        theirs.close()  # so that its end is seen
        self._number = 0  # of the latest command; the start is 0

    def call(self, command: str, seconds: float, **arguments: Any) -> Any:
        """Run a command and return its result.

        Raises:
            EngineError: the engine reports an error, ended, or does not answer in time.
        """
        self.send(command, **arguments)
        return self.result(seconds)

    def send(self, command: str, **arguments: Any) -> None:
        """Begin a command.

        Raises:
            EngineError: the engine ended.
        """
        self._number += 1
        try:
            self._pipe.send((self._number, command, arguments))
        except OSError:
            raise EngineError(f"{self.name} ended:\n{self.tail()}") from None

    def result(self, seconds: float) -> Any:
        """Return the result of the command that `send` began; see `call`. An engine that does not
        answer is ended."""
        end, number = time.monotonic() + seconds, -1
        try:
            while number != self._number:  # results of earlier ones may be unread
                if not self._pipe.poll(max(end - time.monotonic(), 0)):
                    tail = self.tail()
                    self.stop()
                    raise EngineError(f"{self.name} does not answer after {seconds:.0f} s:\n{tail}")
                number, is_ok, value = self._pipe.recv()
        except (EOFError, OSError):
            raise EngineError(f"{self.name} ended:\n{self.tail()}") from None
        if not is_ok:
            raise EngineError(f"{self.name}: {value}\n{self.tail()}")
        return value

    def tail(self, lines: int = 40) -> str:
        """Return the end of the log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def log_lines(self, part: str) -> list[str]:
        """Return the lines of the log that have ``part``."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return [line for line in text.splitlines() if part in line]

    def stop(self) -> None:
        """End the engine and the processes that it started."""
        pid = self._process.pid
        if pid is not None:
            with suppress(ProcessLookupError):  # it ended, or has not begun
                os.killpg(pid, signal.SIGKILL)
        self._process.kill()
        self._process.join(10)
        self._pipe.close()


def _serve(
    pipe: Connection,
    log: str,
    options: dict[str, Any],
    plugin: str | None,
    environment: dict[str, str],
    cores: Sequence[int],
) -> None:
    os.setsid()  # so that `stop` ends what SGLang starts
    if cores:
        os.sched_setaffinity(0, cores)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    os.environ.pop(_VARIABLE, None)
    if plugin is not None:
        os.environ[_VARIABLE] = plugin
    try:
        import sglang

        started = time.monotonic()
        engine = sglang.Engine(**options)
        pipe.send((0, True, round(time.monotonic() - started, 1)))
    except BaseException:
        pipe.send((0, False, traceback.format_exc()))
        return
    commands = {"run": _run, "storm": _storm, "soak": _soak, "steps": _steps}
    while True:  # until it is killed
        number, command, arguments = pipe.recv()
        try:
            pipe.send((number, True, commands[command](engine, **arguments)))
        except Exception:
            pipe.send((number, False, traceback.format_exc()))


def _run(engine: Any, requests: list[dict[str, Any]]) -> list[Any]:
    """Serve all requests as one batch."""
    made: list[Any] = engine.loop.run_until_complete(_all(engine, requests, {}))
    return made


def _storm(engine: Any, requests: list[dict[str, Any]], aborted: float, seed: int) -> list[Any]:
    """Serve requests that arrive over time, and abort a share of them."""
    chosen = random.Random(seed)
    aborts = {i: chosen.uniform(0, 1.5) for i in range(len(requests)) if chosen.random() < aborted}
    made: list[Any] = engine.loop.run_until_complete(_all(engine, requests, aborts, chosen))
    return made


async def _all(
    engine: Any,
    requests: list[dict[str, Any]],
    aborts: dict[int, float],
    arrivals: random.Random | None = None,
) -> list[Any]:
    delays = [arrivals.uniform(0, 4) if arrivals else 0.0 for _ in requests]

    async def one(index: int, request: dict[str, Any]) -> Any:
        await asyncio.sleep(delays[index])
        return await _serve_one(engine, request, aborts.get(index))

    return list(await asyncio.gather(*(one(i, request) for i, request in enumerate(requests))))


async def _serve_one(engine: Any, request: dict[str, Any], patience: float | None) -> Any:
    """Serve a request, and abort it after ``patience`` seconds; None: never."""
    rid = f"request-{uuid.uuid4().hex[:12]}"
    task = asyncio.ensure_future(
        engine.async_generate(
            prompt=request.get("prompt"),
            input_ids=request.get("input_ids"),
            sampling_params=dict(request["sampling_params"]),
            rid=rid,
            **_more(request),
        )
    )
    if patience is not None:
        await asyncio.sleep(patience)
        engine.tokenizer_manager.abort_request(rid=rid)
    try:
        outputs = await task
    except Exception as error:  # HTTP 400, or aborted before the first token
        return {"error": str(error), "aborted": patience is not None}
    outputs = outputs if isinstance(outputs, list) else [outputs]
    meta = [output["meta_info"] for output in outputs]
    return {
        "tokens": [list(output["output_ids"]) for output in outputs],
        "finish": [info.get("finish_reason") for info in meta],
        "retractions": sum(info.get("num_retractions") or 0 for info in meta),
        "steps": sum(info.get("spec_verify_ct") or 0 for info in meta),
        "proposed": sum(info.get("spec_num_proposed_drafts") or 0 for info in meta),
        "accepted": sum(info.get("spec_num_correct_drafts") or 0 for info in meta),
        "top_logprobs": [
            [(token, logprob) for logprob, token, _ in row or ()]
            for row in meta[0].get("output_top_logprobs") or []
        ],
        "aborted": patience is not None,
    }


def _more(request: dict[str, Any]) -> dict[str, Any]:
    """Return further arguments: of log-probabilities, and of a logit processor of SGLang."""
    more: dict[str, Any] = {}
    if "top_logprobs" in request:
        more |= {"return_logprob": True, "top_logprobs_num": request["top_logprobs"]}
    if "processor" in request:
        from sglang.srt.sampling import custom_logit_processor as processors

        more["custom_logit_processor"] = getattr(processors, request["processor"]).to_str()
    return more


def _soak(engine: Any, requests: list[dict[str, Any]], seconds: float, seed: int) -> list[Any]:
    """Serve requests in turn for so many seconds, 0 to 48 at a time, and abort one in ten."""

    async def serve() -> list[Any]:
        chosen, end, served = random.Random(seed), time.monotonic() + seconds, []
        running: set[Any] = set()

        async def one(number: int, patience: float | None) -> None:
            output = await _serve_one(engine, requests[number % len(requests)], patience)
            served.append((number, output))

        number = load = 0
        while time.monotonic() < end:
            if number % 40 == 0:  # from an idle engine to one with a long queue
                load = chosen.randint(1, 48)
            while len(running) < load:
                patience = chosen.uniform(0, 1.0) if chosen.random() < 0.1 else None
                task = asyncio.ensure_future(one(number, patience))
                running.add(task)
                task.add_done_callback(running.discard)
                number += 1
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*running)
        await asyncio.sleep(5)  # idle: SGLang checks its pools
        return served

    made: list[Any] = engine.loop.run_until_complete(serve())
    return made


def _steps(engine: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Serve one batch; return the median time between outputs of its last request while all run, in
    milliseconds.

    That request alone is streamed, so that the front end, which handles streams one by one, does
    not take longer for a step than the GPU.
    """

    async def serve() -> list[float]:
        times: list[float] = []
        ends: list[float] = []

        async def watched() -> None:
            stream = await engine.async_generate(**requests[-1], stream=True)
            async for _ in stream:
                times.append(time.perf_counter())

        async def other(request: dict[str, Any]) -> None:
            await engine.async_generate(**request)
            ends.append(time.perf_counter())

        await asyncio.gather(*map(other, requests[:-1]), watched())
        return [at for at in times[SETTLING:] if at < min(ends, default=math.inf)]

    times = engine.loop.run_until_complete(serve())
    step_ms = [1000 * (b - a) for a, b in itertools.pairwise(times)]
    if len(step_ms) < LEAST_STEPS:
        raise EngineError(f"only {len(step_ms)} steps in which all requests generate")
    return {"median_ms": round(statistics.median(step_ms), 3), "steps": len(step_ms)}
