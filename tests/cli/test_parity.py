"""``mtp-plugin parity``, from arguments to exit code."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from mtp_plugin.config import LLMConfig, MTPDecodingConfig
from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.embedded import SamplingParams
from mtp_plugin.hosts.embedded.models import load_model, read_config, read_tokenizer
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats
from mtp_plugin.tools import comparison
from mtp_plugin.tools.comparison import (
    CHUNK_LEN,
    PlainDecoding,
    compare_grid,
    expect_same_text,
    make_prompts,
)
from mtp_plugin.tools.parity import Drafting, Oracle
from mtp_plugin.tools.terminal import report
from mtp_plugin.tools.terminal.decoding import PromptResult
from mtp_plugin.tools.terminal.prompts import prompts_for_comparison
from tests.checkpoints import write_echo_checkpoint
from tests.cli.calls import Run
from tests.greedy import greedy_decode

VOCAB = 96
TINY = Path(__file__).parents[2] / "integration" / "tiny_model" / "checkpoint"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three MTP layers, drafts that are often right, no tokenizer."""
    path = tmp_path_factory.mktemp("echo")
    write_echo_checkpoint(path, vocab_size=VOCAB)
    return str(path)


@pytest.fixture
def run(run: Run) -> Run:
    """Calls ``mtp-plugin parity``."""
    return functools.partial(run, "parity")


@pytest.fixture
def config(checkpoint: str, tmp_path: Path) -> Callable[..., str]:
    """Writes a config file with options of MTP."""

    def write(**speculative: Any) -> str:
        file = tmp_path / "config.yaml"
        content = {"decoding_type": "MTP", **speculative} if speculative else None
        file.write_text(yaml.safe_dump({"model": checkpoint, "speculative_config": content}))
        return str(file)

    return write


@pytest.fixture
def tampered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """An executor that emits another token at a place of one prompt's output."""

    def tamper(prompt: int, position: int, change: Callable[[list[int]], list[int]]) -> None:
        honest = comparison.run_batch

        def run_batch(*arguments: Any) -> Any:
            ran = honest(*arguments)
            wrong = ran.results[prompt]
            tokens = change(wrong.token_ids[: position + 1]) + wrong.token_ids[position + 1 :]
            ran.results[prompt] = dataclasses.replace(wrong, token_ids=tokens)
            return ran

        monkeypatch.setattr(comparison, "run_batch", run_batch)

    return tamper


def other(tokens: list[int]) -> list[int]:
    return [*tokens[:-1], (tokens[-1] + 1) % VOCAB]


def test_every_combination_is_compared(run: Run, checkpoint: str) -> None:
    result = run(
        *("-m", checkpoint, "--worker", "eagle,vanilla", "--k", "1,3", "--batch-size", "1,3"),
        *("--num-prompts", "4", "-n", "8", "--json", "--ignore-eos"),
    )
    assert result.code == 0
    expected = json.loads(result.out)
    assert [*expected][:2] == ["kind", "versions"]
    assert [*expected][-2:] == ["identical", "results"]
    assert (expected["kind"], expected["identical"]) == ("parity", True)
    assert (expected["dtype"], expected["device"]) == ("float32", "cpu")
    found = [(v["worker"], v["max_draft_len"], v["batch_size"]) for v in expected["results"]]
    assert found == [(w, k, b) for w in ("eagle", "vanilla") for k in (1, 3) for b in (1, 3)]
    for variant in expected["results"]:
        assert variant["num_prompts"] == 4
        assert variant["num_tokens"] == variant["num_equal"] == 32
        assert variant["ties"] == variant["differences"] == []
        assert 1 < variant["acceptance_length"] <= variant["max_draft_len"] + 1
        assert variant["acceptance_length"] == variant["without_executor"]["acceptance_length"]


