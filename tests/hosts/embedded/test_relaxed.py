"""Relaxed acceptance end to end: options of requests, limits, logits processing with it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.embedded import LlmRequest, SamplingParams
from tests.hosts.embedded.conftest import VOCAB, WORKERS, generate, wrap_worker
from tests.hosts.embedded.oracles import Oracle, ScriptedDrafts
from tests.ops.acceptance import example

BEGIN, END, EOS = 5, 6, 1
RELAXED = {
    "use_relaxed_acceptance_for_thinking": True,
    "relaxed_topk": 8,
    "relaxed_delta": 0.9,
    "begin_thinking_phase_token": BEGIN,
    "end_thinking_phase_token": END,
}
NUM_TOKENS = 24


def make_params(**options) -> SamplingParams:
    return SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, **options)


@pytest.fixture
def thinking(prompts):
    return [[BEGIN, *(t for t in prompt if t not in (BEGIN, END))] for prompt in prompts]


def relaxed(harness, *, mtp=None, **options):
    return harness.llm(
        speculative={**RELAXED, "mtp": {"check_metadata": True, **(mtp or {})}}, **options
    )


def strict_part(text):
    """Up to where a text begins to think by itself."""
    return text[: text.index(BEGIN) + 1] if BEGIN in text else text


def test_an_ignored_end_is_accepted_only_as_argmax(harness, target):
    """Drafts of it are as good as any by the thresholds, and are not accepted."""
    prompt = [BEGIN, 20, 21, 22]
    params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    for options, may_be_relaxed in (({}, True), ({"min_tokens": 2}, False)):
        llm = relaxed(harness, k=3)
        wrap_worker(
            llm, lambda worker: ScriptedDrafts(worker, {0: prompt + [30, EOS] * 20}, lambda *_: 3)
        )
        own = replace(params, relaxed_topk=VOCAB, relaxed_delta=2.0, **options)
        (text,) = generate(llm, [prompt], [own])
        strict = target.greedy(prompt, NUM_TOKENS)
        assert (30 in text and text != strict) == may_be_relaxed
        for place, token in enumerate(text):
            if token == EOS:
                assert target.greedy(prompt + text[:place], 1) == [EOS]


LABELLED: list[tuple[dict, bool]] = [
    ({}, True),
    ({"relaxed_topk": 3}, True),
    ({"relaxed_topk": 1}, False),
    ({"relaxed_acceptance": False}, False),
    ({"temperature": 0.8}, False),
    ({"speculate": False}, False),
    ({"max_draft_len": 0}, False),
    ({"max_draft_len": 1}, True),
    ({"ignore_eos": True}, True),
    ({"ignore_eos": True, "min_tokens": 1}, False),
]


def test_the_label_is_of_requests_whose_text_may_differ(harness, thinking):
    params = [SamplingParams(max_new_tokens=3, **options) for options, _ in LABELLED]
    outputs = relaxed(harness).generate([thinking[0]] * len(params), params)
    assert [output.label is not None for output in outputs] == [
        labelled for _, labelled in LABELLED
    ]


@pytest.mark.parametrize("end", [[9, 11], [9, END], [END, 9], None])
def test_an_end_of_thinking_that_relaxed_acceptance_does_not_know(harness, target, end):
    """A config whose answers would stay relaxed is refused; others end with the forced end."""
    mtp = {} if end is None else {"thinking_end": end}
    if end == [9, 11]:
        with pytest.raises(
            ConfigError, match=r"^mtp\.thinking_end: expected the token .* 6, among"
        ):
            relaxed(harness, mtp=mtp)
        return
    prompt, budget = [BEGIN, 20, 21, 22], 2
    llm = relaxed(harness, mtp=mtp)
    params = make_params(thinking_token_budget=budget, relaxed_topk=VOCAB, relaxed_delta=2.0)
    (text,) = generate(llm, [prompt], [params])
    forced = [END] if end is None else end
    assert text[budget : budget + len(forced)] == forced
    end = budget + len(forced)
    assert strict_part(text[end:]) == strict_part(
        target.greedy(prompt + text[:end], NUM_TOKENS - end)
    )


def test_requests_have_thresholds_of_their_own(harness, target, thinking):
    """In one batch; R35: top-1 and no distance is the strict text."""
    params = [
        make_params(relaxed_topk=1, relaxed_delta=0.0)
        if place % 2
        else make_params(relaxed_delta=1.0)
        for place in range(len(thinking))
    ]
    texts = generate(relaxed(harness), thinking, params)
    expected = [target.greedy(prompt, NUM_TOKENS) for prompt in thinking]
    assert texts[1::2] == expected[1::2]
    assert texts[::2] != expected[::2]
    # a request's options act like those of a config
    config = {**RELAXED, "relaxed_topk": 3, "relaxed_delta": 0.4}
    own = generate(relaxed(harness), thinking, make_params(relaxed_topk=3, relaxed_delta=0.4))
    assert own == generate(harness.llm(speculative=config), thinking, make_params())


class Story:
    """A text, step by step: drafts and rows from scratch, and what acceptance makes of them."""

    def __init__(self, harness, k: int, *, vanilla: bool) -> None:
        self.oracle = Oracle(harness.oracle_model, k, vanilla=vanilla)
        self.relaxed = 0
        """Accepted drafts that are not the argmax."""
        self.closest = float("inf")

    def text(
        self, prompt: list[int], rule: example.Rule, preempted: Sequence[int] = ()
    ) -> list[int]:
        """Of a request that lost its place when it had so many tokens: it is read anew, and goes on
        with its first choice."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + NUM_TOKENS:
            if len(tokens) - len(prompt) in {0, *preempted}:
                tokens.append(self._rows(tokens, 1)[0].choice)
                thinking = example.phase_after_tokens(tokens, rule._replace(thinking=False))
                rule = rule._replace(thinking=thinking)
                continue
            drafts = self.oracle.fresh(tuple(tokens)).drafts
            rows = self._rows([*tokens, *drafts], len(drafts) + 1)
            run = example.relaxed(rows, drafts, rule)
            self.relaxed += sum(
                row.choice != token for row, token in zip(rows, run.tokens, strict=False)
            )
            self.closest = min(self.closest, *run.margins.values(), 1.0)
            tokens += run.tokens
            rule = rule._replace(thinking=run.thinking)
        return tokens[len(prompt) :][:NUM_TOKENS]

    @torch.inference_mode()
    def _rows(self, tokens: list[int], count: int) -> list[example.Row]:
        """Of the last tokens."""
        model = self.oracle.model
        logits = model.lm_head(self.oracle.states(tuple(tokens))[-count:])
        return example.rows_of(logits.double().tolist())


