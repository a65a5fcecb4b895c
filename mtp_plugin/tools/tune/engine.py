"""A vLLM engine in a process of its own, and what runs in it: requests, step times, counters."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import zip_longest
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from mtp_plugin.errors import ConfigError, ExecutorError, HostError
from mtp_plugin.tools.texts import text_of_message
from mtp_plugin.tools.tune.answer import Setting

CACHE_ROOT = "VLLM_CACHE_ROOT"
Request = tuple[list[int], dict[str, Any]]
"""Token ids of the prompt, and keyword arguments of vLLM's ``SamplingParams``."""
TICK_SECONDS = 10.0
_ERROR = re.compile(r"((?:\w+\.)*\w+(?:Error|Exception): .+)")
_NO_REASON = re.compile("Engine core initialization failed|EngineCore encountered an issue")
"""vLLM's messages in the front end; the reason is in the log."""


class EngineFailedError(ExecutorError):
    """An engine did not start, or failed."""


class EngineProcess:
    """One engine; functions ``(engine, *arguments)`` run in its process, one at a time.

    Args:
        setting: drafts and options of the plugin. arguments: of ``vllm serve``.
        log: file for the output of vLLM.
        cache: name of a folder in vLLM's cache, whose files engines that start together must not
            share; None: vLLM's.
    """

    def __init__(
        self, setting: Setting, arguments: list[str], log: Path, cache: str | None
    ) -> None:
        self._log = log
        _start_quiet_tracker()
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        given = (other, setting, arguments, str(log), cache)
        self._process = context.Process(target=_serve, args=given)
        self._process.start()
        self._is_starting = True
        other.close()

    def result(self, on_wait: Callable[[], None] = lambda: None) -> Any:
        """Return what the last call returned; after the start: see `_described`.

        Args:
            on_wait: called every `TICK_SECONDS`.

        Raises:
            EngineFailedError: the engine did not start, or failed.
            ConfigError, HostError: no engine can start with these arguments, or with this vLLM.
        """
        try:
            while not self._connection.poll(TICK_SECONDS):
                on_wait()
                # processes of vLLM may hold the other end open
                if not self._process.is_alive() and not self._connection.poll():
                    raise EOFError
            error, value = self._connection.recv()
        except (EOFError, ConnectionError):
            raise EngineFailedError(self._reason("the process ended")) from None
        self._is_starting = False
        if error is None:
            return value
        raise error(value if error is not EngineFailedError else self._reason(value))

    def encode(self, prompts: list[Any]) -> list[list[int]]:
        """Return the token ids of texts and conversations."""
        encoded: list[list[int]] = self._call(_encode_prompts, prompts)
        return encoded

    def run(self, requests: list[Request]) -> dict[str, Any]:
        """Run requests as one batch; see `run_requests`."""
        found: dict[str, Any] = self._call(run_requests, requests)
        return found

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function in the process and return its result."""
        with suppress(ConnectionError):  # the process ended: `result` raises
            self._connection.send((function, arguments))
        return self.result()

    def close(self) -> None:
        """End the process and those that vLLM started."""
        self._connection.close()
        try:
            if not self._is_starting:  # else it would not notice
                self._process.join(20)
        finally:  # also after a second Ctrl-C
            self._process.kill()
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid or 0, signal.SIGKILL)
            self._process.join()

    def _reason(self, message: str) -> str:
        return find_reason(
            message, self._log.read_text(errors="replace") if self._log.exists() else ""
        )


@cache
def _start_quiet_tracker() -> None:
    """Start the process that removes shared memory of engines that were killed, without warnings:
    they would follow the answer."""
    name = "PYTHONWARNINGS"
    given = os.environ.get(name)
    os.environ[name] = "ignore"
    try:
        resource_tracker.ensure_running()
    finally:
        del os.environ[name]
        if given is not None:
            os.environ[name] = given


def find_reason(message: str, log: str) -> str:
    """Return why an engine failed: the message, or the last error of the log if that says more."""
    if _ERROR.match(message) and not _NO_REASON.search(message):
        return message
    found = [line for line in _ERROR.findall(log) if not _NO_REASON.search(line)]
    return found[-1] if found else message


def _serve(
    connection: Any, setting: Setting, arguments: list[str], log: str, cache: str | None
) -> None:
    os.setpgid(0, 0)  # `close` ends the whole group; Ctrl-C goes to the parent alone
    if cache is not None:
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        root = os.environ.get(CACHE_ROOT) or os.path.join(caches, "vllm")
        os.environ[CACHE_ROOT] = os.path.join(root, cache)
    with open(log, "w") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    try:
        try:
            engine_arguments = _engine_arguments(setting, arguments)
        except (ConfigError, HostError) as error:
            connection.send((type(error), str(error)))
            return
        from vllm import LLMEngine
        from vllm.usage.usage_lib import UsageContext

        engine = LLMEngine.from_engine_args(engine_arguments, UsageContext.OPENAI_API_SERVER)
        _check_drafter(setting, engine.vllm_config.speculative_config)
        value = _described(engine)
        while True:
            try:
                connection.send((None, value))
                function, given = connection.recv()
            except (EOFError, ConnectionError):  # the parent closed the connection
                engine.engine_core.shutdown()
                return
            value = function(engine, *given)
    except Exception as error:
        traceback.print_exc()
        connection.send((EngineFailedError, f"{type(error).__name__}: {error}"))


def _engine_arguments(setting: Setting, arguments: list[str]) -> Any:
    """Return vLLM's ``EngineArgs``: those of the user, with the drafts of the setting."""
    from mtp_plugin.hosts.vllm.checks import examine

    problems = examine().problems
    if problems:
        raise HostError("; ".join(problems))
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> None:
            raise ConfigError(f"engine arguments: {message}")

    given = EngineArgs.from_cli_args(EngineArgs.add_cli_args(Parser()).parse_args(arguments))
    given.speculative_config = setting.speculative_config()
    if setting.has_plugin:
        given.additional_config = {"mtp_plugin": setting.plugin_options()}
    given.disable_log_stats = False
    return given


