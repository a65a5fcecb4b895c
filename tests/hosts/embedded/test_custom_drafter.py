"""Drafters from outside the package in whole generations."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from typing_extensions import override

import mtp_plugin.speculative.plugin.registry as registry
from integration.examples.lookup import LookupDrafter
from integration.examples.top2 import Top2Verification
from mtp_plugin import CustomDrafter, SamplingParams, register_drafter, register_verification
from mtp_plugin.errors import ConfigError, PluginError
from mtp_plugin.plugin import (
    find_plugin,
    propose_drafts,
    unregister_drafter,
    unregister_verification,
)
from tests.hosts.embedded.conftest import LOOPS, VOCAB, assert_drained, pads_batches
from tests.hosts.embedded.test_custom_verification import OPTIONS


class Recorded(CustomDrafter):
    """Proposes what a function returns, and checks its arguments."""

    def __init__(self, make: Callable[[torch.Tensor, torch.Tensor, int], Any]) -> None:
        self.make = make

    @override
    def propose(self, tokens: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
        assert tokens.dtype == torch.int32
        assert lengths.dtype == torch.int64
        assert ((tokens >= 0) & (tokens < VOCAB)).all()
        assert ((lengths >= 1) & (lengths <= tokens.shape[1])).all()
        proposed: torch.Tensor = self.make(tokens, lengths, k)
        return proposed


def rows(value: int) -> Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]:
    return lambda tokens, _, k: torch.full((len(tokens), k), value, device=tokens.device)


def mixed(tokens: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    """Absent, outside of the vocabulary and valid, by the length of the row."""
    ids = torch.tensor([-1, VOCAB, 3, -7, 2**31 - 1, 5, 0], device=tokens.device)
    columns = torch.arange(k, device=tokens.device)
    return ids[(lengths.unsqueeze(1) + columns) % len(ids)]


DRAFTERS: dict[str, CustomDrafter] = {
    "lookup": LookupDrafter(),
    "absent": Recorded(rows(-1)),
    "above": Recorded(rows(VOCAB)),
    "zero": Recorded(rows(0)),
    "mixed": Recorded(mixed),
}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    for name, drafter in DRAFTERS.items():
        register_drafter(name, drafter)
    yield
    for name in DRAFTERS:
        unregister_drafter(name)


def params(kinds: list[str], prompts: list[list[int]], **options: Any) -> list[SamplingParams]:
    return [
        SamplingParams(
            **{"max_new_tokens": 20, "ignore_eos": True, "seed": i}
            | OPTIONS[kinds[i % len(kinds)]]
            | options
        )
        for i in range(len(prompts))
    ]


def engine(harness: Any, name: str, *, k: int = 3, mtp: Any = None, **options: Any) -> Any:
    config = {"decoding_type": name, "max_draft_len": k, **({"mtp": mtp} if mtp else {})}
    return harness.llm(k=0, speculative_config=config, **options)


def num_accepted(llm: Any) -> int:
    histogram = llm.executor.acceptance.histogram  # by output tokens of a step
    return sum(max(tokens - 1, 0) * steps for tokens, steps in enumerate(histogram))


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_repeating_text_is_predicted(looping_harness, prompts, no_overlap):
    every = params(["greedy"], prompts, max_new_tokens=60)
    expected = looping_harness.llm(k=0).generate(prompts, every)
    llm = engine(looping_harness, "lookup", disable_overlap_scheduler=no_overlap)
    outputs = llm.generate(prompts, every)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert llm.executor.acceptance.acceptance_length > 2.0


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_output_is_that_without_drafts(harness, prompts, name, no_overlap):
    every = params(list(OPTIONS), prompts)
    expected = harness.llm(k=0).generate(prompts, every)
    llm = engine(harness, name, disable_overlap_scheduler=no_overlap)
    outputs = llm.generate(prompts, every)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert all(output.label is None for output in outputs)
    if name in ("absent", "above"):
        assert num_accepted(llm) == 0
    assert_drained(llm)


@pytest.mark.parametrize(
    "options",
    [
        {"k": 1},
        {"max_num_tokens": 40},
        {"kv_cache_config": {"max_tokens": 128}},
        {"cuda_graph_config": {"batch_sizes": [8], "enable_padding": True}},
    ],
    ids=["one_draft", "chunks", "preemption", "padded"],
)
def test_schedules(harness, prompts, options):
    if "cuda_graph_config" in options:
        pads_batches(harness)
    every = params(list(OPTIONS), prompts)
    expected = harness.llm(k=0).generate(prompts, every)
    for name in ("lookup", "mixed"):
        llm = engine(harness, name, **options)
        outputs = llm.generate(prompts, every)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        assert_drained(llm)


def test_requests_without_drafts_and_with_fewer(harness, prompts):
    """Tokens are kept in steps without drafts."""
    llm = engine(harness, "lookup")
    expected = harness.llm(k=0).generate(prompts, params(["greedy"], prompts))
    for options, most in (({"speculate": False}, 0), ({"max_draft_len": 1}, 1)):
        outputs = llm.generate(prompts, params(["greedy"], prompts, **options))
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        assert (sum(o.acceptance.num_drafted for o in outputs) > 0) is (most > 0)
        assert not any(sum(o.acceptance.histogram[most + 2 :]) for o in outputs)


def test_custom_verification_reads_the_drafts(harness, prompts):
    """0 in place of an absent draft is rejected by a method that accepts it."""
    register_verification("top2", Top2Verification())
    try:
        every = params(["greedy"], prompts, verification="top2")
        llm = engine(harness, "absent", mtp={"verification": ["coupled", "top2"]})
        outputs = llm.generate(prompts, every)
        assert num_accepted(llm) == 0
        assert all("top2" in str(output.label) for output in outputs)
    finally:
        unregister_verification("top2")


def fails_twice(make: Callable[..., Any]) -> Callable[..., Any]:
    """A drafter whose second and fifth step propose what ``make`` returns."""
    steps = iter(range(10**6))

    def propose(tokens: torch.Tensor, lengths: torch.Tensor, k: int) -> Any:
        proposed = rows(0)(tokens, lengths, k)
        return make(tokens, proposed) if next(steps) in (1, 4) else proposed

    return propose


class RaisingTensor(torch.Tensor):
    @classmethod
    @override
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no value")


class RaisingAttributes:
    @override
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def fake(_: torch.Tensor, proposed: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(proposed.shape, dtype=torch.int64)


TENSOR = "drafter 'fails': result of propose: expected a torch.Tensor, no subclass, got "


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda *_: {}["drafts"], "drafter 'fails': propose raised KeyError: 'drafts'"),
        (lambda *_: sys.exit(3), "drafter 'fails': propose raised SystemExit: 3"),
        (lambda *_: 3, f"{TENSOR}3"),
        (lambda *_: RaisingAttributes(), f"{TENSOR}.*RaisingAttributes"),
        (lambda _, proposed: proposed.as_subclass(RaisingTensor), f"{TENSOR}.*RaisingTensor"),
        (fake, f"{TENSOR}FakeTensor"),
        (
            lambda _, proposed: torch.nested.nested_tensor(list(proposed)),
            "result of propose: expected signed integer tensor .*, got nested torch.int64",
        ),
        (
            lambda _, proposed: proposed.to_sparse(),
            "result of propose: expected signed integer tensor .*, got torch.sparse_coo",
        ),
        (
            lambda tokens, proposed: tokens.resize_(len(tokens) + 1, proposed.shape[1]),
            r"result of propose: expected signed integer tensor \[\d, 3\].*, got .*\[\d, 3\]",
        ),
        (lambda *_: torch.zeros(1, 1), "expected signed integer tensor .*float32"),
    ],
    ids=[
        *("raises", "exits", "number", "attributes", "raising", "fake", "nested", "sparse"),
        *("resized", "floats"),
    ],
)
def test_failing_drafter_ends_the_requests_of_the_step(
    harness, prompts, no_overlap, make, message, caplog
):
    """The error is logged once."""
    options = {"disable_overlap_scheduler": no_overlap}
    options |= {"cuda_graph_config": None} if "cuda_graph_config" in harness.host else {}
    register_drafter("fails", Recorded(fails_twice(make)))
    try:
        llm = engine(harness, "fails", **options)
        every = params(["greedy"], prompts)
        expected = harness.llm(k=0).generate(prompts, every)
        for _ in range(2):
            outputs = llm.generate(prompts, every)
            for output, plain in zip(outputs, expected, strict=True):
                assert re.search(message, output.error), output
                assert output.token_ids == plain.token_ids[: len(output.token_ids)]
            assert_drained(llm)
        later = llm.generate(prompts, every)
        assert [o.token_ids for o in later] == [o.token_ids for o in expected]
        assert caplog.text.count("drafter 'fails' failed") == 1
    finally:
        unregister_drafter("fails")


def test_drafter_can_be_interrupted() -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    tokens, lengths = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int64)
    with pytest.raises(KeyboardInterrupt):
        propose_drafts("interrupted", Recorded(interrupted), tokens, lengths, 1, VOCAB)


# --- names and configs ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "max_draft_len"),
        ({"mtp": {"verification": "rejection"}}, "expected 'coupled' or a registered method"),
        ({"mtp": {"seed": 3}}, r"mtp\.seed: drafter 'absent' takes max_draft_len and"),
        ({"mtp": 3}, "mtp"),
    ],
)
def test_config_errors(harness, options, message):
    with pytest.raises(ConfigError, match=message):
        engine(harness, "absent", **options)


@pytest.mark.parametrize(
    ("name", "drafter", "message"),
    [
        ("", LookupDrafter(), "expected a name, got ''"),
        (7, LookupDrafter(), "expected a name, got 7"),
        ("mtp", LookupDrafter(), "'mtp' is already served by MTPPlugin"),
        ("Lookup", LookupDrafter(), "'Lookup' is already served by CustomDrafterPlugin"),
        ("other", LookupDrafter, "is a class; create an object of it"),
        ("other", object(), "does not derive from that class"),
    ],
)
def test_invalid_registration(name: Any, drafter: Any, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        register_drafter(name, drafter)
    register_drafter("lookup", DRAFTERS["lookup"])  # the same object again
    with pytest.raises(PluginError, match="'mtp' was not registered"):
        unregister_drafter("mtp")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("integration.examples.lookup:LookupDrafter", None),
        ("no.such.module:thing", r"'offered' of mtp_plugin\.drafters \(.*\) cannot be loaded"),
        ("math:pi", r"\(math:pi\): expected a CustomDrafter object, but 3\.14"),
    ],
)
def test_entry_point(monkeypatch: pytest.MonkeyPatch, value: str, message: str | None) -> None:
    point = EntryPoint("offered", value, registry.DRAFTER_GROUP)
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [point] if group == point.group else []
    )
    if message is None:
        assert find_plugin("OFFERED") is find_plugin("offered")
        assert isinstance(find_plugin("offered").drafter, LookupDrafter)
        return
    with pytest.raises(PluginError, match=message):
        find_plugin("offered")
