"""The draft passes that a vLLM before 0.32 captures as one graph."""

from __future__ import annotations

import importlib
import re
import sys
from itertools import accumulate
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.hosts import vllm as host
from mtp_plugin.hosts.vllm.draft_loop import can_capture, run_passes
from mtp_plugin.hosts.vllm.versions import SIGNATURES
from mtp_plugin.hosts.vllm.wrapping import _ENGINE, DRAFT_LOOP, wrap_worker
from tests.hosts.vllm import fake_vllm

MODULE = "vllm.v1.worker.gpu.spec_decode.autoregressive.speculator"
CAPTURE, DECODE = DRAFT_LOOP
FULL, NONE = SimpleNamespace(name="FULL"), SimpleNamespace(name="NONE")


def make_speculator(num_drafts: int = 3, backend: str = "FLASH_ATTN", **changes: Any) -> Any:
    group = SimpleNamespace(backend=SimpleNamespace(get_name=lambda: backend))
    given = {
        "num_speculative_steps": num_drafts,
        "advance_draft_positions": True,
        "attn_groups": [[group]],
        "max_model_len": 64,
        "draft_max_seq_len": 7,
        "current_draft_step": torch.tensor(0),
        "idx_mapping": torch.tensor([2, 0, 0, 0]),
        "kv_cache_config": "kv",
        "input_buffers": SimpleNamespace(
            query_start_loc=torch.tensor([0, 1, 1, 1, 1]), positions=torch.tensor([5, 0, 0, 0])
        ),
    }
    return SimpleNamespace(**given | changes)


def test_each_pass_gets_metadata_for_the_positions_that_the_last_one_left() -> None:
    speculator = make_speculator()
    positions = speculator.input_buffers.positions
    seen: list[Any] = []

    def slots(indices: Any, starts: Any, given: Any, num_tokens: int) -> torch.Tensor:
        assert indices.tolist() == [2, 0]
        assert starts.tolist() == [0, 1, 1]
        assert num_tokens == 2
        return given + 100

    def metadata(*, num_reqs: int, num_reqs_padded: int, num_tokens_padded: int) -> Any:
        assert (num_reqs, num_reqs_padded, num_tokens_padded) == (2, 2, 2)
        return f"metadata up to {speculator.draft_max_seq_len} at {positions[0]}"

    def run_pass(*args: Any) -> None:
        seen.append((int(speculator.current_draft_step), *args))
        positions[0] += 1

    speculator.block_tables = SimpleNamespace(compute_slot_mappings=slots)
    speculator._build_draft_attn_metadata = metadata
    run_passes(speculator, run_pass, lambda s, kv: (s.tolist(), kv), 2, 2, "old", "old", None, NONE)
    assert seen == [
        (1, 2, 2, "metadata up to 64 at 5", ([105, 100], "kv"), None, NONE),
        (2, 2, 2, "metadata up to 64 at 6", ([106, 100], "kv"), None, NONE),
    ]


@pytest.mark.parametrize(
    ("speculator", "expected"),
    [
        (make_speculator(), True),
        (make_speculator(backend="TRITON_ATTN"), True),
        (make_speculator(backend="FLASHINFER"), False),  # plans on the host
        (make_speculator(num_drafts=1), False),
        (make_speculator(advance_draft_positions=False), False),
        (make_speculator(eplb_state="on"), False),
    ],
)
def test_passes_are_captured_if_no_host_value_changes_between_them(
    speculator: Any, expected: bool
) -> None:
    assert can_capture(speculator) is expected


@pytest.fixture
def speculator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An instance of a fake class with vLLM 0.24's methods; they record their calls."""
    calls: list[Any] = []
    signatures = {**SIGNATURES["v24"], CAPTURE: ("attn_states",)}
    modules = fake_vllm.install(monkeypatch, "0.24.0", signatures)
    owner: Any = modules[MODULE].AutoRegressiveSpeculator
    owner._generate_draft = lambda _self: "one pass"
    owner.capture = lambda self, _states: calls.append(("capture", self._generate_draft()))
    owner._multi_step_decode = lambda _self, *args: calls.append(("host loop", *args))
    wrap_worker()
    made = owner()
    made.calls = calls
    made.model_state = SimpleNamespace()
    made.decode_cudagraph_manager = SimpleNamespace(
        run_fullgraph=lambda desc: calls.append(("graph", desc))
    )
    return made


def decode(speculator: Any, mode: Any) -> Any:
    desc = SimpleNamespace(cg_mode=mode)
    speculator._multi_step_decode(4, False, desc, None)
    last = speculator.calls.pop()
    assert last in (("graph", desc), ("host loop", 4, False, desc, None))
    return last[0]


def test_captured_passes_are_replayed_once(speculator: Any) -> None:
    setattr(speculator.model_state, _ENGINE, SimpleNamespace(draft_loop=lambda _s: lambda: "loop"))
    speculator.capture("states")
    assert speculator.calls.pop() == ("capture", "loop")
    assert speculator._generate_draft() == "one pass"  # of steps without a graph
    assert decode(speculator, FULL) == "graph"
    assert decode(speculator, NONE) == "host loop"


@pytest.mark.parametrize("on", [False, True])
def test_without_captured_passes_the_loop_is_that_of_vllm(speculator: Any, on: bool) -> None:
    if on:  # but an attention backend that cannot be captured
        engine = SimpleNamespace(draft_loop=lambda _s: None)
        setattr(speculator.model_state, _ENGINE, engine)
    speculator.capture("states")
    assert speculator.calls.pop() == ("capture", "one pass")
    assert decode(speculator, FULL) == "host loop"


def test_a_capture_that_fails_leaves_no_trace(speculator: Any) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    setattr(speculator.model_state, _ENGINE, SimpleNamespace(draft_loop=lambda _s: fail))
    with pytest.raises(RuntimeError, match="out of memory"):
        speculator.capture("states")
    assert speculator._generate_draft() == "one pass"
    assert decode(speculator, FULL) == "host loop"


def test_the_class_is_missing_in_vllm_032(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, ModuleType] = fake_vllm.install(monkeypatch)
    wrap_worker()
    assert MODULE not in modules


class AnyClass(ModuleType):
    """A module of vLLM with whatever class is imported from it."""

    def __getattr__(self, name: str) -> type:
        return type(name, (), {})


@pytest.mark.parametrize("draft_logits", [None, torch.zeros(1)], ids=["greedy", "probabilistic"])
def test_padding_rows_are_sampled_as_greedy_requests(
    monkeypatch: pytest.MonkeyPatch, draft_logits: torch.Tensor | None
) -> None:
    """Not with the options of earlier requests: a flat padding row took 0.8 ms on a GPU."""
    name = f"{host.__name__}.v24"
    source = (Path(host.__file__).parent / "v24.py").read_text()
    for imported in re.findall(r"^from (vllm\S*) import", source, re.MULTILINE):
        for module in accumulate(imported.split("."), "{}.{}".format):
            monkeypatch.setitem(sys.modules, module, AnyClass(module))
    monkeypatch.setattr(host, "v24", None, raising=False)  # both are removed again at the end
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    del sys.modules[name]
    v24 = importlib.import_module(name)
    made = make_speculator(model=SimpleNamespace(compute_logits=torch.clone))
    indices = torch.tensor([2, 0, 3, 0])
    step, none = made.current_draft_step, torch.zeros(0)
    rows = v24.draft_rows(
        made, torch.ones(4, 8), torch.arange(4), indices, none, none, step, draft_logits
    )
    assert rows.indices is indices
    assert rows.is_padding.tolist() == [False, True, True, True]
