"""Drafts by a model's own layers: those of a fresh run over the text, whatever came before."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.random_models import write_random_checkpoint
from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.embedded.models import FusedMTPLayer, LoadedModel, fuse, load_model
from mtp_plugin.infer import (
    Continuation,
    DynamicKVCache,
    MTPDrafter,
    MTPTarget,
    Role,
    SamplingRule,
    Scorer,
    decode,
    rejection,
    speculative_decode,
)
from mtp_plugin.infer.mtp_head import Chain
from mtp_plugin.requests.options import SamplingParams
from tests.hosts.embedded.oracles import Oracle

PROMPT = [3, 1, 4, 1, 5]
VOCAB = 96
Load = Callable[[str], LoadedModel]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A model with three layers by its family; drafts of ``echo`` are often right."""
    loaded: dict[str, LoadedModel] = {}

    def of(name: str) -> LoadedModel:
        if name not in loaded:
            family, options = name, {}
            if name == "echo":
                family, options = "glm4_moe", {"echo_draft": True, "residual_scale": 0.4}
            path = write_random_checkpoint(
                tmp_path_factory.mktemp(name), family, num_mtp_layers=3, vocab_size=VOCAB, **options
            )
            loaded[name] = load_model(path)
        return loaded[name]

    return of


def rule_of(prompt: list[int], **options: object) -> SamplingRule:
    return SamplingRule(SamplingParams(**options), prompt)


@pytest.mark.parametrize(
    ("family", "is_vanilla", "chain"),
    [
        ("glm4_moe", False, "output"),
        ("glm4_moe", True, "output"),
        ("glm4_moe", True, "none"),
        ("deepseek_v3", True, "output"),
    ],
)
def test_drafts_are_those_of_a_fresh_run(
    load: Load, family: str, is_vanilla: bool, chain: Chain
) -> None:
    """A text that grows by one to four tokens at a time, the rest of what was read forgotten."""
    model, rng = load(family), random.Random(0)
    for k in (1, 2, 3):
        oracle = Oracle(model, k, vanilla=is_vanilla, chain=chain)
        target = MTPTarget(model)
        drafter = MTPDrafter(model, target, is_vanilla=is_vanilla, chain=chain)
        scorer, text, rule = Scorer(target), list(PROMPT), rule_of(PROMPT)
        for _ in range(6):
            scorer.score(text)
            text.append(rng.randrange(VOCAB))
            drafts = drafter.draft(rule, text[len(PROMPT) :], k).token_ids
            assert drafts == oracle.fresh(tuple(text)).drafts
            scorer.score([*text, *drafts])
            text += [rng.randrange(VOCAB) for _ in range(rng.randrange(4))]


@pytest.mark.parametrize(("attention", "is_vanilla"), [("sdpa", True), ("eager", False)])
def test_prompts_need_no_mask(load: Load, is_vanilla: bool, attention: str) -> None:
    """It would grow with their square; without one they see what is before them all the same."""
    model, seen = load("glm4_moe"), []
    text = [*PROMPT, 7]
    want = Oracle(model, 3, vanilla=is_vanilla).fresh(tuple(text)).drafts
    model.set_attn_implementation(attention)
    try:
        target = MTPTarget(model)
        Scorer(target).score(PROMPT)
        layer = model.mtp_layers[0].block.self_attn
        hook = layer.register_forward_pre_hook(
            lambda _, __, named: seen.append(named["attention_mask"]), with_kwargs=True
        )
        drafter = MTPDrafter(model, target, is_vanilla=is_vanilla)
        assert drafter.draft(rule_of(PROMPT), [7], 3).token_ids == want
        hook.remove()
    finally:
        model.set_attn_implementation("sdpa")
    shapes = [None if mask is None else list(mask.shape) for mask in seen]
    first = None if attention == "sdpa" else [1, 1, len(PROMPT), len(PROMPT)]
    assert shapes == [first] + ([] if is_vanilla else [None, None])


@pytest.mark.parametrize("is_vanilla", [False, True], ids=["eagle", "vanilla"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3, "top_k": 20}])
def test_a_text_is_the_target_s_own_in_fewer_steps(
    load: Load, is_vanilla: bool, options: dict[str, object]
) -> None:
    model = load("echo")
    params = SamplingParams(max_new_tokens=24, **options)
    target = MTPTarget(model)
    drafter = MTPDrafter(model, target, is_vanilla=is_vanilla)
    ran = speculative_decode(target, drafter, Continuation(PROMPT, params), num_drafts=3)
    assert ran.decoded == decode(model.target, PROMPT, params)
    assert ran.num_steps < 20
    assert ran.drafted == [0] + [3] * (ran.num_steps - 1)