def test_table_drafts_without_the_executor_and_verdict(run: Run, checkpoint: str) -> None:
    result = run("-m", checkpoint, "--k", "2", "--num-prompts", "3", "-n", "6", "--ignore-eos")
    assert result.code == 0
    lines = result.out.splitlines()
    row = next(line.split() for line in lines if "eagle" in line)
    assert row[:8] == ["eagle", "2", "8", "3", "18", "18", "0", "0"]
    plain = next(line for line in lines if "without the executor" in line)
    assert plain == (
        "eagle K=2, prompts 1-3 without the executor: the text of target-only decoding, accepted "
        f"{row[8]} (by the executor {row[8]})"
    )
    last = "identical to decoding without MTP: yes (18 tokens; ties: 0; differences: 0)"
    assert lines[-1] == last
    assert "log-prob" not in result.out


@pytest.mark.thinned(cases=2)
@pytest.mark.parametrize(
    ("mtp", "sampling"),
    [
        ({"seed": 1}, ("--temperature", "0.9", "--top-k", "50", "--repetition-penalty", "1.2")),
        ({"draft_sampling": "greedy"}, ("--temperature", "0.3", "--repetition-penalty", "1.3")),
        ({"seed": 1}, ("--temperature", "0.3", "--option", "draft_sampling=greedy")),
        ({"draft_vocab": 60}, ()),
    ],
    ids=["sampled", "greedy drafts", "greedy drafts requested", "draft vocabulary"],
)
def test_as_many_drafts_are_without_the_executor(
    run: Run, config: Callable[..., str], mtp: dict[str, Any], sampling: tuple[str, ...]
) -> None:
    """By another way to the same text: no step accepts more or fewer."""
    result = run(
        *("-c", config(mtp=mtp), "--worker", "eagle,vanilla", "--k", "1,3", "--batch-size", "5"),
        *("--num-prompts", "5", "-n", "10", "--json", "--ignore-eos", *sampling),
    )
    assert result.code == 0
    variants = json.loads(result.out)["results"]
    for variant in variants:
        found = variant["without_executor"]
        assert (found["num_prompts"], found["num_equal_texts"]) == (4, 4)
        assert (found["differences"], found["num_ties"]) == ([], 0)
        assert found["acceptance_length"] == found["acceptance_length_of_executor"]
    lengths = {variant["without_executor"]["acceptance_length"] for variant in variants}
    assert len(lengths) > 1


@pytest.mark.parametrize("is_tie", [False, True])
def test_another_text_without_the_executor_is_a_difference(
    run: Run, checkpoint: str, monkeypatch: pytest.MonkeyPatch, is_tie: bool
) -> None:
    """Decoding without the executor ends the first text with another token."""
    honest = PlainDecoding.with_drafts

    def wrong(*arguments: Any, **options: Any) -> list[PromptResult]:
        first, *others = honest(*arguments, **options)
        return [dataclasses.replace(first, token_ids=other(first.token_ids)), *others]

    monkeypatch.setattr(PlainDecoding, "with_drafts", wrong)
    arguments = ("-m", checkpoint, "--num-prompts", "2", "-n", "4", "--ignore-eos")
    if is_tie:
        arguments = (*arguments, "--dtype", "bfloat16", "--tie-tolerance", "1e6")
    result = run(*arguments)
    expected = json.loads(run(*arguments, "--json").out)
    assert expected["identical"] is is_tie
    found = expected["results"][0]["without_executor"]
    assert (found["num_ties"] >= 1, len(found["differences"])) == (is_tie, int(not is_tie))
    last = result.out.splitlines()[-1]
    if is_tie:
        assert result.code == 0
        assert re.search("the text of target-only decoding, [1-9] rounding ties, acc", result.out)
        assert last.startswith("identical to decoding without MTP: yes (")
        return
    assert result.code == 1
    other_text = "another text of 1 than target-only decoding, accepted "
    assert f"prompts 1-2 without the executor: {other_text}" in result.out
    assert "difference without the executor: eagle K=3 batch 8, prompt 1, token 4: " in result.out
    assert last == "identical to decoding without MTP: NO (8 tokens; ties: 0; differences: 1)"
    assert found["num_equal_texts"] == 1


