"""One worker serves every draft length up to its own: the host's metadata tells which."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.errors import MetadataError
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker
from mtp_plugin.speculative.state import MTPHiddenStatesManager
from tests.speculative.drafting.host import H, Prompt, ScriptedLayer, Step, Turn

WORKERS = [pytest.param(MTPEagleWorker, id="eagle"), pytest.param(MTPWorker, id="vanilla")]
K = 3


class CountingLayer(ScriptedLayer):
    """Counts its passes."""

    passes = 0

    def __call__(self, **kwargs: Any) -> torch.Tensor:
        self.passes += 1
        return super().__call__(**kwargs)


def run(kind: type, k: int | None, keep_warm: bool = True) -> tuple[dict[str, Any], list[int]]:
    width = K if k is None else k
    step = Step(K if k is None else k, [Prompt([1, 2], choice=9)], [turn(width), turn(width)])
    step.spec.runtime_draft_len = k
    if kind is MTPWorker:
        widen(step)
    config = MTPDecodingConfig(max_draft_len=K, mtp={"keep_warm": keep_warm})
    layers = [CountingLayer(d) for d in range(K)]
    outputs = kind(config, device="cpu")(**step.inputs(), mtp_layers=layers)
    return outputs, [layer.passes for layer in layers]


def turn(width: int) -> Turn:
    return Turn([1, 2, 3], [20, 21, 22][:width], [20, 31, 32, 33][: width + 1])


def widen(step: Step) -> None:
    """Pools of K pairs, whatever the step drafts."""
    config = SimpleNamespace(max_draft_len=K)
    manager = MTPHiddenStatesManager(config, torch.float32, H, 4, device="cpu")
    slots = [manager.slot_manager.add_slot(request) for request in step.spec.request_ids]
    step.spec.mtp_hidden_states_manager = manager
    step.spec.slot_ids = torch.tensor(slots)


@pytest.mark.parametrize("kind", WORKERS)
@pytest.mark.parametrize("k", [None, 3, 2, 1, 0])
def test_a_step_of_fewer_drafts(kind: type, k: int | None) -> None:
    outputs, _ = run(kind, k)
    width = K if k is None else k
    assert outputs["new_tokens"].shape == (3, width + 1)
    assert outputs["next_draft_tokens"].shape == (3, width)
    assert outputs["next_new_tokens"].shape == (3, width + 1)
    emitted = 2 if width else 1  # the first draft is right, and no other
    assert outputs["new_tokens_lens"].tolist() == [1, emitted, emitted]


@pytest.mark.parametrize(
    ("kind", "k", "keep_warm", "passes"),
    [
        pytest.param(MTPEagleWorker, 2, True, [2, 0, 0], id="eagle"),
        pytest.param(MTPEagleWorker, 0, True, [1, 0, 0], id="eagle-warm"),
        pytest.param(MTPEagleWorker, 0, False, [0, 0, 0], id="eagle-cold"),
        pytest.param(MTPWorker, 2, True, [1, 1, 1], id="vanilla"),
        pytest.param(MTPWorker, 2, False, [1, 1, 0], id="vanilla-cooling"),
        pytest.param(MTPWorker, 0, True, [1, 1, 1], id="vanilla-warm"),
        pytest.param(MTPWorker, 0, False, [0, 0, 0], id="vanilla-cold"),
    ],
)
def test_layers_that_run(kind: type, k: int, keep_warm: bool, passes: list[int]) -> None:
    assert run(kind, k, keep_warm)[1] == passes


@pytest.mark.parametrize("kind", WORKERS)
@pytest.mark.parametrize("k", [-1, K + 1])
def test_draft_lengths_that_cannot_be(kind: type, k: int) -> None:
    step = Step(K, [], [turn(K)])
    step.spec.runtime_draft_len = k
    worker = kind(MTPDecodingConfig(max_draft_len=K), device="cpu")
    told = rf"runtime_draft_len: expected 0 to max_draft_len \({K}\), got {k}"
    for call in (worker, worker.skip_forward):
        with pytest.raises(MetadataError, match=told):
            call(**step.inputs())


@pytest.mark.parametrize("kind", WORKERS)
def test_rows_of_another_draft_length(kind: type) -> None:
    step = Step(K, [], [turn(K)])
    step.spec.runtime_draft_len = 1
    told = (
        r"step: expected T = 2 rows, 0 of prompts and K\+1 = 2 for each of 1 generations "
        r"\(runtime_draft_len: 1\), got 4"
    )
    with pytest.raises(MetadataError, match=told):
        kind(MTPDecodingConfig(max_draft_len=K), device="cpu")(**step.inputs())


def test_a_rank_without_logits_gives_as_many() -> None:
    step = Step(K, [], [turn(K)])
    step.spec.runtime_draft_len = 1
    worker = MTPEagleWorker(MTPDecodingConfig(max_draft_len=K), device="cpu")
    outputs = worker.skip_forward(**step.inputs())
    assert outputs["new_tokens"].tolist() == [[0, -1]]
    assert outputs["next_draft_tokens"].shape == (1, 1)


def test_the_host_hears_of_acceptance_before_drafts_are_made() -> None:
    """What cannot be cut back moves on between verification and the first pass."""
    step, heard = Step(K, [], [turn(K)]), []
    layer = CountingLayer(0)
    step.attn.after_acceptance = lambda counts: heard.append((counts.tolist(), layer.passes))
    worker = MTPEagleWorker(MTPDecodingConfig(max_draft_len=K), device="cpu")
    worker(**step.inputs(), mtp_layers=[layer])
    assert heard == [([2], 0)]
    assert layer.passes == K


def test_a_config_of_a_host_has_few_fields() -> None:
    worker = MTPEagleWorker(SimpleNamespace(max_draft_len=2), device="cpu")
    assert (worker.max_draft_len, worker.keeps_warm, worker.chain) == (2, True, "output")
