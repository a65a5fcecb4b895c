"""The comparison with the reference: ties, log-probabilities, where outputs end, which drafts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.config import LLMConfig, MTPDecodingConfig
from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.hosts.embedded.models import LoadedModel, load_model, read_config, read_tokenizer
from mtp_plugin.infer import SamplingRule
from mtp_plugin.requests.logprobs import Logprob
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats
from mtp_plugin.tools import check
from mtp_plugin.tools.check import Drafting, PromptResult, Reference, is_near_draw, wrong_logprobs
from tests.checkpoints import write_echo_checkpoint
from tests.cli.calls import EAGLE, RELAXED, VOCAB, byte_tokenizer
from tests.greedy import greedy_decode

TINY = Path(__file__).parents[2] / "integration" / "tiny_model" / "checkpoint"
PROMPT = [5, 6, 7]
PLAIN = LLMConfig(model="nowhere")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("echo")
    write_echo_checkpoint(path, vocab_size=VOCAB, eos_token_id=256)
    byte_tokenizer().save_pretrained(path)
    return path


def result_of(tokens: list[int], **others: Any) -> PromptResult:
    return PromptResult(PROMPT, tokens, "", FinishReason.LENGTH, AcceptanceStats(3), **others)


# --- ties ---


@pytest.mark.parametrize(
    ("value", "dtype", "distance"),
    [
        (1.99, torch.bfloat16, 2**-7),
        (-12.5, torch.bfloat16, 2**-4),
        (12.5, torch.float16, 2**-7),
        (0.75, torch.float32, 2**-24),
        (math.inf, torch.bfloat16, 0.0),
    ],
)
def test_an_ulp_is_the_distance_of_neighbours(
    value: float, dtype: torch.dtype, distance: float
) -> None:
    assert check.ulp(value, dtype) == distance


class Twin:
    """A text, and a word with the row of its fifth token in the head: either may be chosen."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype, length: int = 10) -> None:
        self.model = load_model(checkpoint, dtype=dtype)
        self.truth = greedy_decode(self.model.target, PROMPT, length)
        self.word = next(word for word in reversed(range(VOCAB)) if word not in self.truth)
        head: Any = self.model.lm_head
        with torch.no_grad():
            head.weight[self.word] = head.weight[self.truth[4]]
        self.text = [*self.truth[:4], self.word]
        self.text += greedy_decode(self.model.target, PROMPT + self.text, length - 5)

    def compare(self, tokens: list[int], **options: Any) -> Any:
        params = SamplingParams(max_new_tokens=len(self.truth), ignore_eos=True)
        return Reference(self.model, params, 512, PLAIN, **options).compare([result_of(tokens)])


@pytest.mark.parametrize(
    ("dtype", "ulps", "is_tie"),
    [(torch.bfloat16, 4.0, True), (torch.bfloat16, 0.0, False), (torch.float32, 4.0, False)],
)
def test_a_tie_is_excused_in_half_precision_and_the_rest_is_compared(
    checkpoint: Path, dtype: torch.dtype, ulps: float, is_tie: bool
) -> None:
    twin = Twin(checkpoint, dtype)
    num_equal, found = twin.compare(twin.text, tie_ulps=ulps)
    first = found[0]
    assert (first.position, first.token, first.expected) == (5, twin.word, twin.truth[4])
    assert (first.gap, first.is_tie, num_equal) == (0.0, is_tie, 10 if is_tie else 4)
    if is_tie:
        wrong = [*twin.text[:7], (twin.text[7] + 1) % VOCAB, *twin.text[8:]]
        num_equal, found = twin.compare(wrong)
        assert ([each.is_tie for each in found], num_equal) == ([True, False], 7)
        assert found[1].position == 8
        assert found[1].gap > found[1].tie_tolerance > 0  # type: ignore[operator]


def test_attention_is_restored_and_rows_are_those_of_decoding(checkpoint: Path) -> None:
    model = load_model(checkpoint)
    model.set_attn_implementation("eager")
    ids = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = Reference(model, SamplingParams(), 512, PLAIN)._logits(ids, 4)
    assert model.target.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    whole = model.target(input_ids=torch.tensor([ids])).logits[0, -4:].float()
    assert torch.equal(rows, whole)


# --- sampled tokens ---

SMALL = 12
OPTIONS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.3, 1.0, 2.0]), "seed": st.integers(0, 2**32)},
    optional={
        "top_k": st.integers(2, SMALL),
        "top_p": st.floats(0.05, 0.99),
        "min_p": st.floats(0.01, 0.9),
        "bad_token_ids": st.lists(st.integers(0, SMALL - 1), max_size=2),
        "logit_bias": st.dictionaries(st.integers(0, SMALL - 1), st.floats(-2, 2), max_size=2),
    },
)


def rule_of(**options: Any) -> SamplingRule:
    return SamplingRule(SamplingParams(**{"temperature": 1.0, **options}), [1])