def mtp_config(**speculative: Any) -> LLMConfig:
    values = {"max_draft_len": 1, **speculative}
    return LLMConfig(model="nowhere", speculative_config=MTPDecodingConfig.model_validate(values))


RELAXED = {
    "use_relaxed_acceptance_for_thinking": True,
    "relaxed_topk": 2,
    "begin_thinking_phase_token": 3,
    "end_thinking_phase_token": 4,
}


def test_drafts_that_depend_on_more_than_the_text_are_not_made_again(checkpoint: str) -> None:
    model, params = load_model(checkpoint), SamplingParams()
    assert isinstance(Drafting.of(mtp_config(), model, params), Drafting)
    for speculative in (
        {"max_draft_len": 2, "draft_len_schedule": {1: 2, 4: 1}},
        {"max_concurrency": 2},
        {"acceptance_window": 8, "acceptance_length_threshold": 1.2, "max_draft_len": 2},
        {"mtp": {"adaptive_draft_len": True}},
        {"use_mtp_vanilla": True, "mtp": {"draft_window": "trtllm"}},
        {"use_mtp_vanilla": True, "mtp": {"chain": "target_shift"}},
    ):
        reason = Drafting.of(mtp_config(**speculative), model, params)
        assert str(reason).endswith(" depends on more than the text"), speculative
    config = mtp_config(mtp={"verification": "block"})
    reason = Drafting.of(config, model, SamplingParams(temperature=1.0))
    assert reason == "block verification is not known without the executor"


SAMPLING = (
    *("--temperature", "0.9", "--top-k", "50", "--top-p", "0.95", "--min-p", "0.02"),
    *("--repetition-penalty", "1.2", "--presence-penalty", "0.3", "--frequency-penalty", "0.2"),
)
OTHERS = {
    "logit_bias": dict.fromkeys(range(0, VOCAB, 7), 4.0),
    "allowed_token_ids": [*range(0, VOCAB, 2), *range(0, VOCAB, 7)],
    "bad_words": [[7], [14, 0], [0, 0]],
    "bad_token_ids": [28, 42],
    "prompt_ignore_length": 2,
    "stop_token_ids": [21],
    "min_tokens": 9,
    "max_draft_len": 1,
    "logprobs": 2,
}


@pytest.mark.parametrize("sampling", [(), (*SAMPLING, "--seed", "11")], ids=["greedy", "sampled"])
def test_every_option_is_compared(run: Run, checkpoint: str, sampling: tuple[str, ...]) -> None:
    others = [text for name, value in OTHERS.items() for text in ("--option", f"{name}={value}")]
    requested = ("-m", checkpoint, "--worker", "eagle,vanilla", "--k", "2", "--num-prompts", "4")
    sampling = sampling or ("--frequency-penalty", "0.4")
    result = run(*requested, "-n", "10", "--json", *sampling, *others)
    assert result.code == 0
    expected = json.loads(result.out)
    assert expected["sampling_params"].keys() >= OTHERS.keys()
    assert expected["sampling_params"].get("seed") == (11 if "--seed" in sampling else None)
    for variant in expected["results"]:
        assert variant["num_tokens"] == variant["num_equal"] >= 4 * 10
        assert variant["differences"] == []
        assert variant["logprobs"]["num_values"] >= 2 * variant["num_tokens"]
        assert variant["logprobs"]["differences"] == []
        plain = variant["without_executor"]
        assert plain["acceptance_length"] == plain["acceptance_length_of_executor"]


LOGPROBS = ("--option", "logprobs=3", "--option", "prompt_logprobs=1", "-n", "8", "--ignore-eos")