@pytest.mark.parametrize("vanilla", WORKERS)
@pytest.mark.parametrize("k", [3, 1])
def test_texts_are_those_of_the_story(harness, thinking, vanilla, k):
    """Token by token."""
    reference = Story(harness, k, vanilla=vanilla)
    rule = example.Rule(False, 8, 0.9, [EOS], BEGIN, END)
    texts = [reference.text(prompt, rule) for prompt in thinking]
    llm = relaxed(harness, k=k, vanilla=vanilla)
    assert generate(llm, thinking, make_params()) == texts
    assert reference.closest > 1e-6
    assert reference.relaxed > 0


@pytest.mark.parametrize("vanilla", WORKERS)
def test_r35_no_excluded_id_is_accepted(harness, thinking, vanilla):
    """R35: however near: ids that are not allowed, bad words, early stops, penalised ones."""
    allowed = tuple(range(1, 128, 3))
    params = [
        make_params(relaxed_topk=128, relaxed_delta=1.0, **more)
        for more in (
            {"allowed_token_ids": allowed},
            {"bad_token_ids": tuple(range(64))},
            {"allowed_token_ids": allowed, "bad_words": tuple((a, 4) for a in allowed)},
            {"stop_token_ids": tuple(range(100, 128)), "min_tokens": NUM_TOKENS - 1},
        )
    ]
    first, second, third, fourth = generate(
        relaxed(harness, vanilla=vanilla), thinking[3:7], params
    )
    assert set(first) <= set(allowed)
    assert not set(second) & set(range(64))
    assert 4 not in third[1:]
    assert not set(fourth[: NUM_TOKENS - 1]) & set(range(100, 128))


@pytest.mark.parametrize("vanilla", WORKERS)
@pytest.mark.parametrize("option", ["bad_token_ids", "allowed_token_ids"])
def test_r35_an_excluded_draft_ends_what_is_relaxed(harness, thinking, option, vanilla):
    """R35: drafts that are not allowed among others that are never the argmax."""
    banned, rng = tuple(set(range(64)) - {BEGIN, END}), random.Random(35)
    ids = banned if option == "bad_token_ids" else tuple(set(range(VOCAB)) - set(banned))
    few = thinking[3:7]
    drafts = [
        [rng.choice(banned if place % 5 == 4 else range(64, VOCAB)) for place in range(64)]
        for _ in few
    ]
    llm = relaxed(harness, vanilla=vanilla)
    sequences = dict(enumerate(map(list.__add__, few, drafts)))
    wrap_worker(llm, lambda worker: ScriptedDrafts(worker, sequences, lambda *_: 3))
    params = make_params(relaxed_topk=VOCAB, relaxed_delta=2.0, **{option: ids})
    for text, scripted in zip(generate(llm, few, params), drafts, strict=True):
        assert not set(text) & set(banned)
        accepted = [token == draft for token, draft in zip(text, scripted, strict=False)]
        assert sum(accepted) > NUM_TOKENS // 3


