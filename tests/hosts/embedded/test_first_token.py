"""Steps with prompts return their tokens before their draft passes have run.

The substitute device counts draft passes: an event holds how many had been launched on its stream,
and `synchronize` notes that number as what the host has waited for.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from mtp_plugin.hosts.embedded import SamplingParams
from mtp_plugin.speculative import result_store, sampler, verified_tokens

K = 3
PASSES = K  # of the reused layer, in every step


class Stream:
    """A stream and the number of draft passes that precede its next operation."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.waited: list[Event] = []
        self.num_passes = 0

    def wait_event(self, event: Event) -> None:
        self.waited.append(event)
        self.num_passes = max(self.num_passes, event.num_passes)


class Event:
    def __init__(self, device: Device, *, external: bool) -> None:
        self.device = device
        self.external = external
        self.num_passes = device.current.num_passes

    def synchronize(self) -> None:
        self.device.waits.append(self.num_passes)


class Device:
    def __init__(self) -> None:
        self.main = self.current = Stream(self)
        self.side = Stream(self)
        self.waits: list[int] = []

    def recorded_event(self, _: torch.device, *, external: bool = False) -> Event:
        return Event(self, external=external)

    @contextmanager
    def stream(self, stream: Stream):
        assert stream is self.side
        self.current = stream
        yield
        self.current = self.main

    def count_pass(self, *_: object) -> None:
        self.main.num_passes += 1

    def waited_for(self, llm) -> tuple[int, int]:
        """Run a step; return the draft passes launched before it, and those waited for in it."""
        launched = self.main.num_passes
        self.waits.clear()
        self.events = llm.executor.step()
        (waited,) = self.waits
        return launched, waited


@pytest.fixture
def device(harness, monkeypatch):
    device = Device()
    monkeypatch.setattr(verified_tokens, "recorded_event", device.recorded_event)
    monkeypatch.setattr(sampler, "recorded_event", device.recorded_event)
    monkeypatch.setattr(torch.cuda, "stream", device.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: device.main)
    hook = harness.model.mtp_layers[0].register_forward_pre_hook(device.count_pass)
    yield device
    hook.remove()


def enqueue(llm, prompt: list[int]) -> None:
    (request,) = llm.make_requests([prompt], [SamplingParams(max_new_tokens=20, ignore_eos=True)])
    llm.executor.enqueue(request)


def test_first_token_precedes_the_drafts(harness, target, device):
    llm = harness.llm(k=K)
    llm.pieces.sampler._copy_stream = device.side
    device.main.num_passes = 0  # building an executor runs a pass
    first, second = [5, 6, 7, 8], [9, 10, 11]
    enqueue(llm, first)
    assert llm.executor.step() == []
    assert device.main.num_passes == PASSES
    assert device.waited_for(llm) == (PASSES, 0)
    assert [event.token_ids for event in device.events] == [target.greedy(first, 1)]
    # its tokens are those of a step that only generates: the host waits for the drafts too
    assert device.waited_for(llm) == (2 * PASSES, 2 * PASSES)
    # a prompt among running requests: all tokens of the step precede its drafts
    enqueue(llm, second)
    assert device.waited_for(llm) == (3 * PASSES, 3 * PASSES)
    assert device.waited_for(llm) == (4 * PASSES, 3 * PASSES)
    assert [len(event.token_ids) > 0 for event in device.events] == [True, True]
    assert device.events[0].token_ids == target.greedy(second, 1)
    # neither buffer is written again before it is copied
    verified = device.side.waited
    assert len(verified) == len(device.main.waited) == 2
    assert all(event.external for event in verified)
    llm.shutdown()


@pytest.mark.parametrize(("k", "no_overlap"), [(K, True), (0, False)])
def test_other_loops_copy_once_a_step(harness, device, k, no_overlap):
    """Drafts that the host reads, or no drafts: there is nothing to return earlier."""
    llm = harness.llm(k=k, disable_overlap_scheduler=no_overlap)
    enqueue(llm, [5, 6, 7, 8])
    while llm.executor.has_work:
        llm.executor.step()
    assert not device.side.waited
    assert not device.main.waited
    llm.shutdown()


def test_end_of_the_step_is_recorded_once(harness, device, monkeypatch):
    """A step with prompts copies no second time, and one that only generates copies as before."""
    copies: list[str] = []
    host_copy = result_store.host_copy

    def count(name: str):
        def copy(tensor: torch.Tensor) -> torch.Tensor:
            copies.append(name)
            return host_copy(tensor)

        return copy

    monkeypatch.setattr(verified_tokens, "host_copy", count("tokens"))
    monkeypatch.setattr(result_store, "host_copy", count("store"))
    llm = harness.llm(k=K)
    llm.pieces.sampler._copy_stream = device.side
    enqueue(llm, [5, 6, 7, 8])
    for _ in range(3):
        llm.executor.step()
    assert copies == ["tokens", "store", "store"]
    llm.shutdown()