@pytest.mark.parametrize(
    ("mode", "dtype"), [("processed", "float32"), ("raw", "bfloat16"), ("processed", "bfloat16")]
)
def test_log_probabilities_are_compared(
    run: Run, config: Callable[..., str], mode: str, dtype: str
) -> None:
    file = config(max_draft_len=2, mtp={"logprobs_mode": mode})
    requested = ("-c", file, "--num-prompts", "3", "--dtype", dtype, "--temperature", "0.7")
    if (mode, dtype) == ("processed", "bfloat16"):
        # what is after a cut depends on its place, which half precision moves
        result = run(*requested, *LOGPROBS, "--top-k", "5")
        refusal = "parity: logprobs=3 of what top_k leaves: expected float32, got bfloat16"
        assert result.code == 2
        assert refusal in result.err
        return
    cut = ("--top-k", "5") if dtype == "bfloat16" else ("--repetition-penalty", "1.3")
    result = run(*requested, *LOGPROBS, *cut, "--json")
    assert result.code == 0
    (variant,) = json.loads(result.out)["results"]
    found = variant["logprobs"]
    assert found["num_values"] >= 3 * 8 * 3
    assert 0 < found["largest_gap"] < (1e-4 if dtype == "float32" else 1)
    assert found["differences"] == []
    shown = run(*requested, *LOGPROBS, "--option", f"logprobs_mode={mode}").out
    line = r"^eagle K=2 batch 8, \d+ log-probabilities: at most \S+ apart$"
    assert re.search(line, shown, re.MULTILINE)


