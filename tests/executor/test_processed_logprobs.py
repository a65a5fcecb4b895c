"""Processed log-probabilities are of what tokens were chosen from, however they were decoded."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from mtp_plugin.errors import ConfigError
from mtp_plugin.executor import SamplingParams
from mtp_plugin.infer import Thinking, decode
from tests.executor.conftest import assert_drained
from tests.executor.test_random_requests import BEGIN, END, language, requests, same_logprobs

NUM_REQUESTS, NUM_THINKING = 30, 8
ROUNDING = 5e-6
"""Of a logit, on any device; a low temperature magnifies it."""
PROCESSED = {"logprobs_mode": "processed"}
TAGS = {"begin_thinking_phase_token": BEGIN, "end_thinking_phase_token": END}


def asked_of() -> list[tuple[list[int], SamplingParams]]:
    """Requests of any options but strings and modes, each with a seed of its own; most are told
    something."""
    dice = random.Random(5)
    thinks = [one for one in requests("random") if one[1].thinking_token_budget is not None]
    some = dice.sample([one for one in thinks if BEGIN in one[0]], NUM_THINKING)
    some += dice.sample(requests("random"), NUM_REQUESTS - NUM_THINKING)
    told = [
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
    return [(prompt, params) for prompt, params in told if params.prompt_logprobs is None]


@pytest.fixture(scope="module")
def plain_of():
    made: dict[str, list] = {}

    def of(bed) -> list:
        if bed.path not in made:
            made[bed.path] = [
                decode(
                    bed.oracle_model.target,
                    prompt,
                    params,
                    end_ids=(language("random").eos,),
                    thinking=Thinking(BEGIN, (END,), END),
                    logprobs_mode="processed",
                )
                for prompt, params in asked_of()
            ]
        return made[bed.path]

    return of


def run(llm) -> list:
    prompts, params = zip(*asked_of(), strict=True)
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
def test_they_are_those_of_plain_decoding(bed, plain_of, k, vanilla, no_overlap, options):
    mtp = {"check_metadata": True, **PROCESSED}
    llm = bed.llm(
        k=k,
        vanilla=vanilla,
        disable_overlap_scheduler=no_overlap,
        kv_fill=float("nan"),
        speculative={**TAGS, "mtp": mtp},
        **options,
    )
    outputs = run(llm)
    assert bool(llm.executor.num_preemptions) == bool(options)
    for (_, asked), output, told in zip(asked_of(), outputs, plain_of(bed), strict=True):
        assert output.token_ids == told.token_ids
        away = 1e-4 + ROUNDING / (asked.temperature or 1)
        same_logprobs(told.token_ids, output.logprobs, told.logprobs, away=away)


def test_raw_ones_are_others(bed, plain_of):
    """Of the same texts: else this would be told by nobody."""
    outputs = run(bed.llm(speculative=TAGS))
    differ = 0
    for output, told in zip(outputs, plain_of(bed), strict=True):
        assert output.token_ids == told.token_ids
        if told.logprobs is not None:
            pairs = zip(output.logprobs, output.token_ids, told.logprobs, strict=True)
            differ += any(abs(one[t].logprob - other.logprob) > 1e-3 for one, t, other in pairs)
    assert differ > NUM_REQUESTS // 4


@pytest.mark.parametrize("way", ["rejection", "block"])
def test_they_are_told_beside_judging_by_odds(bed, prompts, way):
    """Every token that is emitted is one that could be drawn there."""
    llm = bed.llm(mtp={"verification": way, **PROCESSED})
    asked = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0.7, top_k=4, logprobs=4)
    for output in llm.generate(prompts, [asked] * len(prompts)):
        for told, token in zip(output.logprobs, output.token_ids, strict=True):
            assert told[token].rank <= 4
            first = [one for one in told.values() if one.rank <= 4]
            assert sum(math.exp(one.logprob) for one in first) == pytest.approx(1, abs=1e-4)


def test_greedy_requests_alone_are_told_of_what_they_choose_from(bed, prompts):
    """At temperature 1 without cuts: shares of everything, whoever else is in the batch."""
    llm = bed.llm(mtp=PROCESSED)
    asked = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=3)
    alone = llm.generate(prompts[:2], [asked] * 2)
    edited = SamplingParams(max_new_tokens=6, ignore_eos=True, frequency_penalty=0.5)
    beside = llm.generate([*prompts[:2], prompts[2]], [asked, asked, edited])
    for one, other in zip(alone, beside, strict=False):
        assert one.token_ids == other.token_ids
        for told, same in zip(one.logprobs, other.logprobs, strict=True):
            assert {t: each.logprob for t, each in told.items()} == pytest.approx(
                {t: each.logprob for t, each in same.items()}, abs=5e-5
            )


def test_a_mode_that_there_is_not(bed):
    with pytest.raises(ConfigError, match=r"logprobs_mode.*raw.*processed.*'cooked'"):
        bed.llm(mtp={"logprobs_mode": "cooked"})
