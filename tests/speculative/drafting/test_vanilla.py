"""MTPWorker: one layer per depth."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.errors import ConfigError
from mtp_plugin.speculative.drafting import MTPWorker
from mtp_plugin.speculative.state import MTPHiddenStatesManager
from tests.ops.draft_inputs import example as history
from tests.ops.draft_inputs.example import Pair
from tests.speculative.drafting import example
from tests.speculative.drafting.contract import (
    DraftingContract,
    ExpectedPasses,
    WorkerSteps,
    assert_seen,
)
from tests.speculative.drafting.host import H, Prompt, ScriptedLayer, Step, Turn
from tests.speculative.plain_host import int32


class VanillaSteps(WorkerSteps):
    """Exact windows and outputs passed on, as the plugin's default is."""

    window_mode = "exact"
    chain = "output"

    def make(self, k: int, **options: Any) -> MTPWorker:
        mtp = options.pop("mtp", SimpleNamespace())
        mtp.draft_window = self.window_mode
        options.setdefault("chain", self.chain)
        return MTPWorker(SimpleNamespace(max_draft_len=k, mtp=mtp), device="cpu", **options)

    def num_layers(self, k: int) -> int:
        return k

    def num_selections(self, k: int) -> int:
        return k if self.chain == "none" else 1

    def expected_passes(self, step: Step, request: Prompt | Turn) -> ExpectedPasses:
        if isinstance(request, Prompt):
            first = request.start - (min(step.k, request.start) if step.look_ahead else 0)
        else:
            window = step.k + (1 if self.window_mode == "exact" else 0)
            first = len(request.text) - 1 - window
        return example.vanilla(request.text, first, step.k, self.chain)

    @pytest.mark.parametrize("seed", range(3))
    def test_the_history_moves_on(self, k: int, seed: int) -> None:
        step = self.step(k, seed)
        self.run(step)
        for slot, request in enumerate(step.requests):
            past = [Pair(0, 0)] * k + [
                Pair(t, example.target_state(t, p)) for p, t in enumerate(request.past)
            ]
            start = len(request.past)
            if isinstance(request, Prompt):
                rows = request.tokens[start : request.end]
            else:
                rows = request.inputs
            read = [Pair(t, example.target_state(t, start + i)) for i, t in enumerate(rows)]
            if isinstance(request, Prompt):
                kept = history.after_prompt(past[-k:], read)
            else:
                kept = history.after_generation(past[-k:], read, len(request.run))
            assert step.manager.mtp_past_tokens_pool[slot].tolist() == [t for t, _ in kept]
            states = step.manager.mtp_past_hidden_states_pool[slot, :, 0]
            assert states.tolist() == [state for _, state in kept]


class TestVanilla(VanillaSteps, DraftingContract):
    """The defaults: all of the contract."""

    draft_lens = (1, 2, 4)


class TestWindowOfTensorRTLLM(VanillaSteps):
    """K rows per generation."""

    window_mode = "trtllm"

    def step(self, k: int, seed: int, **options: Any) -> Step:
        return super().step(k, seed, draft_window="trtllm", **options)


class TestShiftedStates(VanillaSteps):
    chain = "target_shift"


class TestAsTensorRTLLM(TestWindowOfTensorRTLLM):
    chain = "target_shift"


class TestTargetStatesOnly(VanillaSteps):
    chain = "none"


# --- the letters of the design ---


def test_a_prompt_of_four() -> None:
    """`p q r s` emitted `t`: depths read `q r s t`, `r s t u`, `s t u v`, each with its states."""
    p, q, r, s, t = prompt = [11, 12, 13, 14, 15]
    step = Step(3, [Prompt(prompt[:4], choice=t)])
    seen: list[Any] = []
    layers = [ScriptedLayer(depth, seen) for depth in range(3)]
    result = MTPWorker(MTPDecodingConfig(max_draft_len=3), device="cpu")(
        **step.inputs(), mtp_layers=layers
    )
    u, v, w = result["next_draft_tokens"][0].tolist()
    assert [call.ids for call in seen] == [[q, r, s, t], [r, s, t, u], [s, t, u, v]]
    assert [call.positions for call in seen] == [[0, 1, 2, 3]] * 3
    first = [example.target_state(token, i) for i, token in enumerate((p, q, r, s))]
    assert seen[0].states == first
    second = [
        example.layer_state(0, *row) for row in zip((q, r, s, t), range(4), first, strict=True)
    ]
    assert seen[1].states == second
    assert example.proposal(second[-1]) == u
    assert result["next_new_tokens"].tolist() == [[t, u, v, w]]


