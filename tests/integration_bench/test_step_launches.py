"""Number of kernel launches of a worker's step, by kind of requests."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from integration.bench.case import REFERENCE, TINY, Shape
from integration.bench.ops import capture, count_launches
from integration.bench.step_cases import DRAWS, KINDS, Kind, kind_cases, step_cases
from mtp_plugin.ops.backend import Backend
from mtp_plugin.speculative.verification.draft_rules import GREEDY_DRAFTS
from mtp_plugin.speculative.verification.mode import VerificationMode

CPU = torch.device("cpu")
THINKING = {"begin_thinking_phase_token": 5, "end_thinking_phase_token": 6}
OTHERS = {
    "rejection": Kind({**DRAWS, "verification": "rejection"}, mtp={"verification": "rejection"}),
    "block": Kind({**DRAWS, "verification": "block"}, mtp={"verification": "block"}),
    "with-rejection": Kind(DRAWS, mtp={"verification": ["coupled", "rejection"]}),
    "processed": Kind({**DRAWS, "logprobs": 2}, mtp={"logprobs_mode": "processed"}),
    "budget": Kind({**DRAWS, "thinking_token_budget": 4}, config=THINKING),
}
"""Kinds of requests that no benchmark times."""
GREEDY = {("vanilla", 1): 5, ("eagle", 1): 6, ("vanilla", 3): 9, ("eagle", 3): 10}
"""Launches of a greedy step."""
HOST = {"ones_like", "new_ones", "clone", "lift_fresh", "fill_"}
"""Ops on sequence lengths that the host keeps."""
VIEWS = {"view", "slice", "select", "unsqueeze", "unbind", "detach"}
WORKERS = ("vanilla", "eagle")


def expected(worker: str, k: int, kind: str) -> int:
    launches = GREEDY[worker, k]
    if not kind:
        return launches
    # sampling is a scan and a finish instead of one argmax, for the target and each draft;
    # log-probabilities are one launch
    launches += k + 2
    if kind in ("draws", "with-rejection", "rejection", "block"):
        # rejection keeps the distribution of each draft; two launches verify all drafts
        return launches if kind == "draws" else launches + k + 2
    # scan of unprocessed logits, masking, unmasking, token history
    launches += 4
    return launches + {"edits": 0, "processed": 1, "budget": 2}[kind]


def case_of(worker: str, kind: str, shape: Shape, device: torch.device):
    kinds = {**KINDS, **OTHERS}
    cases = kind_cases(shape, device, kinds) if kind else step_cases(shape, device)
    (case,) = [each for each in cases if each.name == f"step/{worker}" + f"-{kind}" * bool(kind)]
    return case


class Launches(TorchDispatchMode):
    """Counts kernels and the torch ops outside of them, by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        from triton.runtime.interpreter import InterpretedFunction

        self.counts: Counter[str] = Counter()
        self._inside = False
        run = InterpretedFunction.run

        def count(kernel, *arguments, **options):
            self.counts[kernel.__name__.removesuffix("_kernel")] += 1
            self._inside = True  # the interpreter copies tensors
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
@pytest.mark.parametrize(
    ("k", "worker", "kind"),
    [
        *((1, worker, "") for worker in WORKERS),
        *((3, worker, kind) for worker in WORKERS for kind in KINDS),
        *((3, "eagle", kind) for kind in OTHERS),
    ],
)
def test_step_launches(k: int, worker: str, kind: str, monkeypatch) -> None:
    shape = dataclasses.replace(TINY, batch=2, k=k)
    trial = case_of(worker, kind, shape, CPU).prepare(0)
    with Launches(monkeypatch) as launches:
        trial.run(Backend.TRITON)
    assert launches.counts.total() == expected(worker, k, kind), launches.counts


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")
def test_greedy_drafts_need_one_launch_each(monkeypatch) -> None:
    k, worker, kind = 3, "eagle", "draws"
    monkeypatch.setattr(VerificationMode, "draft_rule", GREEDY_DRAFTS)
    trial = case_of(worker, kind, dataclasses.replace(TINY, batch=2, k=k), CPU).prepare(0)
    with Launches(monkeypatch) as launches:
        trial.run(Backend.TRITON)
    assert launches.counts.total() == expected(worker, k, kind) - k, launches.counts


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("worker", WORKERS)
def test_captured_step_launches(worker: str, kind: str) -> None:
    k, batch = 3, 64
    shape = dataclasses.replace(REFERENCE, k=k, batch=batch)
    run = case_of(worker, kind, shape, torch.device("cuda")).prepare(0).run
    graph, _ = capture(lambda: [run(Backend.TRITON)])
    launches = {"kernels": expected(worker, k, kind), "copies": 0, "memsets": 0, "others": 0}
    assert count_launches(graph) == launches