@pytest.mark.parametrize(("family", "is_vanilla"), [("glm4_moe", False), ("deepseek_v3", True)])
def test_fused_layers_draft_the_same(tmp_path: Path, family: str, is_vanilla: bool) -> None:
    """As a step of the executor runs them where there is a GPU."""
    options: dict[str, Any] = {"echo_draft": True, "residual_scale": 0.4}
    path = write_random_checkpoint(tmp_path, family, num_mtp_layers=3, vocab_size=VOCAB, **options)
    params, texts = SamplingParams(max_new_tokens=12), []
    for make in (load_model, lambda path: fuse(load_model(path), kernels="reference")):
        model = make(path)
        target = MTPTarget(model)
        drafter = MTPDrafter(model, target, is_vanilla=is_vanilla)
        texts.append(
            speculative_decode(target, drafter, Continuation(PROMPT, params), num_drafts=3)
        )
    assert isinstance(model.mtp_layers[0], FusedMTPLayer)
    assert texts[0] == texts[1]
    assert texts[0].num_accepted > 0


def test_as_many_drafts_as_are_requested(load: Load) -> None:
    """Fewer, and more again."""
    model, target = load("glm4_moe"), MTPTarget(load("glm4_moe"))
    text, rule, scorer = [*PROMPT, 7], rule_of(PROMPT), Scorer(target)
    drafter = MTPDrafter(model, target, is_vanilla=True)
    assert drafter.draft(rule, [], 3).token_ids == []
    for k in (3, 1, 2, 0, 3):
        scorer.score(text[:-1])
        want = Oracle(model, k, vanilla=True).fresh(tuple(text)).drafts
        assert drafter.draft(rule, text[len(PROMPT) :], k).token_ids == want
        text += [9, 11]


def test_how_drafts_are_sampled(load: Load) -> None:
    model = load("glm4_moe")
    rule = rule_of(PROMPT, temperature=1.5, seed=4)
    drafts = {}
    for role in (Role.TARGET, Role.DRAFT, None):
        target = MTPTarget(model)
        Scorer(target).score(PROMPT)
        drafts[role] = MTPDrafter(model, target, role=role).draft(rule, [7], 3)
    assert len({tuple(draft.token_ids) for draft in drafts.values()}) == 3
    assert drafts[None].token_ids == Oracle(model, 3, vanilla=False).fresh((*PROMPT, 7)).drafts
    assert drafts[None].probabilities is drafts[Role.TARGET].probabilities is None
    for token, probabilities in zip(*drafts[Role.DRAFT], strict=True):
        assert probabilities.shape == (VOCAB,)
        assert 0 < probabilities[token] <= 1
        torch.testing.assert_close(float(probabilities.sum()), 1.0)


def test_a_row_without_values_ends_the_drafts(load: Load) -> None:
    model, target = load("glm4_moe"), MTPTarget(load("glm4_moe"))
    Scorer(target).score(PROMPT)
    drafter = MTPDrafter(model, target)
    states = target.states
    assert states is not None
    target.states = states * torch.nan
    assert drafter.draft(rule_of(PROMPT), [7], 3).token_ids == []
    target.states = states
    drafter = MTPDrafter(model, target)
    assert len(drafter.draft(rule_of(PROMPT), [7], 3).token_ids) == 3


def test_ids_that_may_be_drafted(load: Load) -> None:
    model, target = load("glm4_moe"), MTPTarget(load("glm4_moe"))
    Scorer(target).score(PROMPT)
    (free,) = MTPDrafter(model, target).draft(rule_of(PROMPT), [7], 1).token_ids
    others = [token for token in range(VOCAB) if token != free]
    cut = MTPDrafter(model, target, vocab_ids=others).draft(rule_of(PROMPT), [7], 1).token_ids
    assert cut[0] in others


def test_rejection_ends_and_repeats(load: Load) -> None:
    model, params = load("echo"), SamplingParams(max_new_tokens=16, temperature=0.9, seed=5)
    texts = []
    for _ in range(2):
        target = MTPTarget(model)
        drafter = MTPDrafter(model, target, role=Role.DRAFT)
        text = Continuation(PROMPT, params)
        ran = speculative_decode(target, drafter, text, num_drafts=2, verify=rejection)
        assert 0 < ran.num_accepted < sum(ran.drafted)
        texts.append(ran.decoded.token_ids)
    assert texts[0] == texts[1]


def test_wrong_calls_are_named(load: Load) -> None:
    model, target = load("glm4_moe"), MTPTarget(load("glm4_moe"))
    drafter = MTPDrafter(model, target, is_vanilla=True)
    with pytest.raises(ConfigError, match="num_drafts: 4 need 4 MTP layers, got 3"):
        drafter.draft(rule_of(PROMPT), [], 4)
    target.forward(torch.tensor([PROMPT]), DynamicKVCache())
    with pytest.raises(ConfigError, match="target: expected 7 tokens to have been read, got 5"):
        drafter.draft(rule_of(PROMPT), [7, 8, 9], 3)
