"""A cut draft vocabulary end to end: the text of the whole head, drafts of the cut one alone."""

from __future__ import annotations

import json
import random

import pytest
import torch
from torch import nn

from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.hosts.embedded.models import fuse, load_model
from tests.hosts.embedded.conftest import (
    LOOPS,
    VOCAB,
    WORKERS,
    assert_drained,
    watch_worker,
)
from tests.hosts.embedded.oracles import Oracle
from tests.ops.on_device import DEVICE

NUM_TOKENS, K = 24, 3
GREEDY = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture
def half(tmp_path) -> tuple[str, list[int]]:
    """A file of every id in two, out of order, and the ids."""
    ids = random.Random(3).sample(range(VOCAB), VOCAB // 2)
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(ids))
    return str(path), sorted(ids)


class Drafts:
    """Writes down what a worker drafts: (tokens, drafts) of every request that goes on."""

    def __init__(self, llm) -> None:
        self.of_step: list[list[list[int]]] = []

        def write_down(_, outputs) -> None:
            self.of_step.append(outputs["next_draft_tokens"].tolist())

        watch_worker(llm, after=write_down)

    @property
    def ids(self) -> set[int]:
        return {token for step in self.of_step for drafts in step for token in drafts}


def run(llm, prompts):
    outputs = llm.generate(prompts, GREEDY)
    assert_drained(llm)
    return [output.token_ids for output in outputs], llm.executor.acceptance


@pytest.mark.parametrize("vanilla", WORKERS)
@pytest.mark.parametrize("no_overlap", LOOPS)
def test_the_text_is_the_targets_and_drafts_are_of_the_list(
    harness, target, prompts, half, vanilla, no_overlap
):
    path, ids = half
    options = {"vanilla": vanilla, "disable_overlap_scheduler": no_overlap, "kv_fill": float("nan")}
    llm = harness.llm(mtp={"draft_vocab": path}, **options)
    drafts = Drafts(llm)
    texts, acceptance = run(llm, prompts)
    assert texts == [target.greedy(p, NUM_TOKENS) for p in prompts]
    # ids that are not in the list are emitted, and ids that are in it are drafted rightly
    assert {token for text in texts for token in text} - set(ids)
    assert drafts.ids <= set(ids)
    assert acceptance.acceptance_length > 1.15
    # and with the original worker, so that its steps may be captured
    assert run(harness.llm(mtp={"draft_vocab": path}, **options), prompts) == (texts, acceptance)
    whole = harness.llm(**options)
    all_drafts = Drafts(whole)
    same_texts, all_acceptance = run(whole, prompts)
    assert same_texts == texts
    assert all_drafts.ids - set(ids)
    assert all_acceptance != acceptance


@pytest.mark.parametrize("vanilla", WORKERS)
def test_what_may_not_be_drafted_is_never_accepted(harness, target, prompts, tmp_path, vanilla):
    """Of what the target emits nothing is in the list: one token per step, and the same text."""
    expected = [target.greedy(p, NUM_TOKENS) for p in prompts]
    path = tmp_path / "others.json"
    path.write_text(json.dumps(sorted(set(range(VOCAB)) - {t for text in expected for t in text})))
    texts, acceptance = run(harness.llm(vanilla=vanilla, mtp={"draft_vocab": str(path)}), prompts)
    assert texts == expected
    assert acceptance.acceptance_length == 1.0
    assert acceptance.num_drafted > 0


class CutOracle(Oracle):
    """A fresh run whose drafts are the best of some ids."""

    def __init__(self, ids: list[int], *args, **options) -> None:
        super().__init__(*args, **options)
        self.ids = ids

    def _draft(self, depth: int, state: torch.Tensor) -> int:
        layer = self.model.mtp_layers[depth]
        logits = layer.shared_head(state, self.model.lm_head, None, True)[-1]
        return self.ids[int(logits[self.ids].argmax())]


@pytest.mark.parametrize("vanilla", WORKERS)
def test_drafts_are_those_of_a_fresh_run_with_the_same_list(harness, prompts, half, vanilla):
    """One request at a time: each step's drafts against a recomputation over its prefix."""
    path, ids = half
    oracle = CutOracle(ids, harness.oracle_model, K, vanilla=vanilla)
    checked = 0
    for prompt in prompts[3:5]:
        llm = harness.llm(
            vanilla=vanilla, disable_overlap_scheduler=True, mtp={"draft_vocab": path}
        )
        drafts, lengths = Drafts(llm), [len(prompt)]
        for events in llm.stream([prompt], GREEDY):
            lengths += [lengths[-1] + len(event.token_ids) for event in events]
        tokens = prompt + oracle.greedy(prompt, NUM_TOKENS)
        for length, (made,) in zip(lengths[1:], drafts.of_step, strict=True):
            if length + K <= len(tokens):
                assert made == oracle.fresh(tuple(tokens[:length])).drafts
                checked += 1
    assert checked > 10


def test_fused_layers(harness, target, prompts, half):
    device = next(harness.model.lm_head.parameters()).device
    if device.type == "cpu" and DEVICE.type == "cuda":
        pytest.skip("kernels of a model on a CPU are interpreted, and here they are compiled")
    path, ids = half
    model = fuse(load_model(harness.path, num_mtp_layers=1, device=device), kernels="triton")
    llm = LLM(harness.llm(mtp={"draft_vocab": path, "kernels": "triton"}).config, model=model)
    drafts = Drafts(llm)
    outputs = llm.generate(prompts[3:5], SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert [o.token_ids for o in outputs] == [target.greedy(p, 8) for p in prompts[3:5]]
    assert drafts.ids <= set(ids)


def test_the_head_of_drafts_alone_is_cut(harness, half):
    path, ids = half
    lines: list[str] = []
    config = harness.llm(mtp={"draft_vocab": path}).config
    with LLM(config, model=harness.model, on_progress=lines.append) as llm:
        head, whole = llm.executor.engine.draft_head, harness.model.lm_head
        assert torch.equal(head.weight, whole.weight[ids])
        assert whole.weight.shape[0] == VOCAB
    cutting = lines.index(f"cutting the draft head to {VOCAB // 2} ids")
    assert cutting < lines.index("allocating the KV cache")
    engine = harness.llm().executor.engine
    assert engine.draft_head is harness.model.lm_head


def test_what_cannot_be_cut(harness):
    with pytest.raises(ConfigError, match=f"at most the vocabulary of {VOCAB}, got {VOCAB + 1}"):
        harness.llm(mtp={"draft_vocab": VOCAB + 1})
    config = harness.llm(mtp={"draft_vocab": 9}).config
    model = load_model(
        harness.path, num_mtp_layers=1, device=harness.model.embed_tokens.weight.device
    )
    model.target.lm_head = WrappedHead(model.lm_head)
    with pytest.raises(ConfigError, match="a linear layer, to take its rows, got WrappedHead"):
        LLM(config, model=model)


class WrappedHead(nn.Module):
    """Does what its head does, and hides how."""

    def __init__(self, head) -> None:
        super().__init__()
        self.head = head
        self.weight = head.weight

    def forward(self, states):
        return self.head(states)
