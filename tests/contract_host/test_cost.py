"""What the adapter's own objects cost a step: calls and launches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtp_plugin.hosts.embedded.models import LoadedModel
from tests.contract_host.host import make_host
from tests.contract_host.line_rules import FULL
from tests.contract_host.test_loop import ask

MOST_CALLS = 17  # one is of the host: its draft KV cache

lines = pytest.mark.parametrize("line", FULL)
ways = pytest.mark.parametrize("vanilla", [False, True], ids=["eagle", "vanilla"])

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Step:
    """The pieces of a warm host, and what they were called with in a step of generations."""

    worker: Any
    metadata: Any
    sampler: Any
    worker_call: Call
    sample_call: Call
    update_call: Call

    @property
    def own_worker(self) -> Any:
        return self.worker.mtp_plugin_worker

    @property
    def own_sampler(self) -> Any:
        return self.sampler.mtp_plugin_sampler


def host_class(metadata: Any) -> type:
    """The host's own base class of the adapter's."""
    return type(metadata).__mro__[2]


@pytest.fixture
def step(line: str, vanilla: bool, tiny_model: LoadedModel, prompts: list[list[int]]) -> Step:
    host = make_host(line, tiny_model, vanilla=vanilla, overlap=False)
    pieces = host.engine.pieces
    calls: dict[str, Call] = {}

    def note(name: str, *arguments: Any, **named: Any) -> None:
        calls[name] = arguments, named

    hook = pieces.worker.register_forward_pre_hook(
        lambda _, arguments, named: note("worker", *arguments, **named), with_kwargs=True
    )
    for name in ("sample_async", "update_requests"):
        real = getattr(pieces.sampler, name)

        def noting(*arguments: Any, name: str = name, real: Any = real, **named: Any) -> Any:
            note(name, *arguments, **named)
            return real(*arguments, **named)

        setattr(pieces.sampler, name, noting)
    host.generate(ask(prompts, [12] * 4))
    hook.remove()
    for name in ("sample_async", "update_requests"):
        delattr(pieces.sampler, name)
    metadata = host.engine.spec_metadata
    names = ("worker", "sample_async", "update_requests")
    return Step(pieces.worker, metadata, pieces.sampler, *(calls[name] for name in names))


# ---- calls ----------------------------------------------------------------------------------


def num_calls(call: Callable[[], Any]) -> int:
    """Python functions that are entered; Python 3.12 counts comprehensions no more than 3.10."""
    counted = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal counted
        counted += event == "call" and not frame.f_code.co_name.startswith("<")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(before)
    return counted


@lines
@ways
def test_a_step_costs_few_calls_more(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """All components return at once: what remains is the adapter."""
    outputs: dict[str, torch.Tensor] = {}
    launched = step.update_call[0][0]
    own_state = launched.mtp_plugin
    own_metadata = step.metadata.mtp_plugin
    monkeypatch.setattr(step.own_worker, "forward", lambda *_, **__: outputs)
    monkeypatch.setattr(step.own_sampler, "sample_async", lambda *_: own_state)
    monkeypatch.setattr(step.own_sampler, "update_requests", lambda *_: None)
    host_metadata = host_class(step.metadata)
    monkeypatch.setattr(host_metadata, "prepare", lambda _: None)
    monkeypatch.setattr(own_metadata, "prepare", lambda: None)
    (arguments, named), (sampled, _) = step.worker_call, step.sample_call
    batch, results = sampled[:2]

    def both_prepare() -> None:
        host_metadata.prepare(step.metadata)
        own_metadata.prepare()

    pairs = {
        "worker": (
            lambda: step.worker(*arguments, **named),
            lambda: step.own_worker(*arguments, **named),
        ),
        "metadata.prepare": (step.metadata.prepare, both_prepare),
        "sample_async": (
            lambda: step.sampler.sample_async(*sampled),
            lambda: step.own_sampler.sample_async(batch, results),
        ),
        "update_requests": (
            lambda: step.sampler.update_requests(launched),
            lambda: step.own_sampler.update_requests(own_state),
        ),
    }
    assert step.worker(*arguments, **named) is outputs
    assert step.sampler.sample_async(*sampled).mtp_plugin is own_state
    calls = {name: num_calls(adapted) - num_calls(bare) for name, (adapted, bare) in pairs.items()}
    assert sum(calls.values()) <= MOST_CALLS, calls


# ---- launches -----------------------------------------------------------------------------------


class Launches(TorchDispatchMode):
    """Torch's ops by where they come from: the adapter itself, or a piece that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, list[str]] = {"adapter": [], "piece": []}
        self.entered: list[str] = []

    def __torch_dispatch__(
        self, op: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        if self.entered:
            self.of[self.entered[-1]].append(str(op))
        return op(*arguments, **(named or {}))

    def watch(self, patch: pytest.MonkeyPatch, owner: Any, name: str, place: str) -> None:
        real = getattr(owner, name)

        def entered(*arguments: Any, **named: Any) -> Any:
            self.entered.append(place)
            try:
                return real(*arguments, **named)
            finally:
                self.entered.pop()

        patch.setattr(owner, name, entered)


@lines
@ways
def test_nothing_else_is_launched(
    line: str,
    vanilla: bool,
    tiny_model: LoadedModel,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over whole generations: chunks of prompts, first choices and draws."""
    host = make_host(line, tiny_model, vanilla=vanilla, overlap=True, chunk_tokens=32)
    pieces, metadata = host.engine.pieces, host.engine.spec_metadata
    ops = Launches()
    for owner, name in (
        (host_class(metadata), "prepare"),
        (metadata.mtp_plugin, "prepare"),
        (pieces.worker.mtp_plugin_worker, "forward"),
        (pieces.sampler.mtp_plugin_sampler, "sample_async"),
        (pieces.sampler.mtp_plugin_sampler, "update_requests"),
    ):
        ops.watch(monkeypatch, owner, name, "piece")
    for owner, name in (
        (type(metadata), "prepare"),
        (pieces.worker, "forward"),
        (pieces.sampler, "sample_async"),
        (pieces.sampler, "update_requests"),
    ):
        ops.watch(monkeypatch, owner, name, "adapter")
    requests = ask(prompts, [8] * 3)
    requests[0].sampling_config = SimpleNamespace(temperature=[0.8], random_seed=[5])
    with ops:
        host.generate(requests)
    # a slice is a view
    assert [op for op in ops.of["adapter"] if op != "aten.slice.Tensor"] == []
    assert len(ops.of["piece"]) > 20 * host.engine.num_forwards