@settings(max_examples=200, deadline=None)
@given(OPTIONS, st.integers(0, 2**32), st.sampled_from([1e-3, 0.05, 0.4, 2.0]))
def test_what_a_row_that_is_a_little_off_samples_is_near(
    options: dict[str, Any], rng: int, gap: float
) -> None:
    """Two scores come a gap closer when each is off by half of it."""
    rule, torch_rng = rule_of(**options), torch.Generator().manual_seed(rng)
    row = torch.randn(SMALL, generator=torch_rng)
    off = (torch.rand(SMALL, generator=torch_rng) - 0.5) * gap * options["temperature"]
    assert is_near_draw(rule, row, [], rule.choose(row, []), 1e-5)
    assert is_near_draw(rule, row, [], rule.choose(row + off, []), gap + 1e-5)


@pytest.mark.parametrize(
    ("options", "row", "distance"),
    [
        ({"top_k": 2}, [0.0, -1.25, -1.5], 0.25),  # to the second score
        ({"min_p": math.exp(-1.0)}, [0.0, -1.25, -1.5], 0.5),  # to the weight that is needed
        ({"top_p": 0.7}, [0.0, -1.25, -1.5], 0.25),  # the second rank is kept
        ({}, [0.0, -1.25, -1.5], 0.0),
    ],
)
def test_outside_a_cut_a_token_is_as_near_as_the_cut(
    options: dict[str, Any], row: list[float], distance: float
) -> None:
    """Of three scores the last, which noise makes the highest."""
    scores = torch.tensor(row)
    rules = (rule_of(**options, seed=seed) for seed in range(1000))
    rule = next(rule for rule in rules if int((scores + rule.noise([], 3)).argmax()) == 2)
    assert is_near_draw(rule, scores, [], 2, distance + 1e-3)
    assert not distance or not is_near_draw(rule, scores, [], 2, distance - 1e-3)


def test_without_cuts_the_lead_decides_and_what_is_banned_is_never_near() -> None:
    rule, row = rule_of(temperature=0.5, bad_token_ids=[3]), torch.randn(SMALL)
    noisy = rule.scaled(row, []) + rule.noise([], SMALL)
    for token in range(SMALL):
        lead = float(noisy.max() - noisy[token])
        assert is_near_draw(rule, row, [], token, min(lead, 50) + 1e-4) is (token != 3)
        assert not lead or not is_near_draw(rule, row, [], token, min(lead, 50) - 1e-4)


# --- log-probabilities ---

VALUES = torch.tensor([-2.0, -0.5, -3.0, -2.0, -1.5, -torch.inf])
"""Ranks 3, 1, 5, 4, 2 and 6."""
RIGHT = {3: Logprob(-2.0, 4), 1: Logprob(-0.5, 1), 4: Logprob(-1.5, 2)}


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({}, []),
        ({3: Logprob(-2.0, 3)}, []),  # the other rank of equals
        ({3: Logprob(-2.0 + 2**-8, 4)}, []),
        ({3: Logprob(-2.02, 4)}, [3]),
        ({4: Logprob(-1.48, 2)}, [4]),
        ({3: Logprob(-2.0, 2)}, [3]),
        ({3: Logprob(-2.0, 5)}, [3]),
        ({3: Logprob(float("nan"), 4)}, [3]),
        ({5: Logprob(-9.0, 6)}, [5]),
        ({4: None}, [4]),
        ({3: None}, [3]),
        ({1: None, 3: None, 4: None}, [3, 1, 4]),
    ],
)
def test_log_probabilities_and_ranks_are_those_of_the_target(
    changed: dict[int, Logprob | None], wrong: list[int]
) -> None:
    entry = {token: one for token, one in {**RIGHT, **changed}.items() if one is not None}
    assert [*wrong_logprobs(entry, VALUES, 3, 2, 0.01)] == wrong


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_log_probabilities_of_prompt_and_output(checkpoint: Path, mode: str) -> None:
    config = LLMConfig.model_validate(
        {"model": str(checkpoint), "speculative_config": {**EAGLE, "mtp": {"logprobs_mode": mode}}}
    )
    params = SamplingParams(
        max_new_tokens=5, logprobs=2, prompt_logprobs=1, temperature=0.7, logit_bias={5: 2.0}
    )
    with LLM(config) as llm:
        (request,) = llm.make_requests([PROMPT], [params])
        run = check.run_requests(llm, [request])
        reference = Reference(llm.model, run.params, 64, config, llm.tokenizer)
    (result,) = run.results
    assert reference.compare_logprobs([result]) == (
        sum(map(len, [*result.logprobs, *result.prompt_logprobs[1:]])),  # type: ignore[index,misc]
        [],
    )
    lost = dataclasses.replace(result, logprobs=result.logprobs[:2])  # type: ignore[index]
    places = [(each.kind, each.position) for each in reference.compare_logprobs([lost])[1]]
    assert places[0] == ("log-probability", 3)
    swapped = [*result.prompt_logprobs[:1], *result.prompt_logprobs[2:]]  # type: ignore[index]
    lost = dataclasses.replace(result, prompt_logprobs=swapped)
    assert reference.compare_logprobs([lost])[1][0][:3] == ("prompt log-probability", 1, 2)
    other = {"mtp": {"logprobs_mode": "raw" if mode == "processed" else "processed"}}
    config = config.model_validate(
        {"model": str(checkpoint), "speculative_config": {**EAGLE, **other}}
    )
    assert dataclasses.replace(reference, config=config).compare_logprobs([result])[1]


