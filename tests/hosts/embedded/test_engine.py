"""The engine thread: what callers may rely on, whichever thread they run in."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from mtp_plugin.errors import ExecutorError
from mtp_plugin.hosts.embedded.engine import WITHIN_A_STEP
from tests.hosts.embedded.conftest import TRAINED, assert_drained
from tests.hosts.embedded.test_llm_api import Pieces, by_request, greedy


def watch_steps(llm: Any, call: Any) -> None:
    """Call a function with the batch of every step, before it runs."""
    forward = llm.executor.engine.forward

    def watched(batch: Any, *args: Any) -> Any:
        call(batch)
        return forward(batch, *args)

    llm.executor.engine.forward = watched


# --- (a) batches ---


def test_prompts_of_one_call_enter_one_step_in_the_order_of_the_call(harness, prompts) -> None:
    llm = harness.llm()
    batches: list[list[int]] = []
    watch_steps(llm, lambda batch: batches.append([r.request_id for r in batch.context_requests]))
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(llm.generate, prompts[:2], greedy(6)) for _ in range(12)]
        ids = [[output.request_id for output in call.result(60)] for call in calls]
    entered = [batch for batch in batches if batch]
    for first, second in ids:
        assert first < second
        assert any({first, second} <= set(batch) for batch in entered)
    assert sorted(request_id for batch in entered for request_id in batch) == list(range(24))


# --- (b) state of the thread ---


def test_steps_run_in_inference_mode_in_one_thread(harness) -> None:
    llm = harness.llm()
    seen: set[tuple[bool, str]] = set()
    watch_steps(
        llm,
        lambda _: seen.add((torch.is_inference_mode_enabled(), threading.current_thread().name)),
    )
    llm.generate([[1], [2]], greedy(4))
    asyncio.run(llm.generate_async([1, 2], greedy(4)))
    assert seen == {(True, "mtp-engine")}


@pytest.mark.gpu
def test_steps_run_on_the_device_and_stream_of_the_constructor(harnesses) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        llm = harnesses("echo", {"device": "cuda"}).llm()
    seen: set[Any] = set()
    watch_steps(llm, lambda _: seen.add(torch.cuda.current_stream().cuda_stream))
    llm.generate([[1], [2]], greedy(4))
    assert seen == {stream.cuda_stream}


# --- (c) lifetime ---


def test_thread_ends_when_the_executor_is_dropped(harness) -> None:
    gc.collect()
    gc.disable()
    try:
        llm = harness.llm(tokenizer=Pieces())
        llm.generate([[1, 2]], greedy(4))
        thread = llm._engine._thread
        parts = [weakref.ref(part) for part in (llm, llm._engine, llm.executor, llm.pools)]
        del llm
        thread.join(20)
        assert not thread.is_alive()
        assert [part() for part in parts] == [None] * 4
    finally:
        gc.enable()


EXITS = {
    "running": "handle = llm.submit([1, 2], params); raise SystemExit(0)",
    "unread stream": "stream = llm.stream([[1, 2]], params); next(stream)",
    "in a cycle": "llm.me = llm; handle = llm.submit([1, 2], params); del llm, handle",
    "async": "import asyncio; asyncio.run(llm.generate_async([1, 2], params))",
}


EXIT_EACH = f"""
import json, os, sys
import torch
torch.set_num_threads(1)  # a child has no threads of its parent
from mtp_plugin import LLM, SamplingParams
from mtp_plugin.hosts.embedded.models import load_model
model = load_model({TRAINED!r}, num_mtp_layers=1)
for name, code in json.loads(sys.argv[1]).items():
    child = os.fork()
    if child == 0:
        llm = LLM({{"model": {TRAINED!r}, "device": "cpu"}}, model=model)
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        exec(code)
        break  # to the exit of the interpreter
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_interpreter_exits_without_shutdown() -> None:
    """Each in a child, which need not import everything again."""
    program = [sys.executable, "-c", EXIT_EACH, json.dumps(EXITS)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"{name} 0" for name in EXITS]


