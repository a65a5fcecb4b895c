"""Rejection and block verification, end to end; other requests of the batch keep their output."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from mtp_plugin.errors import RequestError
from mtp_plugin.hosts.embedded import SamplingParams
from mtp_plugin.infer import SamplingRule
from tests.distribution.shares import tail
from tests.hosts.embedded.conftest import VOCAB, WORKERS, assert_drained, generate
from tests.hosts.embedded.requests_by_kind import sampled_params

MODES = ["rejection", "block"]


def params_of(place: int, **more) -> SamplingParams:
    return sampled_params(place, 20, **more)


ALL = {"verification": ["coupled", "rejection", "block"]}


@pytest.mark.parametrize("vanilla", WORKERS)
def test_more_drafts_are_accepted_than_coupled_ones(harness, prompts, vanilla):
    """And the same schedule gives the same text again."""
    params = [params_of(place, max_new_tokens=40) for place in range(len(prompts))]
    lengths, texts = {}, {}
    for mode in ("coupled", *MODES, "block"):
        llm = harness.llm(vanilla=vanilla, mtp={"verification": mode})
        text = generate(llm, prompts, params)
        assert texts.setdefault(mode, text) == text
        assert all(len(one) == 40 for one in text)
        lengths[mode] = llm.executor.acceptance.acceptance_length
    assert lengths["rejection"] > lengths["coupled"] - 0.15
    assert lengths["block"] > lengths["rejection"] - 0.15
    assert min(lengths.values()) > 1.5


@torch.inference_mode()
def shares_of_texts(target, prompt: list[int], requested: SamplingParams, length: int) -> dict:
    """How likely every text of so many tokens is, by the target alone."""
    rule, shares = SamplingRule(requested, prompt), {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, share in shares.items():
            row = target.model.lm_head(target.states((*prompt, *text))[-1:])[0].float()
            for token, more in enumerate(rule.probabilities(row, text).tolist()):
                if more:
                    longer[(*text, token)] = share * more
        shares = longer
    return shares


@pytest.mark.parametrize("mode", MODES)
def test_texts_are_as_frequent_as_the_target_says_r28(harness, target, mode):
    """The first three tokens together, of as many seeds; drafts make the second and the third."""
    prompt, number = [5, 9], 1200
    params = [
        SamplingParams(max_new_tokens=4, ignore_eos=True, temperature=0.2, top_k=5, seed=seed)
        for seed in range(number)
    ]
    llm = harness.llm(
        k=2,
        mtp={"verification": mode},
        max_batch_size=128,
        max_num_tokens=512,
        kv_cache_config={"max_tokens": 2048},
    )
    seen = Counter(tuple(text[:3]) for text in generate(llm, [prompt] * number, params))
    assert 1.3 < llm.executor.acceptance.acceptance_length < 2.3
    expected = shares_of_texts(target, prompt, params[0], 3)
    assert seen.keys() <= expected.keys()
    counts = [seen[text] for text in expected]
    assert tail(counts, [number * share for share in expected.values()]) > 1e-3


@pytest.mark.parametrize("no_overlap", [False, True])
@pytest.mark.parametrize("vanilla", WORKERS)
def test_other_requests_of_the_batch_keep_their_output(
    harness, target, prompts, vanilla, no_overlap
):
    """Coupled requests, with drafts of either kind, and greedy ones."""
    requested = [
        {"verification": "rejection"},
        {},
        {"verification": "block"},
        {"draft_sampling": "greedy"},
        {"verification": "rejection", "draft_sampling": "greedy"},
        {"verification": "coupled", "draft_sampling": "coupled"},
        {"verification": "block", "draft_sampling": "plain"},
    ]
    params = [params_of(place, **more) for place, more in enumerate(requested)]
    params.append(SamplingParams(max_new_tokens=20, ignore_eos=True, verification="block"))
    llm = harness.llm(vanilla=vanilla, disable_overlap_scheduler=no_overlap, mtp=ALL)
    mixed = generate(llm, prompts, params)
    alone = generate(harness.llm(k=0), prompts, [params_of(place) for place in range(len(prompts))])
    for place in (1, 3, 5):
        assert mixed[place] == alone[place]
    assert mixed[7] == target.greedy(prompts[7], 20)
    assert any(mixed[place] != alone[place] for place in (0, 2, 4, 6))


@pytest.mark.parametrize("mode", MODES)
def test_chunks_preemption_and_cut_vocabularies(harness, prompts, mode):
    params = [params_of(place) for place in range(len(prompts))]
    llm = harness.llm(
        mtp={"verification": mode, "draft_vocab": 100},
        max_num_tokens=36,
        kv_cache_config={"max_tokens": 96},
        kv_fill=float("nan"),
    )
    texts = generate(llm, prompts, params)
    assert llm.executor.num_preemptions > 0
    assert [len(text) for text in texts] == [20] * len(prompts)
    pool = llm.pieces.manager.draft_probs
    assert not pool[:, :, 100:].any()


@pytest.mark.parametrize("mode", MODES)
def test_what_logits_are_edited_to_holds(harness, prompts, mode):
    params = [
        params_of(0, allowed_token_ids=list(range(0, VOCAB, 2))),
        params_of(1, bad_token_ids=[3, 5, 9], frequency_penalty=0.5),
        params_of(2, logit_bias={7: 100.0}),
        params_of(3, min_tokens=15, stop_token_ids=list(range(0, 120, 4)), ignore_eos=False),
    ]
    texts = generate(harness.llm(mtp={"verification": mode}), prompts[:4], params)
    assert not any(token % 2 for token in texts[0])
    assert not {3, 5, 9} & set(texts[1])
    assert set(texts[2]) == {7}
    assert len(texts[3]) >= 15


@pytest.mark.parametrize(
    ("mtp", "requested", "message"),
    [
        (
            {},
            {"verification": "block"},
            r"verification='block' is not enabled; add it to "
            r"speculative_config\.mtp\.verification \(enabled: coupled\)",
        ),
        (
            {"verification": ["rejection", "coupled"]},
            {"verification": "block"},
            r"\(enabled: rejection, coupled\)",
        ),
        ({}, {"draft_sampling": "plain"}, "'plain' cannot be verified by 'coupled'"),
        (
            {"verification": "rejection"},
            {"draft_sampling": "coupled"},
            "'coupled' cannot be verified by 'rejection', expected one of plain, greedy",
        ),
        (
            {"verification": "rejection", "draft_sampling": "greedy"},
            {"draft_sampling": "plain"},
            r"speculative_config\.mtp\.draft_sampling is greedy for all requests",
        ),
    ],
)
def test_what_the_config_does_not_list_is_refused(harness, mtp, requested, message):
    llm = harness.llm(mtp=mtp)
    greedy = SamplingParams(max_new_tokens=3, **requested)
    for number, params in enumerate((params_of(1, **requested), greedy)):
        with pytest.raises(RequestError, match=f"request {number}: not supported: .*{message}"):
            llm.generate([[1, 2]], params)
    assert_drained(llm)


def test_a_greedy_request_may_name_what_the_config_lists(harness):
    """And gets the target's own choices by any of it, in steps that change no logits."""
    llm = harness.llm(mtp=ALL)
    prompts = [[1, 2]] * 4
    named = [{}, {"verification": "coupled"}, {"verification": "block"}]
    named.append({"verification": "rejection", "draft_sampling": "greedy"})
    params = [SamplingParams(max_new_tokens=8, ignore_eos=True, **requested) for requested in named]
    requests = llm.make_requests(prompts, params)
    assert not any(request.sampling_kind for request in requests)
    texts = [output.token_ids for output in llm.generate(prompts, params)]
    assert texts == texts[:1] * 4
    assert_drained(llm)


def test_without_speculation_nothing_is_verified(harness):
    with pytest.raises(
        RequestError, match=r"verification='rejection' is not enabled; .* \(enabled: coupled\)"
    ):
        harness.llm(k=0).generate([[1, 2]], params_of(1, verification="rejection"))


def test_memory_of_draft_probabilities(harness):
    for mtp, reported in ((ALL, True), ({}, False), ({**ALL, "draft_sampling": "greedy"}, False)):
        pieces = harness.llm(mtp=mtp, k=2).pieces
        pool = pieces.manager.draft_probs
        assert ("draft probabilities 0." in pieces.memory_report()) == reported
        assert (pool is not None) == reported
        if pool is not None:
            assert pool.shape == (pieces.manager.num_rows, 2, VOCAB)
            assert pool.dtype == torch.float32
