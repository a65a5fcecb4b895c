"""Drafts avoid ids that the target must reject: as many are accepted as without masks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch

from mtp_plugin.hosts.embedded import SamplingParams
from mtp_plugin.infer import decode
from mtp_plugin.ops.step import SlotRows
from mtp_plugin.speculative.drafting import worker as draft_worker
from mtp_plugin.speculative.verification import draft_rules
from tests.hosts.embedded.conftest import assert_drained

NUM_TOKENS = 32
GREEDY_DRAFTS = {"draft_sampling": "greedy"}
EOS = (1,)
BEGIN, END = 5, (9, 11, 13, 9, 11, 15, 17, 6)


def often(texts: list[list[int]]) -> list[int]:
    """Every second of the most frequent ids of the outputs."""
    counted = Counter(token for text in texts for token in text)
    return [token for token, _ in counted.most_common(40)][::2]


OPTIONS = {
    "bad_token_ids": lambda texts: {"bad_token_ids": often(texts)},
    "bad_words": lambda texts: {
        "bad_words": [text[i : i + 2] for text in texts for i in range(0, 16, 2)]
    },
    "min_tokens": lambda texts: {
        "stop_token_ids": often(texts),
        "ignore_eos": False,
        "min_tokens": NUM_TOKENS,
    },
}


def run(llm, prompts, params) -> tuple[float, list[list[int]]]:
    outputs = llm.generate(prompts, params)
    assert_drained(llm)
    return llm.executor.acceptance.acceptance_length, [output.token_ids for output in outputs]


EDITS = {
    "logit_bias": lambda texts: {"logit_bias": dict.fromkeys(often(texts), -6.0)},
    "penalties": lambda _: {"frequency_penalty": -2.0, "repetition_penalty": 0.6},
}


def blind(monkeypatch) -> None:
    """Let drafts be made without what is kept for them."""
    monkeypatch.setattr(SlotRows, "for_drafts", lambda slots: slots)


def blind_to_edits(monkeypatch) -> None:
    """Let drafts be made of what their layer says, whatever is added to it or taken off."""

    def free(slots: SlotRows) -> SlotRows:
        pools = slots.pools
        if pools is None:
            return slots
        none = {name: torch.zeros_like(getattr(pools, name)) for name in ("bias", "counts", "seen")}
        return replace(slots, pools=replace(pools, **none))

    for name in ("sample_tokens", "keep_draft_probs", "propose_processed"):
        right = getattr(draft_rules, name)

        def blinded(*inputs, right=right, **more):
            return right(*(free(x) if isinstance(x, SlotRows) else x for x in inputs), **more)

        monkeypatch.setattr(draft_rules, name, blinded)


@dataclass
class Runs:
    """One batch, decoded with drafts that see the requested options and with blind ones."""

    params: list[SamplingParams]
    without: float
    """Acceptance length of requests that ask for nothing; ``seen``, ``unseen``: of these."""
    seen: float
    texts: list[list[int]]
    unseen: float
    blind_texts: list[list[int]]


def runs(harness, prompts, monkeypatch, make_blind, edits, *, vanilla, temperature, mtp) -> Runs:
    """``edits``: outputs without options -> the requested options."""
    always = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": temperature}
    free = [SamplingParams(**always, seed=i) for i in range(len(prompts))]
    without, free_texts = run(harness.llm(vanilla=vanilla, mtp=mtp), prompts, free)
    requested = {**always, **edits(free_texts)}
    params = [SamplingParams(**requested, seed=i) for i in range(len(prompts))]
    seen, texts = run(harness.llm(vanilla=vanilla, mtp=mtp), prompts, params)
    make_blind(monkeypatch)
    unseen, same = run(harness.llm(vanilla=vanilla, mtp=mtp), prompts, params)
    return Runs(params, without, seen, texts, unseen, same)


@pytest.mark.thinned(cases=3)
@pytest.mark.parametrize(
    ("name", "vanilla", "temperature", "mtp"),
    [
        ("bad_token_ids", False, 0, {}),
        ("bad_words", True, 0, {}),
        ("bad_words", False, 0.7, {}),
        ("min_tokens", True, 0.7, {}),
        ("bad_words", True, 0, GREEDY_DRAFTS),
        ("bad_token_ids", False, 0.3, GREEDY_DRAFTS),
        ("min_tokens", False, 0, GREEDY_DRAFTS),
    ],
)
def test_the_acceptance_length_is_that_without(
    harness, prompts, monkeypatch, name, vanilla, temperature, mtp
):
    """And the text is the target's own, whatever drafts see."""
    requested = {"vanilla": vanilla, "temperature": temperature, "mtp": mtp}
    of = runs(harness, prompts, monkeypatch, blind, OPTIONS[name], **requested)
    assert of.texts == of.blind_texts
    assert of.seen > of.unseen + 0.05
    # the texts are others, of ids that are less sure
    assert of.seen > of.without - 0.3
    target = harness.oracle_model.target
    for prompt, own, text in list(zip(prompts, of.params, of.texts, strict=True))[:2]:
        assert text == decode(target, prompt, own, end_ids=EOS).token_ids


