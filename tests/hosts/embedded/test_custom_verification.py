"""Verification methods from outside the package in whole generations."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from typing_extensions import override

from integration.examples.top2 import Top2Verification
from mtp_plugin import CustomVerification, SamplingParams, register_verification
from mtp_plugin.errors import RequestError
from mtp_plugin.plugin import unregister_verification
from tests.hosts.embedded.conftest import LOOPS, assert_drained, pads_batches
from tests.hosts.embedded.replays import WatchedGraphs

METHODS = ("coupled", "top2", "exact", "rejection")
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.9},
    "processed": {"temperature": 0.7, "frequency_penalty": 0.4, "logit_bias": {5: 1.0, 7: -4.0}},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": (3, 4, 5), "ignore_eos": False},
}


class ExactVerification(CustomVerification):
    """Accepts target tokens only, as ``coupled`` does; reads the logit of each draft."""

    description = "accept a draft that is the target token"
    keeps_output = True

    @override
    def num_accepted(
        self, logits: torch.Tensor, draft_tokens: torch.Tensor, target_tokens: torch.Tensor
    ) -> torch.Tensor:
        values = logits[:, :-1].gather(-1, draft_tokens.unsqueeze(-1)).squeeze(-1)
        is_target = (draft_tokens == target_tokens[:, :-1]) & (values > -torch.inf)
        return is_target.to(torch.int64).cumprod(dim=1).sum(dim=1)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    methods = {"top2": Top2Verification(), "exact": ExactVerification()}
    for name, method in methods.items():
        register_verification(name, method)
    yield
    for name in methods:
        unregister_verification(name)


def params(method: str, kind: str, seed: int) -> SamplingParams:
    options = {"max_new_tokens": 20, "ignore_eos": True, "seed": seed, **OPTIONS[kind]}
    return SamplingParams(**options, verification=method)


def requests(methods: Callable[[int], str], prompts: list[list[int]]) -> list[SamplingParams]:
    """One of each kind in turn; ``methods``: index of a request -> its method."""
    kinds = list(OPTIONS)
    return [params(methods(i), kinds[i // 2 % len(kinds)], i) for i in range(len(prompts))]


@pytest.mark.parametrize(("vanilla", "no_overlap"), [(False, False), (True, True)])
def test_exact_method_has_the_output_of_coupled(harness, prompts, vanilla, no_overlap):
    options = {"vanilla": vanilla, "disable_overlap_scheduler": no_overlap}
    coupled = harness.llm(**options)
    expected = coupled.generate(prompts, requests(lambda _: "coupled", prompts))
    llm = harness.llm(mtp={"verification": "exact"}, **options)
    outputs = llm.generate(prompts, requests(lambda _: "exact", prompts))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert llm.executor.acceptance.histogram == coupled.executor.acceptance.histogram
    assert all(output.label is None for output in outputs)
    assert_drained(llm)


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_methods_mix_in_one_batch(harness, prompts, monkeypatch, graphs, no_overlap):
    """Output of coupled and exact requests is that of a batch of coupled requests, and output of
    other methods is the same with graphs."""
    options: dict[str, Any] = {"disable_overlap_scheduler": no_overlap}
    every = requests(lambda _: "coupled", prompts)
    expected = [o.token_ids for o in harness.llm(**options).generate(prompts, every)]
    if graphs:
        pads_batches(harness)
        options["cuda_graph_config"] = {
            "batch_sizes": [1, 2, 4, 8],
            "enable_padding": True,
            "capture": "all",
        }
    llm = harness.llm(mtp={"verification": list(METHODS)}, **options)
    watched = WatchedGraphs(llm, monkeypatch) if graphs else None
    outputs = llm.generate(prompts, requests(lambda i: METHODS[i % 4], prompts))
    for i in (0, 2, 4, 6):
        assert outputs[i].token_ids == expected[i]
    assert outputs[1].token_ids != expected[1]
    if watched is not None:
        assert watched.replayed
        assert not watched.eager_generations
    assert_drained(llm)


def test_method_that_is_not_enabled_is_refused(harness):
    llm = harness.llm(mtp={"verification": ["coupled", "exact"]})
    with pytest.raises(RequestError, match="verification='top2' is not enabled; add it to"):
        llm.generate([[1]], params("top2", "greedy", 0))
    with pytest.raises(RequestError, match="or the name of a registered method, got 'top3'"):
        params("top3", "greedy", 0)
    with pytest.raises(RequestError, match="draft_sampling='plain' cannot be verified by 'exact'"):
        SamplingParams(verification="exact", draft_sampling="plain")


def test_unregistered_method_stays_in_engines_that_use_it(harness, prompts):
    method = ExactVerification()
    register_verification("once", method)
    llm = harness.llm(mtp={"verification": ["once", "top2"]})
    expected = llm.generate(prompts, params("top2", "greedy", 0))
    unregister_verification("once")
    unregister_verification("top2")
    try:
        outputs = llm.generate(prompts, params("top2", "greedy", 0))
        others = llm.generate(prompts, [params("once", "greedy", 0), SamplingParams()] * 4)
    finally:
        register_verification("top2", Top2Verification())
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [o.label for o in outputs] == [o.label for o in expected] != [None] * len(prompts)
    assert [o.label for o in others] == [None] * len(prompts)


class FailingVerification(ExactVerification):
    """Fails in its second step."""

    description = "fail"

    def __init__(self, result: Any = None) -> None:
        self.result = result
        self.num_steps = 0

    @override
    def num_accepted(self, *tensors: torch.Tensor) -> torch.Tensor:
        self.num_steps += 1
        if self.num_steps != 2:
            return super().num_accepted(*tensors)
        if self.result is None:
            raise IndexError("list index out of range")
        return self.result


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "verification method 'fails': num_accepted raised IndexError: list index out of"),
        (3, "verification method 'fails': result of num_accepted: expected .*, got 3"),
    ],
    ids=["raises", "returns another type"],
)
@pytest.mark.parametrize(("vanilla", "no_overlap"), [(False, False), (True, True)])
def test_failing_method_ends_its_requests_alone(
    harness, prompts, vanilla, no_overlap, result, message
):
    options = {"vanilla": vanilla, "disable_overlap_scheduler": no_overlap}
    options |= {"cuda_graph_config": None} if "cuda_graph_config" in harness.host else {}
    register_verification("fails", FailingVerification(result))
    try:
        llm = harness.llm(mtp={"verification": ["coupled", "fails"]}, **options)
        outputs = llm.generate(prompts, requests(lambda i: ("coupled", "fails")[i % 2], prompts))
    finally:
        unregister_verification("fails")
    coupled = harness.llm(**options).generate(prompts, requests(lambda _: "coupled", prompts))
    for i, (output, expected) in enumerate(zip(outputs, coupled, strict=True)):
        if i % 2:
            assert re.search(message, output.error), output
        else:
            assert output.token_ids == expected.token_ids
    assert_drained(llm)