# --- (d) calls within a step ---


def test_callback_may_submit_and_abort_but_not_wait(harness, target) -> None:
    errors: list[str] = []
    handles: list[Any] = []

    def callback(_: Any) -> None:
        if handles:
            return
        handles.append(llm.submit([4, 5], greedy(6)))
        handles.append(llm.submit([7, 8], greedy(100)))
        assert llm.abort(handles[1].request_id)
        calls = (
            lambda: llm.generate([1], greedy(2)),
            lambda: next(llm.stream([1], greedy(2))),
            handles[0].result,
            lambda: asyncio.run(llm.generate_async([1], greedy(2))),
        )
        for call in calls:
            with pytest.raises(ExecutorError) as refused:
                call()
            errors.append(str(refused.value))

    llm = harness.llm(stop_callback=callback)
    (output,) = llm.generate([[1, 2, 3]], greedy(12))
    assert output.token_ids == target.greedy([1, 2, 3], 12)
    assert errors == [WITHIN_A_STEP] * 4
    assert handles[0].result().token_ids == target.greedy([4, 5], 6)
    assert handles[1].result().finish_reason == "abort"
    assert_drained(llm)


# --- (e) slow readers ---


def test_reader_that_lags_gets_the_events_before_a_failing_step(harness, target, prompts) -> None:
    llm = harness.llm()

    def fail(_: Any) -> None:
        if llm.executor.num_steps == 15:
            raise RuntimeError("broken kernel")

    watch_steps(llm, fail)
    stream = llm.stream([prompts[0]], greedy(100))
    steps = [next(stream)]
    with pytest.raises(RuntimeError, match="broken kernel"):
        llm.generate([prompts[1]], greedy(100))  # the steps go on
    with pytest.raises(RuntimeError, match="broken kernel"):
        steps.extend(stream)
    tokens = by_request(steps)[0]
    assert tokens == target.greedy(prompts[0], 100)[: len(tokens)]
    assert len(tokens) > 12
    assert_drained(llm)


def test_request_that_arrives_while_a_step_fails_is_served(harness, target, prompts) -> None:
    llm, late = harness.llm(), []

    def fail(_: Any) -> None:
        if not late:
            late.append(llm.submit(prompts[1], greedy(20)))
            raise RuntimeError("broken kernel")

    watch_steps(llm, fail)
    with pytest.raises(RuntimeError, match="broken kernel"):
        llm.generate([prompts[0]], greedy(20))
    assert late[0].result().token_ids == target.greedy(prompts[1], 20)
    assert_drained(llm)


def test_request_submitted_in_a_step_that_preempts_another_is_served(
    harness, target, prompts
) -> None:
    late: list[Any] = []

    def callback(_: Any) -> None:
        if llm.executor.num_preemptions and not late:
            late.append(llm.submit([4, 5], greedy(20)))

    llm = harness.llm(stop_callback=callback, kv_cache_config={"max_tokens": 128})
    outputs = llm.generate(prompts[:4], greedy(60))
    assert [o.token_ids for o in outputs] == [target.greedy(p, 60) for p in prompts[:4]]
    assert late.pop().result().token_ids == target.greedy([4, 5], 20)
    assert_drained(llm)


# --- (f) callers that leave ---


def test_failure_of_the_thread_reaches_every_caller(harness, monkeypatch, caplog) -> None:
    llm = harness.llm()
    handle = llm.submit([1, 2], greedy(100))

    def broken(_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(llm._engine, "_deliver", broken)
    with pytest.raises(ExecutorError, match="shut down"):
        handle.result()
    assert not llm.is_running
    with pytest.raises(ExecutorError, match="shut down"):
        llm.generate([[1]], greedy(2))
    assert "the engine thread failed" in caplog.text