# --- where outputs end ---


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[LLM]:
    with LLM({"model": str(checkpoint), "speculative_config": EAGLE, "max_seq_len": 64}) as llm:
        yield llm


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, FinishReason.LENGTH),
        ({"stop_token_ids": 5}, FinishReason.END_ID),
        ({"stop_token_ids": 5, "min_tokens": 8}, FinishReason.LENGTH),
        ({"stop": 5}, FinishReason.STOP_WORDS),
    ],
)
def test_one_token_more_less_or_other_is_found(
    engine: LLM, options: dict[str, int], reason: FinishReason
) -> None:
    def run(params: SamplingParams) -> PromptResult:
        return check.run_requests(engine, engine.make_requests([PROMPT], [params])).results[0]

    fifth = run(SamplingParams(max_new_tokens=12, ignore_eos=True)).token_ids[5]
    values: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, **options}
    if "stop_token_ids" in options:
        values["stop_token_ids"] = (fifth,)
    if "stop" in options:
        values["stop"] = (byte_tokenizer().decode([fifth]),)
    params = SamplingParams(**values)
    result = run(params)
    assert result.finish_reason is reason
    tokens = result.token_ids

    def differences(token_ids: list[int]) -> list[int]:
        reference = Reference(engine.model, params, 64, PLAIN, engine.tokenizer)
        changed = dataclasses.replace(result, token_ids=token_ids, number=0)
        return [each.position for each in reference.compare([changed])[1]]

    assert differences(tokens) == []
    assert differences(tokens[:-1]) == [len(tokens)]
    assert differences([*tokens, 3]) == [len(tokens) + 1]
    assert differences([*tokens[:2], tokens[2] ^ 1, *tokens[3:]]) == [3]


# --- drafts, prompts and configs ---


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LoadedModel:
    return load_model(checkpoint)


@pytest.mark.parametrize(
    ("speculative", "params", "reason"),
    [
        ({}, {}, None),
        (RELAXED, {"relaxed_acceptance": False}, None),
        (RELAXED, {"relaxed_topk": 1}, None),
        (RELAXED, {}, "relaxed acceptance is not known without the executor"),
        ({"draft_len_schedule": {1: 2, 4: 1}}, {}, "more than the text"),
        ({"max_concurrency": 2}, {}, "more than the text"),
        ({"acceptance_window": 8, "acceptance_length_threshold": 1.2}, {}, "more than the text"),
        ({"mtp": {"adaptive_draft_len": True}}, {}, "more than the text"),
        ({"use_mtp_vanilla": True, "mtp": {"draft_window": "trtllm"}}, {}, "more than the text"),
        ({"use_mtp_vanilla": True, "mtp": {"chain": "target_shift"}}, {}, "more than the text"),
        ({"mtp": {"verification": "block"}}, {"temperature": 1.0}, "block verification is not"),
    ],
)
def test_drafts_that_depend_on_more_than_the_text_are_not_made_again(
    model: LoadedModel, speculative: dict[str, Any], params: dict[str, Any], reason: str | None
) -> None:
    values = {"max_draft_len": 2, "begin_thinking_phase_token": 3, "end_thinking_phase_token": 4}
    drafting = MTPDecodingConfig.model_validate({**values, **speculative})
    config = LLMConfig(model="nowhere", speculative_config=drafting)
    found = Reference(model, SamplingParams(**params), 512, config).drafting()
    assert isinstance(found, Drafting) if reason is None else reason in str(found)


def test_prompts_and_pieces_of_them() -> None:
    tokenizer, texts = read_tokenizer(read_config(TINY)), ["class A:", "def f(x):"]
    whole = check.make_prompts(texts, tokenizer, 2048, None, seed=0)
    assert [tokenizer.decode(ids) for ids in whole] == texts
    prompts = check.make_prompts(texts, tokenizer, 2048, 10, seed=0)
    assert (len(prompts), prompts[:2]) == (10, whole)
    assert all(prompts)
    assert len(check.make_prompts((), None, 9, None, seed=0)) == check.RANDOM_PROMPTS


def test_a_config_in_another_shape() -> None:
    graphs = {"batch_sizes": [1, 8], "enable_padding": True}
    config = LLMConfig.model_validate(
        {"model": "nowhere", "max_num_tokens": 64, "cuda_graph_config": graphs}
    )
    changed = check.reshaped(config, k=3, batch=32, dtype="bfloat16")
    assert isinstance(changed.speculative_config, MTPDecodingConfig)
    assert (changed.speculative_config.max_draft_len, changed.max_batch_size) == (3, 32)
    assert (changed.max_num_tokens, changed.dtype) == (128, "bfloat16")
    assert changed.cuda_graph_config is not None
    assert check.reshaped(changed, k=0).speculative_config is None
    assert check.reshaped(config) == config