def _check_drafter(setting: Setting, used: Any) -> None:
    """vLLM drafts with the MTP layers of a draft model whose family has such layers."""
    expected = (setting.speculative_config() or {}).get("method")
    if used is not None and used.method != expected:
        raise HostError(
            f"vLLM drafts with {used.method!r} in place of {expected!r}, since the family of the "
            "draft model has MTP layers: take another draft model, or --drafter mtp"
        )


def _described(engine: Any) -> dict[str, Any]:
    import vllm
    from vllm.platforms import current_platform

    config = engine.vllm_config
    text_config = config.model_config.hf_text_config
    return {
        "vllm": str(vllm.__version__),
        "device": current_platform.get_device_name(),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "num_mtp_layers": getattr(text_config, "num_nextn_predict_layers", None),
    }


def _encode_prompts(engine: Any, prompts: list[Any]) -> list[list[int]]:
    return encode_prompts(engine.get_tokenizer(), prompts)


def encode_prompts(tokenizer: Any, prompts: list[Any]) -> list[list[int]]:
    """Return the token ids of texts and conversations."""
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, list) and getattr(tokenizer, "chat_template", None):
            prompt = tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True
            )
            encoded.append(list(tokenizer.encode(prompt, add_special_tokens=False)))
            continue
        if isinstance(prompt, list):
            prompt = "\n".join(filter(None, map(text_of_message, prompt)))
        encoded.append(list(tokenizer.encode(prompt)))
    return encoded


def run_requests(engine: Any, requests: list[Request]) -> dict[str, Any]:
    """Run requests as one batch.

    Returns:
        ``tokens`` of each, ``step_ms`` of the steps in which all of them generate, and
        ``acceptance``: the share of steps that accept at least i + 1 drafts.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    before = _counters(engine)
    for number, (prompt, options) in enumerate(requests):
        params = SamplingParams(detokenize=False, output_kind=RequestOutputKind.DELTA, **options)
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    tokens: list[list[int]] = [[] for _ in requests]
    clock = StepClock(len(requests))
    while engine.has_unfinished_requests():
        num_emitted = num_finished = 0
        for output in engine.step():
            new = list(output.outputs[0].token_ids)
            tokens[int(output.request_id.split("-")[0])] += new
            num_emitted += bool(new)
            num_finished += output.finished
        clock.add(num_emitted, num_finished)
    drafts, *accepted = (
        now - then for now, then in zip_longest(_counters(engine), before, fillvalue=0)
    )
    acceptance = [number / drafts for number in accepted] if drafts else []
    return {"tokens": tokens, "step_ms": clock.step_ms, "acceptance": acceptance}


class StepClock:
    """Times the steps of a batch in which all its requests generate."""

    def __init__(self, num_requests: int) -> None:
        self.step_ms: list[float] = []
        self._num_requests = num_requests
        self._last, self._was_full, self._num_finished = 0.0, False, 0

    def add(self, num_emitted: int, num_finished: int) -> None:
        """Add a step that has just ended, with the numbers of requests that got tokens, and
        that ended."""
        self._num_finished += num_finished
        if not num_emitted:
            return
        now = time.perf_counter()
        is_full = num_emitted == self._num_requests and not self._num_finished
        if is_full and self._was_full:
            self.step_ms.append(1000 * (now - self._last))
        self._last, self._was_full = now, is_full


def _counters(engine: Any) -> list[int]:
    """Return vLLM's numbers of draft steps, and of accepted drafts by position."""
    drafts, accepted = 0, [0]
    for metric in engine.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            drafts += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            accepted = [a + b for a, b in zip_longest(accepted, metric.values, fillvalue=0)]
    return [drafts, *accepted]