@pytest.mark.thinned(cases=4)
@pytest.mark.parametrize(
    ("name", "vanilla", "temperature", "mtp"),
    [
        ("logit_bias", False, 0, {}),
        ("logit_bias", True, 0.7, {}),
        ("logit_bias", True, 0, GREEDY_DRAFTS),
        ("logit_bias", False, 0.7, {"verification": "rejection"}),
        ("logit_bias", True, 0.7, {"verification": "block"}),
        ("penalties", True, 0, {}),
        ("penalties", False, 0.7, {}),
        ("penalties", False, 0.7, GREEDY_DRAFTS),
        ("penalties", True, 0.7, {"verification": "rejection"}),
        ("penalties", False, 0.7, {"verification": "block"}),
    ],
)
def test_drafts_see_what_is_added_to_logits(
    harness, prompts, monkeypatch, name, vanilla, temperature, mtp
):
    """As many are accepted as without it; the output of coupled drafts does not change."""
    requested = {"vanilla": vanilla, "temperature": temperature, "mtp": mtp}
    of = runs(harness, prompts, monkeypatch, blind_to_edits, EDITS[name], **requested)
    if "verification" not in mtp:
        assert of.texts == of.blind_texts
    assert of.seen > of.unseen + 0.1
    assert of.seen > of.without - 0.4


@pytest.mark.parametrize("way", ["rejection", "block"])
def test_drafts_verified_by_rejection_sampling(harness, prompts, monkeypatch, way):
    always = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.7}
    _, texts = run(harness.llm(), prompts, [SamplingParams(**always)] * len(prompts))
    banned = often(texts)
    params = [SamplingParams(**always, seed=i, bad_token_ids=banned) for i in range(len(prompts))]
    seen, texts = run(harness.llm(mtp={"verification": way}), prompts, params)
    assert not {token for text in texts for token in text} & set(banned)
    blind(monkeypatch)
    unseen, _ = run(harness.llm(mtp={"verification": way}), prompts, params)
    assert seen > unseen + 0.3


@pytest.mark.parametrize("vanilla", [False, True], ids=["eagle", "vanilla"])
@pytest.mark.parametrize(
    ("temperature", "mtp"), [(0, {}), (0.7, {}), (0, GREEDY_DRAFTS), (0.7, GREEDY_DRAFTS)]
)
def test_drafts_go_on_with_the_end_of_thinking(
    harness, prompts, monkeypatch, vanilla, temperature, mtp
):
    """Where a budget is spent; of an end of eight ids that no draft would be."""
    spec = {
        "begin_thinking_phase_token": BEGIN,
        "end_thinking_phase_token": END[-1],
        "mtp": {"check_metadata": True, "thinking_end": list(END), **mtp},
    }
    always = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": temperature}
    params = [
        SamplingParams(**always, seed=i, thinking_token_budget=i % 4) for i in range(len(prompts))
    ]
    thinking = [[BEGIN, *prompt] for prompt in prompts]
    seen, texts = run(harness.llm(vanilla=vanilla, speculative=spec), thinking, params)
    for place, text in enumerate(texts):
        assert text[place % 4 : place % 4 + len(END)] == list(END)
    make = draft_worker.DraftPass
    monkeypatch.setattr(draft_worker, "DraftPass", lambda step, n, place, _: make(step, n, place))
    unseen, same = run(harness.llm(vanilla=vanilla, speculative=spec), thinking, params)
    assert texts == same
    assert seen > unseen + 0.2