# --- chunked prompts ---


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("cut", [1, 3, 6])
@pytest.mark.parametrize("listed", [True, False], ids=["the host's list", "the device"])
def test_chunks_read_what_the_whole_prompt_reads(k: int, cut: int, listed: bool) -> None:
    """The guessed tail of a chunk is read again with the next one, so the drafts are the same,
    whichever way the host engine reports its cached tokens."""
    prompt = [21, 22, 23, 24, 25, 26, 27]
    whole = Step(k, [Prompt(prompt, choice=5)])
    contract = TestVanilla()
    expected = contract.run(whole)
    first = Step(k, [Prompt(prompt, 0, cut)])
    contract.run(first)
    second = Step(k, [Prompt(prompt, cut, choice=5)])
    second.manager = second.spec.mtp_hidden_states_manager = first.manager
    if not listed:
        second.attn.kv_cache_params = None
    layers = contract.layers(k)
    result = contract.run(second, layers)
    assert torch.equal(result["next_draft_tokens"], expected["next_draft_tokens"])
    assert_seen(second, layers[0].seen, [contract.expected_passes(second, second.requests[0])])
    assert layers[0].seen[0].seq_lens == [len(prompt) - cut + min(k, cut)]
    for pool, same in zip(contract.pools(second), contract.pools(whole), strict=True):
        assert torch.equal(pool[0], same[0])


# --- what a vanilla worker requires ---


def test_more_layers_than_drafts_are_left_alone() -> None:
    step = Step(2, [Prompt([1, 2])])
    spare = ScriptedLayer(9)
    layers = [ScriptedLayer(0), ScriptedLayer(1), spare]
    MTPWorker(MTPDecodingConfig(max_draft_len=2), device="cpu")(**step.inputs(), mtp_layers=layers)
    assert spare.seen == []


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_pools_of_another_width_are_refused(kernels: str) -> None:
    """Kernels would read other requests' rows without a word."""
    step = Step(1, [Prompt([1, 2])])
    config = SimpleNamespace(max_draft_len=3, mtp=SimpleNamespace(kernels=kernels))
    worker = MTPWorker(config, device="cpu")
    layers = [ScriptedLayer(depth) for depth in range(3)]
    expected = (
        "expected K = 3 past pairs per slot as this worker drafts, got {} tokens and {} states"
    )
    with pytest.raises(ConfigError, match=expected.format(1, 1)):
        worker(**step.inputs(), mtp_layers=layers)
    step.manager.mtp_past_tokens_pool = step.manager.mtp_past_tokens_pool.repeat(1, 3)
    with pytest.raises(ConfigError, match=expected.format(3, 1)):
        worker(**step.inputs(), mtp_layers=layers)
    with pytest.raises(ConfigError, match=expected.format(3, 1)):
        worker.update_mtp_hidden_states(
            step.input_ids, step.hidden_states, int32([1]), step.spec, step.attn
        )
    with pytest.raises(ConfigError, match=expected.format(3, 1)):
        worker.prepare_drafter_inputs(
            step.input_ids,
            step.position_ids,
            step.hidden_states,
            int32([[5, -1, -1, -1]]),
            int32([1]),
            step.spec,
            step.attn,
        )
    assert all(layer.seen == [] for layer in layers)


def test_a_checkpoint_with_fewer_layers_than_drafts() -> None:
    """K under its name, the checkpoint's count under the older one: pools and worker agree."""
    config = SimpleNamespace(max_draft_len=3, num_nextn_predict_layers=1)
    step = Step(3, [], [Turn([1, 2, 3, 4, 5], [21, 22, 23], [21, 22, 9, 8])])
    expected = TestVanilla().run(step)
    other = Step(3, [], [Turn([1, 2, 3, 4, 5], [21, 22, 23], [21, 22, 9, 8])])
    manager = MTPHiddenStatesManager(config, torch.float32, H, other.num_slots, device="cpu")
    for name in ("mtp_past_tokens_pool", "mtp_past_hidden_states_pool"):
        getattr(manager, name).copy_(getattr(other.manager, name))
    manager.slot_manager.add_slot(0)
    other.spec.mtp_hidden_states_manager = manager
    other.spec.prepare()
    layers = [ScriptedLayer(depth) for depth in range(3)]
    result = MTPWorker(config, device="cpu")(**other.inputs(), mtp_layers=layers)
    for name in ("new_tokens", "next_draft_tokens"):
        assert torch.equal(result[name], expected[name])


@pytest.mark.parametrize(
    ("config", "chain", "window"),
    [
        (MTPDecodingConfig(max_draft_len=2), "output", "exact"),
        (SimpleNamespace(num_nextn_predict_layers=2), "output", "exact"),
        (
            MTPDecodingConfig(
                max_draft_len=2,
                use_mtp_vanilla=True,
                mtp={"chain": "none", "draft_window": "trtllm"},
            ),
            "none",
            "trtllm",
        ),
    ],
)
def test_options_come_from_the_config(config: Any, chain: str, window: str) -> None:
    worker = MTPWorker(config, device="cpu")
    assert (worker.max_draft_len, worker.chain, worker.draft_window) == (2, chain, window)
    assert MTPWorker(config, chain="target_shift", device="cpu").chain == "target_shift"
