"""How many launches a step of a worker takes, by what its requests ask for."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from integration.bench.shapes import REFERENCE, TINY, Shape
from integration.bench.step_cases import DRAWS, KINDS, Kind, kind_cases, step_cases
from integration.bench.timing import count_launches
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.verification.contract import VerificationMode
from mtp_plugin.speculative.verification.draft_rules import GREEDY_DRAFTS

CPU = torch.device("cpu")
THINKING = {"begin_thinking_phase_token": 5, "end_thinking_phase_token": 6}
OTHERS = {
    "rejection": Kind({**DRAWS, "verification": "rejection"}, mtp={"verification": "rejection"}),
    "block": Kind({**DRAWS, "verification": "block"}, mtp={"verification": "block"}),
    "beside-rejection": Kind(DRAWS, mtp={"verification": ["coupled", "rejection"]}),
    "processed": Kind({**DRAWS, "logprobs": 2}, mtp={"logprobs_mode": "processed"}),
    "budget": Kind({**DRAWS, "thinking_token_budget": 4}, config=THINKING),
}
"""Kinds that are not timed, and what they take more than a step that draws or edits."""
JUDGED = {"piece": 1, "finish": 1}
"""Of a step: the odds of all drafts at once, and who stands."""
GREEDY = {
    ("vanilla", 1): {"top1": 2, "emit": 1, "generation": 1, "place": 1},
    ("eagle", 1): {"top1": 2, "emit": 1, "accepted_rows": 1, "index": 1, "place": 1},
    ("vanilla", 3): {"top1": 4, "emit": 1, "generation": 1, "place": 3},
    ("eagle", 3): {"top1": 4, "emit": 1, "accepted_rows": 1, "index": 1, "place": 3},
}
"""As many as before requests could draw: 5, 6, 9 and 10."""
BEFORE = {("vanilla", 1): 5, ("eagle", 1): 6, ("vanilla", 3): 9, ("eagle", 3): 10}
HOST = {"ones_like", "new_ones", "clone", "lift_fresh", "fill_"}
"""Of lengths that the host keeps."""
VIEWS = {"view", "slice", "select", "unsqueeze", "unbind", "detach"}
WORKERS = ("vanilla", "eagle")


def expected(worker: str, k: int, kind: str) -> Counter[str]:
    """Every draw is a scan of parts and a choice among what they leave, in place of an argmax."""
    launches = Counter(GREEDY[worker, k])
    if not kind:
        return launches
    draws = k + 1  # of the target and of every pass of the draft loop
    assert launches.pop("top1") == draws
    # and so are log-probabilities, of the target's rows; where these are not edited, of what the
    # draw's scan has left
    launches |= {"scan": draws + int(kind == "edits"), "finish": draws + 1}
    if kind == "edits":
        # what is banned for a while, and what was emitted
        launches |= {"hide": 1, "restore": 1, "token_history": 1}
    return launches


def expected_of_others(worker: str, k: int, kind: str) -> Counter[str]:
    """Of the kinds that are not timed."""
    if kind in ("rejection", "block", "beside-rejection"):
        # whatever a request asks for, who reads what drafts are drawn from keeps it of every pass
        return expected(worker, k, "draws") + Counter(JUDGED) + Counter({"keep": k})
    if kind == "processed":
        # scores are made once, and looked at like raw rows
        return expected(worker, k, "edits") + Counter({"processed": 1})
    return expected(worker, k, "edits") + Counter({"force": 1, "note": 1})


def case_of(worker: str, kind: str, shape: Shape, device: torch.device):
    kinds = {**KINDS, **OTHERS}
    cases = kind_cases(shape, device, kinds) if kind else step_cases(shape, device)
    (case,) = [each for each in cases if each.name == f"step/{worker}" + f"-{kind}" * bool(kind)]
    return case


class Launches(TorchDispatchMode):
    """What would be launched on a device: kernels, and torch's ops outside of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        from triton.runtime.interpreter import InterpretedFunction

        self.counts: Counter[str] = Counter()
        self._inside = False
        run = InterpretedFunction.run

        def count(kernel, *arguments, **options):
            self.counts[kernel.__name__.removesuffix("_kernel")] += 1
            self._inside = True  # the interpreter's own copies
            try:
                return run(kernel, *arguments, **options)
            finally:
                self._inside = False

        monkeypatch.setattr(InterpretedFunction, "run", count)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.__name__.split(".")[0]
        if not self._inside and "empty" not in name and name not in VIEWS | HOST:
            self.counts[name] += 1
        return op(*args, **(kwargs or {}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("k", [1, 3])
def test_launches_of_a_step(k: int, worker: str, kind: str, monkeypatch) -> None:
    shape = dataclasses.replace(TINY, batch=2, k=k)
    trial = case_of(worker, kind, shape, CPU).prepare(0)
    with Launches(monkeypatch) as launches:
        trial.run(Backend.TRITON)
    assert launches.counts == expected(worker, k, kind)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("worker", WORKERS)
def test_launches_of_a_step_of_other_kinds(worker: str, kind: str, monkeypatch) -> None:
    k = 3
    trial = case_of(worker, kind, dataclasses.replace(TINY, batch=2, k=k), CPU).prepare(0)
    with Launches(monkeypatch) as launches:
        trial.run(Backend.TRITON)
    assert launches.counts == expected_of_others(worker, k, kind)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind])
@pytest.mark.parametrize("worker", WORKERS)
def test_greedy_drafts_take_as_many_launches_whatever_is_asked(
    worker: str, kind: str, monkeypatch
) -> None:
    """They see edits in the launch that looks for the highest logit."""
    k = 3
    monkeypatch.setattr(VerificationMode, "draft_rule", GREEDY_DRAFTS)
    trial = case_of(worker, kind, dataclasses.replace(TINY, batch=2, k=k), CPU).prepare(0)
    with Launches(monkeypatch) as launches:
        trial.run(Backend.TRITON)
    told = expected(worker, k, kind)
    told.subtract({"scan": k, "finish": k})
    told += Counter({"edited_top1" if kind == "edits" else "top1": k})
    assert launches.counts == told


@pytest.mark.parametrize(("worker", "k"), BEFORE)
def test_greedy_steps_take_no_launch_more_than_before(worker: str, k: int) -> None:
    assert expected(worker, k, "").total() == BEFORE[worker, k]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize(("k", "batch"), [(1, 8), (3, 1), (3, 64)])
def test_launches_of_a_captured_step(k: int, batch: int, worker: str, kind: str) -> None:
    """At the sizes of real models."""
    shape = dataclasses.replace(REFERENCE, k=k, batch=batch)
    run = case_of(worker, kind, shape, torch.device("cuda")).prepare(0).run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(Backend.TRITON)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream):
        run(Backend.TRITON)
    launches = count_launches(graph, 1, lambda: run(Backend.TRITON))
    assert launches is not None
    assert launches.source == "graph"
    assert launches.kernels == expected(worker, k, kind).total()
    assert launches.copies == launches.memsets == 0