@pytest.mark.parametrize("vanilla", WORKERS)
def test_r35_edits_decide_what_is_strict(harness, thinking, vanilla):
    """R35: top-1 and no distance is the strict text of the same edits."""
    edits = {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.3,
        "logit_bias": {token: (-1) ** token for token in range(0, 128, 5)},
    }
    strict = generate(harness.llm(vanilla=vanilla), thinking, make_params(**edits))
    as_strict = {"relaxed_topk": 1, "relaxed_delta": 0.0}
    llm = relaxed(harness, vanilla=vanilla)
    assert generate(llm, thinking, make_params(**as_strict, **edits)) == strict
    near = generate(
        relaxed(harness, vanilla=vanilla), thinking, make_params(relaxed_delta=1.0, **edits)
    )
    assert near != strict


@pytest.mark.parametrize("no_overlap", [True, False], ids=["no_overlap", "overlap"])
def test_r34_strict_after_the_end_within_a_run(harness, target, no_overlap):
    """R34: drafts after the end, near enough one token before it, are not accepted."""
    rng, tried = random.Random(34), 0
    while tried < 4:
        prompt = [rng.randrange(VOCAB) for _ in range(6)]
        text, place = target.greedy(prompt, 20), rng.randrange(2, 10)
        begin, end = prompt[0], text[place]
        if end in [*prompt, *text[:place]] or begin in [*prompt[1:], *text]:
            continue
        tried += 1
        tags = {"begin_thinking_phase_token": begin, "end_thinking_phase_token": end}
        near = {**RELAXED, **tags, "relaxed_topk": VOCAB, "relaxed_delta": 2.0}
        llm = harness.llm(speculative=near, disable_overlap_scheduler=no_overlap)
        sequences, last = {0: prompt + text}, len(prompt) + place

        def until_the_end(_, length, last=last):
            return max(0, min(3, last - length))

        wrap_worker(llm, lambda w, s=sequences, a=until_the_end: ScriptedDrafts(w, s, a))
        assert generate(llm, [prompt], SamplingParams(max_new_tokens=16, ignore_eos=True)) == [
            text[:16]
        ]


def test_r34_strict_outside_the_phase(harness, target, prompts):
    """R34: whatever requests ask for."""
    ended = [[BEGIN, END, *(t for t in prompt if t not in (BEGIN, END))] for prompt in prompts]
    llm = relaxed(harness)
    texts = generate(llm, ended, make_params(relaxed_delta=1.0, relaxed_topk=128))
    for text, prompt in zip(texts, ended, strict=True):
        expected = strict_part(target.greedy(prompt, NUM_TOKENS))
        assert text[: len(expected)] == expected


@pytest.mark.parametrize("vanilla", WORKERS)
def test_thresholds_survive_chunks_and_preemption(harness, thinking, vanilla, monkeypatch):
    """Every other request has its own thresholds."""
    tight = {"max_num_tokens": 36, "kv_cache_config": {"max_tokens": 96}, "kv_fill": float("nan")}
    preempted = defaultdict(list)
    pause = LlmRequest.pause

    def noted(request):
        pause(request)
        preempted[request.request_id].append(len(request.output_token_ids))

    monkeypatch.setattr(LlmRequest, "pause", noted)
    llm = relaxed(harness, vanilla=vanilla, **tight)
    own = [{"relaxed_topk": 3, "relaxed_delta": 0.4} if i % 2 else {} for i in range(len(thinking))]
    texts = generate(llm, thinking, [make_params(**options) for options in own])
    assert sum(map(len, preempted.values())) == llm.executor.num_preemptions > 0

    reference = Story(harness, 3, vanilla=vanilla)
    rule = example.Rule(False, 8, 0.9, [EOS], BEGIN, END)
    for place, (prompt, options) in enumerate(zip(thinking, own, strict=True)):
        mine = rule._replace(topk=3, delta=0.4) if options else rule
        assert texts[place] == reference.text(prompt, mine, preempted[place])
    assert reference.relaxed > 0
    assert reference.closest > 1e-6
