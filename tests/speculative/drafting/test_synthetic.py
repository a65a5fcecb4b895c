"""Synthetic acceptance through the workers: draws by position, whatever the target says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.errors import MetadataError, TensorContractError
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.step import STATUS_NO_FINITE_LOGIT, SamplingKind
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker
from mtp_plugin.speculative.host import DecodingOptions
from mtp_plugin.speculative.verification import label_of
from tests.ops.synthetic_acceptance import example
from tests.speculative.drafting.example import VOCAB
from tests.speculative.drafting.host import Prompt, ScriptedLayer, Step, Turn
from tests.speculative.drafting.phases import fill_slots

K, SEED = 3, 11
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the host's tensors are here")
BACKENDS = [
    pytest.param(Backend.TORCH, id="torch"),
    pytest.param(Backend.TRITON, id="triton", marks=INTERPRETED),
]
WORKERS = [pytest.param(MTPEagleWorker, id="eagle"), pytest.param(MTPWorker, id="vanilla")]


def config(rates: Any, k: int = K, seed: int = SEED, **options: Any) -> MTPDecodingConfig:
    return MTPDecodingConfig(
        max_draft_len=k,
        mtp={
            "verification": "synthetic",
            "synthetic_acceptance": rates,
            "synthetic_seed": seed,
            **options,
        },
    )


def run(step: Step, rates: Any, kind: type, backend: Backend) -> dict[str, Any]:
    worker = kind(config(rates, step.k), device="cpu")
    worker.backend = backend
    return worker(**step.inputs(), mtp_layers=[ScriptedLayer(d) for d in range(step.k)])


def turn(length: int, draft_len: int | None = None) -> Turn:
    """A text of so many tokens with a state; the target agrees with no draft."""
    text = [1 + i % 40 for i in range(length + 1)]
    return Turn(text, [20, 21, 22], [30, 31, 32, 33], draft_len)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", WORKERS)
def test_draws_go_by_the_positions_of_the_drafts(kind: type, backend: Backend) -> None:
    """Random numbers belong to the positions of the drafts, of which the first follows the text.

    A prompt in front and one request's neighbours move nothing.
    """
    rates = [0.75, 0.5, 0.25]
    thresholds = [round(0.75 * 2**30), round(0.5 / 0.75 * 2**30), round(0.25 / 0.5 * 2**30)]
    lengths = [2, 3, 5, 8, 13, 21, 34, 55]
    step = Step(K, [Prompt([1, 2, 3], choice=7)], [turn(length) for length in lengths])
    result = run(step, rates, kind, backend)
    expected = [example.accepted(length, thresholds, SEED) for length in lengths]
    assert len(set(expected)) > 2
    tokens = [
        [[20, 21, 22][:count] + [30 + count] + [-1] * (K - count) for count in expected][i]
        for i in range(len(lengths))
    ]
    assert result["new_tokens"].tolist() == [[7, -1, -1, -1], *tokens]
    assert result["new_tokens_lens"].tolist() == [1] + [count + 1 for count in expected]
    alone = run(Step(K, [], [turn(lengths[3])]), rates, kind, backend)
    assert alone["new_tokens"][0].tolist() == tokens[3]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", WORKERS)
def test_requests_of_one_length_draw_for_themselves(kind: type, backend: Backend) -> None:
    """Numbers are those of the batch, prompts counted; that of a prompt is not read."""
    thresholds = [round(0.75 * 2**30), round(0.5 / 0.75 * 2**30), round(0.25 / 0.5 * 2**30)]
    numbers = [3, 0, 1, 2, 3, 500, 2**31 - 1]
    step = Step(K, [Prompt([1, 2, 3], choice=7)], [turn(9)] * (len(numbers) - 1))
    fill_slots(step.manager, {slot: {"number": number} for slot, number in enumerate(numbers)})
    result = run(step, [0.75, 0.5, 0.25], kind, backend)
    expected = [example.accepted(9, thresholds, SEED, number) for number in numbers[1:]]
    assert len(set(expected)) > 1
    assert result["new_tokens_lens"].tolist() == [1] + [count + 1 for count in expected]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rates", "count"), [(1.0, 3), (0.0, 0), ([1.0, 1.0, 0.0], 2)])
def test_r45_certain_rates_still_give_tokens(rates: Any, count: int, backend: Backend) -> None:
    """R45: drafts outside the vocabulary, absent ones and rows without values end a run."""
    turns = [turn(9), turn(9, draft_len=1), turn(9), turn(9)]
    turns[2].drafts[1] = VOCAB
    turns[3].target[1] = None
    result = run(Step(K, [], turns), rates, MTPEagleWorker, backend)
    lens = [count + 1, min(count, 1) + 1, min(count, 1) + 1, 1]
    assert result["new_tokens_lens"].tolist() == lens
    failed = STATUS_NO_FINITE_LOGIT if count else 0
    assert result["status"].tolist() == [0, 0, 0, failed]
    for name in ("next_new_tokens", "next_draft_tokens"):
        assert ((result[name] >= 0) & (result[name] < VOCAB)).all()
    for row, length in zip(result["new_tokens"].tolist(), lens, strict=True):
        assert all(0 <= token < VOCAB for token in row[:length])
        assert row[length:] == [-1] * (K + 1 - length)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stop_that_comes_too_early_is_not_forced(backend: Backend) -> None:
    """A masked token is emitted in no mode; the logits are given back as they came."""
    step = Step(K, [], [turn(9), turn(9)])
    least = {"prompt_len": 8, "stop_ids": [21]}
    fill_slots(step.manager, {0: {**least, "min_tokens": 4}, 1: {**least, "min_tokens": 3}})
    step.spec.sampling_kind = SamplingKind.PROCESSED
    before = step.logits.clone()
    result = run(step, 1.0, MTPEagleWorker, backend)
    # drafts are at 10, 11 and 12; the second of them is a stop
    assert result["new_tokens"].tolist() == [[20, 31, -1, -1], [20, 21, 22, 33]]
    assert torch.equal(step.logits, before)
    assert result["logits"] is step.logits


def test_synthetic_with_manager_without_prepare_is_refused() -> None:
    """Every request would have number 0; without a manager that is what they have."""
    step = Step(K, [], [turn(9), turn(9)])
    step.spec = dataclasses.replace(step.spec)
    assert step.spec.prepared_ids is None
    with pytest.raises(MetadataError, match=r"slot_ids: call prepare\(\) first"):
        run(step, 0.5, MTPEagleWorker, Backend.TORCH)
    step.spec.mtp_hidden_states_manager = None
    assert run(step, 1.0, MTPEagleWorker, Backend.TORCH)["new_tokens_lens"].tolist() == [K + 1] * 2


def test_positions_must_be_there() -> None:
    step = Step(K, [], [turn(9)])
    worker = MTPEagleWorker(config(0.5), device="cpu")
    with pytest.raises(TensorContractError, match="needs the step's positions"):
        worker.sample_and_accept_draft_tokens(step.input_ids, step.logits, step.spec, step.attn)


def test_labels_say_whether_draws_decide() -> None:
    label = label_of(DecodingOptions.read(config([0.9, 0.8, 0.5])))
    assert (label.name, label.settings, label.is_drawn) == ("synthetic", "90% / 80% / 50%", True)
    assert label_of(DecodingOptions.read(MTPDecodingConfig(max_draft_len=K))) is None
    assert label_of(DecodingOptions(0)) is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_shorter_steps_draw_with_the_first_rates(backend: Backend) -> None:
    """One worker for K = 3 and, if the host engine requests them, steps of fewer drafts."""
    worker = MTPEagleWorker(config([1.0, 1.0, 0.0]), device="cpu")
    worker.backend = backend
    for k, count in ((3, 2), (2, 2), (1, 1), (0, 0)):
        turns = [Turn([1, 2], [20, 21, 22][:k], [30, 31, 32, 33][: k + 1])]
        step = Step(k, [], turns)
        step.spec.runtime_draft_len = k
        result = worker(**step.inputs(), mtp_layers=[ScriptedLayer(d) for d in range(K)])
        assert result["new_tokens_lens"].tolist() == [count + 1]
        assert result["next_draft_tokens"].shape == (1, k)


def test_rates_go_where_the_worker_goes() -> None:
    """As buffers do; no checkpoint holds them."""
    worker = MTPEagleWorker(config([0.5, 0.4, 0.3]), device="cpu")
    (mode,) = worker.verifier.modes
    assert not worker.state_dict()
    worker.to("meta")
    assert {mode.rule.thresholds.device.type, mode.rule.seed.device.type} == {"meta"}
