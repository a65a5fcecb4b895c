"""Every verification method gives the same in the embedded executor and in vLLM's rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from integration.examples.top2 import Top2Verification
from mtp_plugin.config import MTPPluginOptions
from mtp_plugin.hosts.vllm.options import VllmOptions
from mtp_plugin.hosts.vllm.requests import request_facts
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.step import Accepted, SamplingKind, StepLayout
from mtp_plugin.plugin import register_verification, unregister_verification
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.speculative.drafting import make_verification_inputs
from mtp_plugin.speculative.host import DecodingOptions, HostStep, RequestFacts
from mtp_plugin.speculative.rows.options import EngineSettings
from mtp_plugin.speculative.rows.request_options import read_request
from mtp_plugin.speculative.rows.request_slots import RequestSlots
from mtp_plugin.speculative.rows.row_ops import RowOps
from mtp_plugin.speculative.state.slot_table import SlotTable
from mtp_plugin.speculative.verification import (
    DELTA_POOL,
    Verifier,
    make_modes,
)
from mtp_plugin.verifications import METHODS
from tests.hosts.vllm.rows import Batch, verify
from tests.ops.on_device import DEVICE, vector

K, VOCAB = 3, 61
BEGIN, END = 5, 6
SHARES = (0.8, 0.6, 0.5)
PROMPTS = ([1, 2], [BEGIN, 4], [1, BEGIN], [BEGIN, 9], [3], [BEGIN])
SAMPLING: Sequence[dict[str, Any]] = (
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 8},
    {"temperature": 0.0},
    {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 0.0, "ignore_eos": True, "min_tokens": 3},
)
ALONE = [*METHODS, "top2", "relaxed"]
MIXTURES = [("coupled", "rejection", "block", "top2"), ("top2", "relaxed", "rejection")]


@pytest.fixture(autouse=True)
def top2() -> Iterator[None]:
    register_verification("top2", Top2Verification())
    yield
    unregister_verification("top2")


def method_of(request: int, methods: Sequence[str]) -> str:
    """The method that a request selects; relaxed acceptance is not selected by a method."""
    selected = methods[request % len(methods)]
    return "coupled" if selected in ("relaxed", "synthetic") else selected


def in_executor(
    methods: Sequence[str], batch: Batch, probs: torch.Tensor, backend: Backend
) -> tuple[Accepted, SlotTable]:
    """Verify a step as a worker does."""
    is_synthetic = methods[0] == "synthetic"
    enabled = dict.fromkeys(method_of(request, methods) for request in range(len(PROMPTS)))
    options = DecodingOptions(
        K,
        MTPPluginOptions(
            verification="synthetic" if is_synthetic else tuple(enabled),
            synthetic_acceptance=SHARES if is_synthetic else None,
        ),
        use_relaxed_acceptance_for_thinking="relaxed" in methods,
        relaxed_topk=20,
        relaxed_delta=0.9,
        thinking_tokens=(BEGIN, END),
    )
    modes = make_modes(options, DEVICE)
    table = SlotTable(len(PROMPTS) + 1, [c for mode in modes for c in mode.columns], DEVICE)
    rows = {}
    for request, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True)):
        method = None if is_synthetic else method_of(request, methods)
        params = SamplingParams(**sampling, seed=100 + request, verification=method)
        facts = RequestFacts.of(
            request, params, prompt_len=len(prompt), max_seq_len=10**6, end_ids=[7]
        )
        rows[request] = facts.columns()
        for mode in modes:
            rows[request].update(mode.slot_values(facts, prompt))
        rows[request]["seed"] = [100 + request, 0]
    table.write(rows)
    sizes = batch.sizes
    logits = torch.zeros(len(sizes), K + 1, VOCAB, device=DEVICE)
    drafts = torch.full((len(sizes), K), 8, dtype=torch.int32, device=DEVICE)
    for request, (first, size) in enumerate(zip(batch.first_rows, sizes, strict=False)):
        logits[request, :size] = batch.logits[first : first + size]
        drafts[request, : size - 1] = vector(batch.drafts[request], torch.int32)
    positions = vector([start + i for start in batch.positions for i in range(K + 1)])
    slot_ids = vector(batch.indices)
    manager = SimpleNamespace(draft_probs=probs)
    if DELTA_POOL in table.columns:
        setattr(manager, DELTA_POOL, table.column(DELTA_POOL))
    step = HostStep(
        StepLayout((), len(sizes), K, vector([], torch.int32), positions),
        drafts.view(-1),
        draft_lens=vector([size - 1 for size in sizes], torch.int32),
        manager=manager,
        slot_ids=slot_ids,
        slots=table.rows_of(slot_ids),
        sampling_kind=SamplingKind.SAMPLED,
    )
    inputs = make_verification_inputs(step, logits.view(-1, VOCAB))
    return Verifier(modes).verify(inputs, backend=backend), table


def in_vllm(
    methods: Sequence[str], batch: Batch, probs: torch.Tensor, backend: Backend
) -> tuple[Accepted, RequestSlots]:
    """Verify a step as vLLM's verifier does."""
    relaxed: dict[str, Any] = {}
    if "relaxed" in methods:
        relaxed = {"thinking_begin_token": BEGIN, "thinking_end_token": END}
        relaxed |= {"relaxed_topk": 20, "relaxed_delta": 0.9}
    rates = SHARES if methods[0] == "synthetic" else None
    settings = EngineSettings(VllmOptions(**relaxed), K, True, rates)
    slots = RequestSlots(len(PROMPTS), DEVICE, settings)
    for request, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True)):
        options = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": False, "min_tokens": 0}
        ends = {"all_stop_token_ids": {7}, "stop_token_ids": []}
        params = SimpleNamespace(**{**options, **sampling, **ends})
        extra = {} if rates else {"mtp_verification": method_of(request, methods)}
        own = read_request(extra, settings)
        values = slots.values(request_facts(params, own, len(prompt)), own, prompt)
        slots.stage(request, values, 100 + request)
    slots.apply()
    ops = RowOps(slots, settings, backend, VOCAB)
    ops.draft_probs = probs
    return verify(ops, batch), slots


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("sizes", [[4] * 6, [4, 2, 4, 3, 1, 4]], ids=["uniform", "ragged"])
@pytest.mark.parametrize("methods", [*((name,) for name in ALONE), *MIXTURES], ids="-".join)
def test_methods_give_the_same_in_every_host(
    methods: tuple[str, ...], sizes: list[int], backend: Backend
) -> None:
    generator = torch.Generator().manual_seed(len(methods))
    total = 0
    trials = 2 if backend is Backend.TRITON and DEVICE.type == "cpu" else 6  # interpreted kernels
    for trial in range(trials):
        logits = torch.randn(sum(sizes), VOCAB, generator=generator).mul(1.5).to(DEVICE)
        likely = logits.topk(3, dim=-1).indices.cpu()
        first, drafts = 0, []
        for size in sizes:
            picks = torch.randint(0, 3, (size - 1,), generator=generator)
            drafts.append([int(likely[first + i, pick]) for i, pick in enumerate(picks)])
            first += size
        batch = Batch(list(range(6)), drafts, [20 + trial] * 6, logits)
        probs = torch.rand(7, K, VOCAB, generator=generator).softmax(-1).to(DEVICE)
        expected, table = in_executor(methods, batch, probs, backend)
        found, slots = in_vllm(methods, batch, probs, backend)
        assert found.tokens.tolist() == expected.tokens.clamp_min(0).tolist()  # no -1 is embedded
        assert torch.equal(found.num_accepted, expected.num_accepted)
        total += int(found.num_accepted.sum()) - 6
        for name in ("thinking", "draft_step"):  # written by the step
            if name in table.columns:
                written = slots.of(vector(batch.indices)).read(name, slice(0, 6))
                assert torch.equal(written, table.column(name)[:6])
    assert total > trials
