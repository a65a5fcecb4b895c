"""What the adapter's own objects cost a step: calls and launches."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from mtp_plugin.hosts import tensorrt_llm
from tests.contract_host.conftest import ask
from tests.contract_host.test_loop import lines, ways

ROOT = str(Path(__file__).parents[2])
ADAPTER = str(Path(tensorrt_llm.__file__).parent)
MOST_CALLS = 17  # one is of the host: its draft KV cache
OWN = {"prepare", "forward", "decorate_context", "sample_async", "update_requests"}
"""Functions of the plugin's components that an engine without an adapter would call itself."""
NOT_COUNTED = {
    "prepare_resources",
    "update_resources",
    "update_is_all_greedy_sample",
    "populate_sampling_params_for_one_model",
    "dp_num_tokens",
    "write_padding_onehot_draft_probs",
}
"""What hosts may call in addition to `OWN`; it only passes the call on."""


def is_adapters(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(ADAPTER)


@lines
@pytest.mark.thinned("vanilla")
@ways
def test_a_step_costs_few_calls_more(vanilla, make, prompts):
    """Python functions that the adapter has and calls, in a step of four generations."""
    host = make(vanilla=vanilla, overlap=False)
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        name, caller = frame.f_code.co_name, frame.f_back
        # Python 3.12 counts comprehensions no more than 3.10 does
        if event != "call" or caller is None or name.startswith("<") or name in NOT_COUNTED:
            return
        if name == "__getattr__" and caller.f_code.co_filename.endswith("loop.py"):
            return  # this loop reads the manager's slots
        is_called = is_adapters(caller) and caller.f_code.co_name not in NOT_COUNTED
        if is_adapters(frame) or (is_called and name not in OWN):
            calls[name] += 1

    for request in ask(prompts, [12] * 4):
        host.executor.add(request)
    for _ in range(3):
        calls.clear()
        sys.setprofile(count)
        try:
            host.executor.step()
        finally:
            sys.setprofile(None)
    assert {"prepare", "mtp_plugin_run", "sample_async", "update_requests"} <= set(calls)
    assert calls.total() <= MOST_CALLS, calls
    host.executor.run()


class Launches(TorchDispatchMode):
    """Torch's ops: all of them counted, and those that the adapter calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ops = 0
        self.of_adapter: list[str] = []

    def __torch_dispatch__(
        self, op: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        caller: FrameType | None = sys._getframe(1)
        while caller is not None and not caller.f_code.co_filename.startswith(ROOT):
            caller = caller.f_back
        self.num_ops += 1
        if is_adapters(caller):
            self.of_adapter.append(str(op))
        return op(*arguments, **(named or {}))


@lines
@pytest.mark.thinned("vanilla")
@ways
def test_nothing_else_is_launched(vanilla, make, prompts):
    """Over whole generations: chunks of prompts, greedy and sampled tokens."""
    host = make(vanilla=vanilla, overlap=True, chunk_tokens=32)
    requests = ask(prompts, [6] * 3)
    requests[0].sampling_config = SimpleNamespace(temperature=[0.8], random_seed=[5])
    with Launches() as ops:
        host.generate(requests)
    # a slice is a view
    assert [op for op in ops.of_adapter if op != "aten.slice.Tensor"] == []
    assert ops.num_ops > 20 * host.engine.num_forwards
