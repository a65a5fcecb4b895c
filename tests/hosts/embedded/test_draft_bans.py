"""Drafts see what processes the target's logits: as many are accepted as without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mtp_plugin.hosts.embedded import SamplingParams
from mtp_plugin.ops.step import SlotRows
from mtp_plugin.speculative.drafting import worker as draft_worker
from mtp_plugin.speculative.verification import draft_rules
from tests.hosts.embedded.conftest import assert_drained, decoded

NUM_TOKENS = 24
GREEDY_DRAFTS = {"draft_sampling": "greedy"}
BEGIN, END = 5, (9, 11, 13, 9, 11, 15, 17, 6)


def often(texts: list[list[int]]) -> list[int]:
    """Every second of the most frequent ids of the outputs."""
    counted = Counter(token for text in texts for token in text)
    return [token for token, _ in counted.most_common(40)][::2]


OPTIONS: dict[str, Callable[[list[list[int]]], dict[str, Any]]] = {
    "bad_token_ids": lambda texts: {"bad_token_ids": often(texts)},
    "bad_words": lambda texts: {
        "bad_words": [text[i : i + 2] for text in texts for i in range(0, 16, 2)]
    },
    "min_tokens": lambda texts: {
        "stop_token_ids": often(texts),
        "ignore_eos": False,
        "min_tokens": NUM_TOKENS,
    },
    "logit_bias": lambda texts: {"logit_bias": dict.fromkeys(often(texts), -6.0)},
    "penalties": lambda _: {"frequency_penalty": -2.0, "repetition_penalty": 0.6},
}
"""Outputs without options -> the requested options."""


def run(llm, prompts, params) -> tuple[float, list[list[int]]]:
    outputs = llm.generate(prompts, params)
    assert_drained(llm)
    return llm.executor.acceptance.acceptance_length, [output.token_ids for output in outputs]


def blind_to_masks(monkeypatch) -> None:
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


@pytest.mark.parametrize(
    ("name", "vanilla", "temperature", "mtp"),
    [
        ("bad_words", True, 0.7, {}),
        ("min_tokens", True, 0.7, {}),
        ("bad_token_ids", False, 0.3, GREEDY_DRAFTS),
        ("bad_token_ids", True, 0.7, {"verification": "rejection"}),
        ("logit_bias", False, 0, {}),
        ("penalties", False, 0.7, {}),
        ("penalties", True, 0.7, {"verification": "block"}),
    ],
)
def test_drafts_see_what_processes_the_logits(
    harness, prompts, monkeypatch, name, vanilla, temperature, mtp
):
    """More are accepted than of drafts without it, and about as many as without the option; the
    output of coupled drafts does not change."""
    always = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": temperature}
    options, prompts = {"vanilla": vanilla, "mtp": mtp}, prompts[2:]
    free = [SamplingParams(**always, seed=i) for i in range(len(prompts))]
    without, texts = run(harness.llm(**options), prompts, free)
    params = [
        SamplingParams(**{**always, **OPTIONS[name](texts)}, seed=i) for i in range(len(prompts))
    ]
    seen, texts = run(harness.llm(**options), prompts, params)
    (blind_to_edits if name in ("logit_bias", "penalties") else blind_to_masks)(monkeypatch)
    unseen, blind_texts = run(harness.llm(**options), prompts, params)
    assert seen > unseen + 0.05
    # the outputs are others, of ids that are less sure
    assert seen > without - 0.4
    if "verification" in mtp:
        if name == "bad_token_ids":
            assert not {t for text in texts for t in text} & set(params[0].bad_token_ids)
    else:
        assert texts == blind_texts
        few = decoded(harness, prompts[:2], params[:2], end_ids=(1,))
        assert texts[:2] == few


@pytest.mark.parametrize(
    ("vanilla", "temperature", "mtp"),
    [(True, 0.7, {}), (False, 0, GREEDY_DRAFTS)],
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