def test_another_log_probability_is_a_difference(
    run: Run, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_batch(*arguments: Any) -> Any:
        ran = honest(*arguments)
        wrong = ran.results[1]
        token, one = next(iter(wrong.logprobs[4].items()))
        wrong.logprobs[4][token] = one._replace(logprob=one.logprob - 0.001)
        del wrong.prompt_logprobs[2:]
        return ran

    honest = comparison.run_batch
    monkeypatch.setattr(comparison, "run_batch", run_batch)
    monkeypatch.setattr(report, "SHOWN_MISMATCHES", 2)
    requested = ("-m", checkpoint, "--num-prompts", "2", *LOGPROBS)
    result = run(*requested, "--json")
    assert result.code == 1
    expected = json.loads(result.out)
    assert expected["identical"] is False
    (variant,) = expected["results"]
    assert variant["differences"] == []
    *lost, wrong = variant["logprobs"]["differences"]
    assert (wrong["prompt"], wrong["position"], wrong["in_prompt"]) == (2, 5, False)
    assert wrong["expected_logprob"] - wrong["logprob"] == pytest.approx(0.001, abs=1e-4)
    assert wrong["rank"] == wrong["expected_rank"]
    assert wrong["tolerance"] == 1e-4
    assert {(one["in_prompt"], one["logprob"]) for one in lost} == {(True, None)}
    assert min(one["position"] for one in lost) == 3
    result = run(*requested)
    assert result.code == 1
    lines = [line for line in result.out.splitlines() if line.startswith("log-probability: ")]
    assert lines[0].startswith("log-probability: eagle K=3 batch 8, prompt 2, prompt token 3: noth")
    assert f"\nand {len(lost) + 1 - 2} further log-probabilities\n" in result.out
    verdict = "identical to decoding without MTP: NO (16 tokens"
    assert result.out.splitlines()[-1].startswith(verdict)


def test_a_wrong_draw_is_a_difference(
    run: Run, checkpoint: str, tampered: Callable[..., None]
) -> None:
    """The least likely token, whose scores no rounding brings near."""

    def unlikely(tokens: list[int]) -> list[int]:
        model = load_model(checkpoint)
        row = Oracle(model).logits([*prompt, *tokens[:-1]], 1)[0]
        return [*tokens[:-1], int(row.argmin())]

    (prompt,) = make_prompts([], None, VOCAB, 1, 0)
    tampered(0, 5, unlikely)
    arguments = ("-m", checkpoint, "--num-prompts", "1", "-n", "8", *SAMPLING, "--ignore-eos")
    result = run(*arguments, "--dtype", "bfloat16")
    assert result.code == 1
    line = next(line for line in result.out.splitlines() if line.startswith("difference: "))
    assert "prompt 1, token 6: " in line
    assert re.search(r", scores .* apart where .* is a tie", line)


def test_the_engine_s_seed_decides_draws_without_one(run: Run, config: Callable[..., str]) -> None:
    file = config(mtp={"seed": 2**63 + 1})
    result = run("-c", file, "--num-prompts", "1", "--temperature", "1", "--json", "--ignore-eos")
    assert result.code == 0
    (variant,) = json.loads(result.out)["results"]
    assert variant["num_equal"] == variant["num_tokens"] == 64
    assert variant["logprobs"] is None


def test_a_wrong_token_is_reported_with_both_tokens_and_the_gap(
    run: Run, checkpoint: str, tampered: Callable[..., None]
) -> None:
    tampered(1, 4, other)
    arguments = ("-m", checkpoint, "--num-prompts", "3", "-n", "8", "--ignore-eos")
    result = run(*arguments, "--json")
    assert result.code == 1
    expected = json.loads(result.out)
    assert expected["identical"] is False
    (variant,) = expected["results"]
    (found,) = variant["differences"]
    assert (found["prompt"], found["position"]) == (2, 5)
    assert found["token"] == (found["expected"] + 1) % VOCAB
    assert found["tie_tolerance"] == 0.0
    prefix = found["prompt_token_ids"]
    model = load_model(checkpoint)
    truth = greedy_decode(model.target, prefix, 5)
    row = Oracle(model).logits([*prefix, *truth[:4]], 1)[0]
    assert found["expected"] == truth[4]
    assert found["gap"] == float(row[truth[4]]) - float(row[found["token"]]) > 0
    # the four tokens before it count, nothing after it does
    assert variant["num_equal"] == 8 + 4 + 8

    result = run(*arguments)
    assert result.code == 1
    line = next(line for line in result.out.splitlines() if line.startswith("difference: "))
    assert line.startswith(
        f"difference: eagle K=3 batch 8, prompt 2, token 5: {found['token']}, "
        f"target-only decoding has {found['expected']}, logits "
    )
    assert f"after prompt ids {prefix[-8:]}" in line
    last = "identical to decoding without MTP: NO (24 tokens; ties: 0; differences: 1)"
    assert result.out.splitlines()[-1] == last


class Half(NamedTuple):
    note: str
    tolerance: str
    dtype: str
    ties: int
    sampling: tuple[str, ...] = ()


@pytest.mark.parametrize(
    "case",
    [
        Half("a wide tolerance calls it a tie", "1e6", "bfloat16", 1),
        Half("a sampled token", "1e6", "bfloat16", 1, ("--temperature", "1")),
        Half("the usual one does not", "4", "bfloat16", 0),
        Half("float32 has no ties", "1e6", "float32", 0),
    ],
    ids=lambda case: case.note,
)
def test_ties_are_excused_and_reported_and_differences_are_not(
    run: Run, checkpoint: str, tampered: Callable[..., None], case: Half
) -> None:
    """The last token is another one, so that nothing depends on what follows."""
    tampered(0, 7, other)
    arguments = (
        *("-m", checkpoint, "--num-prompts", "2", "-n", "8", "--ignore-eos", *case.sampling),
        *("--dtype", case.dtype, "--tie-tolerance", case.tolerance, "--batch-size", "1"),
    )
    result = run(*arguments, "--json")
    assert result.code == 1 - case.ties
    (variant,) = json.loads(result.out)["results"]
    assert variant["num_ties"] == len(variant["ties"]) == case.ties
    assert variant["num_differences"] == 1 - case.ties
    (found,) = variant["ties"] or variant["differences"]
    assert found["position"] == 8
    assert found["gap"] > 0
    assert variant["num_equal"] == 15
    if case.ties:
        result = run(*arguments)
        assert result.code == 0
        assert "tie: eagle K=3 batch 1, prompt 1, token 8: " in result.out
        assert " is a tie" in result.out
        assert result.out.endswith("yes (16 tokens; ties: 1; differences: 0)\n")


def test_after_a_tie_decoding_goes_on_piece_by_piece(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two words with the same row in the head; 50 tokens are more than three pieces."""
    model = load_model(checkpoint, dtype=torch.bfloat16)
    prompt, params = [5, 6, 7], SamplingParams(max_new_tokens=50, ignore_eos=True)
    truth = greedy_decode(model.target, prompt, 50)
    twin = next(word for word in reversed(range(VOCAB)) if word not in truth)
    head: Any = model.lm_head
    with torch.no_grad():
        head.weight[twin] = head.weight[truth[4]]
    emitted = [*truth[:4], twin]
    emitted += greedy_decode(model.target, prompt + emitted, 45)
    requested: list[int] = []

    def decode(*arguments: Any, max_seq_len: int, emitted: list[int], **options: Any) -> Any:
        requested.append(max_seq_len - len(prompt) - len(emitted))
        return plain(*arguments, max_seq_len=max_seq_len, emitted=emitted, **options)

    plain = comparison.decode
    monkeypatch.setattr(comparison, "decode", decode)
    for tokens in (emitted, [*emitted[:40], (emitted[40] + 1) % VOCAB, *emitted[41:]]):
        requested.clear()
        result = PromptResult(prompt, tokens, "", FinishReason.LENGTH, AcceptanceStats(3))
        (found,) = PlainDecoding(model, params, 512, None).verdicts([result])
        assert found.ties[0].position == 4
        # the first run is whole, those after ties are not
        assert requested[0] == 50
        assert max(requested[1:]) <= CHUNK_LEN
        right = tokens == emitted
        assert found.num_equal == (50 if right else 40)
        assert (found.difference is None) == right


def test_prompts_of_the_folder_and_pieces_of_them() -> None:
    texts = prompts_for_comparison((), None, TINY)
    tokenizer = read_tokenizer(read_config(TINY))
    whole = make_prompts(texts, tokenizer, 2048, None, seed=0)
    assert [tokenizer.decode(ids) for ids in whole] == texts
    prompts = make_prompts(texts, tokenizer, 2048, 10, seed=0)
    assert (len(prompts), prompts[: len(whole)]) == (10, whole)
    assert all(prompts[len(whole) :])


def test_batches_padded_as_graphs_would_be(run: Run, checkpoint: str) -> None:
    arguments = ("-m", checkpoint, "--batch-size", "3", "--num-prompts", "3", "-n", "6", "--json")
    result = run(*arguments, "--graphs", "--ignore-eos")
    assert result.code == 0
    expected = json.loads(result.out)
    assert expected["config"]["cuda_graph_config"]["enable_padding"] is True


def test_a_config_without_mtp_is_compared_as_it_is(run: Run, config: Callable[..., str]) -> None:
    result = run("-c", config(), "--num-prompts", "2", "-n", "4", "--json")
    assert result.code == 0
    (variant,) = json.loads(result.out)["results"]
    assert (variant["worker"], variant["max_draft_len"]) == ("none", 0)
    assert variant["acceptance_length"] is variant["without_executor"] is None


SYNTHETIC = {"mtp": {"verification": "synthetic", "synthetic_acceptance": 0.5}}
SAMPLED = {"temperature": 0.7}
BLOCK_SECOND = {"mtp": {"verification": ["coupled", "block"]}}


@pytest.mark.parametrize(
    ("speculative", "params", "message"),
    [
        (RELAXED, {}, "relaxed acceptance changes the text by design"),
        (SYNTHETIC, {}, "synthetic acceptance changes the text by design"),
        *(
            ({"mtp": {"verification": name, "draft_sampling": "plain"}}, SAMPLED, f"{name} verif")
            for name in ("rejection", "block")
        ),
        (BLOCK_SECOND, {**SAMPLED, "verification": "block"}, "block verification samples other"),
    ],
)
def test_outputs_that_differ_by_design_are_refused(
    speculative: dict[str, Any], params: dict[str, Any], message: str
) -> None:
    config, requested = mtp_config(**speculative), SamplingParams(**params)
    with pytest.raises(ConfigError, match=f"^parity: {message}"):
        compare_grid(
            [comparison.Cell(config)],
            [],
            requested,
            num_prompts=1,
            seed=0,
            tie_ulps=4,
            on_progress=print,
        )


@pytest.mark.parametrize(
    "option", [{"relaxed_acceptance": False}, {"relaxed_topk": 1}, {"speculate": False}]
)
def test_a_request_that_is_strict_under_such_a_config_is_compared(
    checkpoint: str, option: dict[str, Any]
) -> None:
    config = mtp_config(**{**RELAXED, "relaxed_topk": 8, "relaxed_delta": 0.9})
    params = SamplingParams(**option)
    expect_same_text("parity", config, params)
    assert isinstance(Drafting.of(config, load_model(checkpoint), params), Drafting)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--k", "4", "--worker", "vanilla"), "more than the checkpoint's 3"),
        (("--temperature", "-1"), "temperature must be a number >= 0"),
        (("-c", "y"), "expected either --config or --model"),
    ],
)
def test_wrong_options_are_named(
    run: Run, checkpoint: str, arguments: tuple[str, ...], message: str
) -> None:
    result = run("-m", checkpoint, *arguments)
    assert result.code == 2
    assert message in " ".join(result.err.replace("\u2502", " ").split())
    assert "loading weights" not in result.err


EARLY_ERRORS = [
    ("--worker medusa", "expected eagle or vanilla, with commas between, got 'medusa'"),
    ("--k 1,x", "expected whole numbers above 0 with commas between, got '1,x'"),
    ("--k 17", "--k: expected at most 16 drafts, got 17"),
    ("--batch-size 0", "expected whole numbers above 0 with commas between, got '0'"),
    ("--tie-tolerance nan", "expected at least 0 ulps, got nan"),
    ("--tie-tolerance -1", "expected at least 0 ulps, got -1"),
    ("--top-p 2", "top_p must be a number from 0 to 1, got 2.0"),
    ("-n 0", "max_new_tokens must be an integer >= 1"),
    ("--dtype float8", "dtype: should be 'auto', "),
    ("--device tpu", "device: should be 'auto', "),
    ("--graphs --device cpu", "expected null with device: cpu"),
    ("--prompt-file none.txt", "prompt file none.txt: no such file"),
    (f"--num-prompts {10**20}", "Input should be less than or equal to"),
    ("--num-prompts 0", "Input should be greater than or equal to"),
]
IN_ONE_PROCESS = """
import sys
from mtp_plugin import cli
for line in sys.stdin.read().splitlines():
    sys.argv = ["mtp-plugin", "parity", "-m", "nowhere", *line.split()]
    sys.stderr.write(f"# {line}\\n")
    try:
        cli.main()
    except SystemExit as ended:
        loaded = {"torch", "transformers"} & {*sys.modules}
        sys.stderr.write(f"exit code {ended.code}, imported: {loaded or None}\\n")
"""


def test_wrong_options_are_reported_before_torch_is_imported() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS],
        input="\n".join(options for options, _ in EARLY_ERRORS),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    expected = ended.stderr.split("# ")[1:]
    for (options, message), lines in zip(EARLY_ERRORS, expected, strict=True):
        assert lines.startswith(f"{options}\n")
        assert message in " ".join(lines.replace("\u2502", " ").split()), lines
        assert lines.endswith("exit code 2, imported: None\n")
