"""Processed log-probabilities are of what tokens were chosen from, however they were decoded."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.embedded import SamplingParams
from mtp_plugin.infer import Thinking, decode
from tests.hosts.embedded.conftest import assert_drained
from tests.hosts.embedded.test_random_requests import BEGIN, END, language, requests, same_logprobs

NUM_REQUESTS, NUM_THINKING = 30, 8
ROUNDING = 5e-6
"""Of a logit, on any device; a low temperature magnifies it."""
PROCESSED = {"logprobs_mode": "processed"}
TAGS = {"begin_thinking_phase_token": BEGIN, "end_thinking_phase_token": END}


def requests_of() -> list[tuple[list[int], SamplingParams]]:
    """Requests of any options but strings and modes, each with a seed of its own; most report
    something."""
    rng = random.Random(5)
    thinks = [one for one in requests("random") if one[1].thinking_token_budget is not None]
    some = rng.sample([one for one in thinks if BEGIN in one[0]], NUM_THINKING)
    some += rng.sample(requests("random"), NUM_REQUESTS - NUM_THINKING)
    made = [
        (
            prompt,
            replace(
                params,
                seed=place,
                logprobs=(0, 3, 20, None)[place % 4],
                stop=(),
                verification=None,
                draft_sampling=None,
            ),
        )
        for place, (prompt, params) in enumerate(some)
    ]
    return [(prompt, params) for prompt, params in made if params.prompt_logprobs is None]


@pytest.fixture(scope="module")
def plain_of():
    made: dict[str, list] = {}

    def of(harness) -> list:
        if harness.path not in made:
            made[harness.path] = [
                decode(
                    harness.oracle_model.target,
                    prompt,
                    params,
                    end_ids=(language("random").eos,),
                    thinking=Thinking(BEGIN, (END,), END),
                    logprobs_mode="processed",
                )
                for prompt, params in requests_of()
            ]
        return made[harness.path]

    return of


def run(llm) -> list:
    prompts, params = zip(*requests_of(), strict=True)
    outputs = llm.generate(list(prompts), list(params))
    assert_drained(llm)
    return outputs


@pytest.mark.parametrize(
    ("k", "vanilla", "no_overlap", "options"),
    [
        (3, False, False, {}),
        (2, True, True, {}),
        (1, False, False, {"kv_cache_config": {"max_tokens": 128}, "max_num_tokens": 40}),
    ],
    ids=["eagle", "vanilla", "tight"],
)
def test_they_are_those_of_plain_decoding(harness, plain_of, k, vanilla, no_overlap, options):
    mtp = {"check_metadata": True, **PROCESSED}
    llm = harness.llm(
        k=k,
        vanilla=vanilla,
        disable_overlap_scheduler=no_overlap,
        kv_fill=float("nan"),
        speculative={**TAGS, "mtp": mtp},
        **options,
    )
    outputs = run(llm)
    assert bool(llm.executor.num_preemptions) == bool(options)
    for (_, requested), output, reference in zip(
        requests_of(), outputs, plain_of(harness), strict=True
    ):
        assert output.token_ids == reference.token_ids
        away = 1e-4 + ROUNDING / (requested.temperature or 1)
        same_logprobs(reference.token_ids, output.logprobs, reference.logprobs, away=away)


def test_raw_ones_are_others(harness, plain_of):
    """Of the same outputs: else no test would notice."""
    outputs = run(harness.llm(speculative=TAGS))
    differ = 0
    for output, reference in zip(outputs, plain_of(harness), strict=True):
        assert output.token_ids == reference.token_ids
        if reference.logprobs is not None:
            pairs = zip(output.logprobs, output.token_ids, reference.logprobs, strict=True)
            differ += any(abs(one[t].logprob - other.logprob) > 1e-3 for one, t, other in pairs)
    assert differ > NUM_REQUESTS // 4


@pytest.mark.parametrize("way", ["rejection", "block"])
def test_reported_with_rejection_sampling(harness, prompts, way):
    """Every token that is emitted is one that could be sampled there."""
    llm = harness.llm(mtp={"verification": way, **PROCESSED})
    requested = SamplingParams(
        max_new_tokens=12, ignore_eos=True, temperature=0.7, top_k=4, logprobs=4
    )
    for output in llm.generate(prompts, [requested] * len(prompts)):
        for reported, token in zip(output.logprobs, output.token_ids, strict=True):
            assert reported[token].rank <= 4
            first = [one for one in reported.values() if one.rank <= 4]
            assert sum(math.exp(one.logprob) for one in first) == pytest.approx(1, abs=1e-4)


def test_greedy_requests_report_the_untruncated_distribution(harness, prompts):
    """At temperature 1 without cuts: shares of everything, whatever else is in the batch."""
    llm = harness.llm(mtp=PROCESSED)
    requested = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=3)
    alone = llm.generate(prompts[:2], [requested] * 2)
    edited = SamplingParams(max_new_tokens=6, ignore_eos=True, frequency_penalty=0.5)
    batched = llm.generate([*prompts[:2], prompts[2]], [requested, requested, edited])
    for one, other in zip(alone, batched, strict=False):
        assert one.token_ids == other.token_ids
        for reported, same in zip(one.logprobs, other.logprobs, strict=True):
            assert {t: each.logprob for t, each in reported.items()} == pytest.approx(
                {t: each.logprob for t, each in same.items()}, abs=5e-5
            )


def test_a_mode_that_there_is_not(harness):
    with pytest.raises(ConfigError, match=r"logprobs_mode.*raw.*processed.*'cooked'"):
        harness.llm(mtp={"logprobs_mode": "cooked"})
