"""``generate``: texts, acceptance and the verdict."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from mtp_plugin import infer
from mtp_plugin.config import load_config
from mtp_plugin.hosts.embedded import LLM, PyExecutor, SamplingParams, StepEvent
from mtp_plugin.hosts.embedded.models import load_model
from mtp_plugin.hosts.embedded.outputs import FINISH_REASONS
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.tools.check import BatchRun, PromptResult, Reference
from mtp_plugin.tools.terminal import generating
from tests.checkpoints import write_echo_checkpoint
from tests.cli.calls import (
    EAGLE,
    FEW,
    RELAXED,
    SYNTHETIC,
    VANILLA,
    Run,
    byte_tokenizer,
    texts_shown,
)


@pytest.mark.parametrize("speculative", [EAGLE, VANILLA], ids=["eagle", "vanilla"])
def test_generate_shows_text_table_and_verdict(
    run: Run, config: Callable[..., str], speculative: dict[str, Any]
) -> None:
    file = config(speculative)
    result = run("generate", "-c", file, "-p", "def f(", "-p", "import", "-n", "20")
    assert result.code == 0
    with LLM(file) as llm:
        outputs = llm.generate(["def f(", "import"], SamplingParams(max_new_tokens=20))
    assert texts_shown(result.out) == [output.text.rstrip("\n") for output in outputs]
    assert "── prompt 1 of 2\ndef f(\n── output" in result.out
    assert "── prompt 2 of 2\nimport\n── output" in result.out
    assert re.search(r"^\d+\.\dx tokens per second, identical output$", result.out, re.MULTILINE)
    assert "«" not in result.out
    line = r"^ *(with\w* MTP) +[\d.]+ +(\d+) +(\d+) +([\d.]+)(?: .*)?$"
    with_mtp, without = re.findall(line, result.out, re.MULTILINE)
    steps = int(with_mtp[2])
    assert with_mtp == ("with MTP", "38", str(steps), f"{38 / steps:.2f}")
    assert without == ("without MTP", "38", "38", "1.00")
    last = result.out.splitlines()[-1]
    assert last == "identical to decoding without MTP: yes (40 tokens)"
    assert "loading weights" in result.err


def test_every_phase_reports_progress(
    run: Run, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtp_plugin.requests.pacing.PACE_SECONDS", 0.0)
    lines = run("generate", "-c", config(EAGLE), "-p", "ab", "-n", "9", "--json").err.splitlines()
    phases = [
        r"loading weights",
        r"loading weights: \d+ of \d+ tensors",
        r"loading the MTP layers \(1\)",
        r"running one token through every layer",
        r"warming up",
        r"decoding: 9 tokens",
        r"decoding without the executor: prompt 1 of 1, 9 tokens",
        r"decoding without MTP: 9 tokens",
    ]
    found = [next(i for i, line in enumerate(lines) if re.fullmatch(p, line)) for p in phases]
    assert found == sorted(found)


@pytest.mark.parametrize(
    "options", [(), ("--temperature", "0.8", "--top-p", "0.95", "--seed", "7")]
)
def test_output_that_loops_has_a_note(run: Run, options: tuple[str, ...]) -> None:
    prompt = "class HTTPServer(socketserver.TCPServer):"
    file = "configs/tiny_eagle.yaml"
    result = run("generate", "-c", file, "-p", prompt, "-n", "200", "--no-compare", *options)
    assert ("note: the output repeats itself, which drafts" in result.out) is not bool(options)


def test_marks_are_around_accepted_drafts(run: Run, config: Callable[..., str]) -> None:
    file = config(EAGLE)
    result = run("generate", "-c", file, "-p", "def f(", "-n", "30", "--no-compare", "--marks")
    drafted, own, in_draft = "", "", False
    with LLM(file) as llm:
        for events in llm.stream("def f(", SamplingParams(max_new_tokens=30)):
            for segment in events[0].segments:
                drafted += segment.text if segment.from_draft else ""
                own += "" if segment.from_draft else segment.text
    shown_drafted = shown_own = ""
    for char in texts_shown(result.out)[0]:
        if char in "«»":
            assert in_draft is (char == "»")
            in_draft = char == "«"
        elif in_draft:
            shown_drafted += char
        else:
            shown_own += char
    assert not in_draft
    assert len(drafted) > 5
    assert (shown_drafted, shown_own.rstrip()) == (drafted, own.rstrip())


def test_colours_in_place_of_marks(
    run: Run, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config(EAGLE)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = run("generate", "-c", file, "-p", "ab", "-n", "16", "--no-compare").out
    assert "\x1b[32m" in coloured
    assert "«" not in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "«" in run("generate", "-c", file, "-p", "ab", "-n", "16", "--no-compare").out


def test_no_compare_leaves_the_other_runs_out(run: Run, config: Callable[..., str]) -> None:
    requested = ("-c", config(EAGLE), "-p", "ab", "--no-compare")
    result = run("generate", *requested, "-n", "8")
    assert result.code == 0
    assert "without MTP" not in result.out
    assert "identical" not in result.out
    document = json.loads(run("generate", *requested, "--ignore-eos", "--json").out)
    assert document["run"]["num_tokens"] == 128
    assert document["identical"] is document["comparison"] is document["run_without_mtp"] is None


def test_without_mtp_there_is_no_acceptance(run: Run, config: Callable[..., str]) -> None:
    result = run("generate", "-c", config(None), "-p", "ab", "-n", "8")
    assert result.code == 0
    assert "accept" not in result.out
    assert "drafts" not in result.out.split("── 8 tokens")[1]
    assert result.out.splitlines()[-1] == "identical to target-only decoding: yes (8 tokens)"
    result = run("generate", "-c", config(None), "-p", "ab", "-n", "4", "--json")
    document = json.loads(result.out)
    assert document["run"]["acceptance"] is document["results"][0]["acceptance"] is None


def test_relaxed_acceptance_says_what_it_does_not_promise(
    run: Run, config: Callable[..., str]
) -> None:
    result = run("generate", "-c", config(RELAXED), "-p", "<think>so", "-n", "40")
    found = re.search(
        r"^identical to decoding without MTP: not promised by relaxed acceptance; (\d+) of 40 "
        r"tokens agree up to the first difference of each prompt$",
        result.out,
        re.MULTILINE,
    )
    assert found
    assert int(found[1]) < 40
    assert result.code == 0


def test_synthetic_acceptance_is_marked_wherever_it_shows(
    run: Run, config: Callable[..., str]
) -> None:
    options = ("-p", "ab", "-n", "40")
    result = run("generate", "-c", config(SYNTHETIC), *options)
    assert result.code == 0
    assert "── output (synthetic, not the model's)" in result.out
    assert (
        "synthetic acceptance (90% / 80% / 70%): for benchmarks: drafts are accepted at random, "
        "the output is not the model's"
    ) in result.out
    assert re.search(r"^\d+\.\dx tokens per second, synthetic acceptance$", result.out, re.M)
    assert re.search(
        r"^identical to decoding without MTP: not promised by synthetic acceptance; \d+ of 40 ",
        result.out,
        re.MULTILINE,
    )
    document = json.loads(run("generate", "-c", config(SYNTHETIC), *options, "--json").out)
    assert document["label"]["is_drawn"] is True
    assert document["run"]["acceptance"]["label"]["name"] == "synthetic"
    assert document["results"][0]["acceptance"]["label"]["name"] == "synthetic"
    assert document["comparison"]["expected_identical"] is False
    assert document["identical"] is None


def test_doctor_reports_synthetic_rates(run: Run, config: Callable[..., str]) -> None:
    result = run("doctor", "-c", config(SYNTHETIC))
    assert result.code == 0
    assert re.search(
        r"^acceptance +synthetic, 90% / 80% / 70%: for benchmarks: drafts are accepted at random, "
        r"the output is not the model's$",
        result.out,
        re.MULTILINE,
    )
    lines = run("doctor", "-c", config(EAGLE)).out.splitlines()
    assert not any(line.startswith("acceptance") for line in lines)


COUPLED_FIRST = {**EAGLE, "mtp": {"verification": ["coupled", "block"]}}
PLAIN_FIRST = {**EAGLE, "mtp": {"verification": ["rejection", "coupled"]}}


@pytest.mark.parametrize(
    ("speculative", "option"),
    [
        (COUPLED_FIRST, "verification=block"),
        (PLAIN_FIRST, "draft_sampling=plain"),
        (RELAXED, "relaxed_topk=3"),
        (EAGLE, "max_draft_len=1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_of_drafts_do_not_reach_decoding_without_any(
    run: Run, config: Callable[..., str], speculative: dict[str, Any], option: str
) -> None:
    file = config(speculative)
    result = run("generate", "-c", file, "-p", "x", "-n", "8", "--option", option, "--json")
    assert result.code == 0, result.err
    expected = json.loads(result.out)
    assert expected["run_without_mtp"]["num_tokens"] == expected["run"]["num_tokens"] == 8
    assert expected["comparison"]["num_tokens"] == 8


def test_words_that_are_never_written_compare_too(run: Run, config: Callable[..., str]) -> None:
    requested = ("-c", config(EAGLE), "-p", "def f(", "-n", "16", "--compare-drafts", "--json")
    (free,) = json.loads(run("generate", *requested).out)["results"]
    banned = free["token_ids"][0]
    word = byte_tokenizer().decode([banned])
    result = run("generate", *requested, "--option", f"bad_words={json.dumps([word])}")
    assert result.code == 0, result.err
    expected = json.loads(result.out)
    assert banned not in expected["results"][0]["token_ids"]
    assert expected["comparison"]["num_equal"] == expected["comparison"]["num_tokens"] == 16
    assert expected["without_executor"]["num_equal_texts"] == 1


SAMPLING = ["--temperature", "0.8", "--top-k", "40", "--top-p", "0.95", "--min-p", "0.01"]
PENALTIES = [
    *("--repetition-penalty", "1.3", "--presence-penalty", "0.4"),
    *("--frequency-penalty", "0.2"),
]


def test_sampled_texts_compare_too(run: Run, config: Callable[..., str]) -> None:
    """Every option reaches the request and target-only decoding; the seed decides the draws."""
    file = config({**EAGLE, "mtp": {"seed": 7}})
    prompts = ["-p", "def f(x):\n", "-p", "def f(x):\n", "-n", "16", "--ignore-eos", "--json"]

    def texts(*arguments: str) -> list[list[int]]:
        result = run("generate", "-c", file, *prompts, *arguments)
        assert result.code == 0
        expected = json.loads(result.out)
        assert expected["comparison"]["identical"] is True
        assert expected["comparison"]["num_equal"] == 32
        assert expected["comparison"]["num_ties"] == 0
        return [one["token_ids"] for one in expected["results"]]

    greedy, sampled = texts(), texts(*SAMPLING)
    # the same prompt, sampled by its number
    assert greedy[0] == greedy[1]
    assert sampled[0] != sampled[1]
    seeded = texts(*SAMPLING, *PENALTIES, "--seed", "5")
    assert seeded[0] == seeded[1]
    oracle_text = infer.decode(
        load_model(load_config(file).model).target,
        list(byte_tokenizer().encode("def f(x):\n")),
        SamplingParams(
            **{"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 5},
            **{"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
            max_new_tokens=16,
            ignore_eos=True,
        ),
    )
    assert seeded[0] == oracle_text.token_ids


@pytest.mark.parametrize("named", [False, True])
def test_a_budget_of_thinking(run: Run, config: Callable[..., str], named: bool) -> None:
    """Its end is where it is spent, and target-only decoding writes the same; decoding without
    MTP knows the tokenizer's tags alone."""
    begin, end = (byte_tokenizer().encode(tag) for tag in ("<think>", "</think>"))
    tags = {"begin_thinking_phase_token": begin[0], "end_thinking_phase_token": ord("x") - 33}
    file = config({**EAGLE, **tags} if named else EAGLE)
    requested = ("generate", "-c", file, "-p", "<think>ab", "-n", "12", "--ignore-eos", "--json")
    result = run(*requested, "--thinking-token-budget", "4")
    assert result.code == 0
    expected = json.loads(result.out)
    tokens = expected["results"][0]["token_ids"]
    assert tokens[4] == (tags["end_thinking_phase_token"] if named else end[0])
    assert expected["comparison"]["identical"] is True
    assert ("not timed without MTP" in result.err) is named
    assert (expected["run_without_mtp"] is None) is named
    assert json.loads(run(*requested).out)["results"][0]["token_ids"] != tokens
    refused = run(*requested, "--thinking-budget", "-2")
    assert refused.code == 2
    assert "thinking_token_budget must be an integer >= 0, got -2" in refused.err


@pytest.fixture
def tampered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Changes the result of one prompt in every run."""

    def tamper(prompt: int, change: Callable[[PromptResult], PromptResult]) -> None:
        honest = generating.run_requests

        def run_requests(*arguments: Any) -> BatchRun:
            ran = honest(*arguments)
            ran.results[prompt] = change(ran.results[prompt])
            return ran

        monkeypatch.setattr(generating, "run_requests", run_requests)

    return tamper


def other_token(position: int) -> Callable[[PromptResult], PromptResult]:
    """Another token at a position, counted from 1."""

    def change(result: PromptResult) -> PromptResult:
        tokens = list(result.token_ids)
        tokens[position - 1] = (tokens[position - 1] + 1) % 256
        return dataclasses.replace(result, token_ids=tokens)

    return change


def test_a_wrong_token_is_reported_and_fails(
    run: Run, config: Callable[..., str], tampered: Callable[..., None]
) -> None:
    file = config(EAGLE)
    requested = ("generate", "-c", file, "-p", "x", "-p", "def f(", "-n", "12", "--ignore-eos")
    (_, right) = json.loads(run(*requested, "--json").out)["results"]
    tampered(1, other_token(5))
    result = run(*requested, "--json")
    assert result.code == 1
    document = json.loads(result.out)
    assert (document["identical"], document["comparison"]["identical"]) == (False, False)
    # the four tokens before it count, nothing after it does
    assert document["comparison"]["num_equal"] == 12 + 4
    (found,) = document["comparison"]["differences"]
    expected = right["token_ids"][4]
    assert (found["prompt"], found["position"], found["expected"]) == (2, 5, expected)
    assert found["token"] == (expected + 1) % 256
    assert found["prompt_token_ids"] == right["prompt_token_ids"]
    assert found["gap"] > found["tie_tolerance"] == 0.0
    shown = run(*requested)
    assert shown.code == 1
    assert "x tokens per second, output NOT identical\n" in shown.out
    ours, theirs = (f"{t} {byte_tokenizer().decode([t])!r}" for t in (found["token"], expected))
    line = f"difference: prompt 2, token 5: {ours}, target-only decoding has {theirs}, logits "
    assert line in shown.out
    assert shown.out.splitlines()[-1] == "identical to decoding without MTP: NO (24 tokens)"


def test_a_text_that_ends_too_early_is_a_difference(
    run: Run, config: Callable[..., str], tampered: Callable[..., None]
) -> None:
    tampered(0, lambda result: dataclasses.replace(result, token_ids=result.token_ids[:-1]))
    result = run("generate", "-c", config(EAGLE), "-p", "x", "-n", "6", "--ignore-eos")
    assert result.code == 1
    assert "difference: prompt 1, token 6: the end, target-only decoding has " in result.out


@pytest.mark.parametrize(
    ("dtype", "tolerance", "sampling", "is_tie"),
    [
        ("bfloat16", "1e6", (), True),
        ("bfloat16", "1e6", ("--temperature", "1"), True),
        ("bfloat16", "4", (), False),
        ("float32", "1e6", (), False),
    ],
)
def test_ties_are_excused_and_reported(
    run: Run,
    config: Callable[..., str],
    tampered: Callable[..., None],
    dtype: str,
    tolerance: str,
    sampling: tuple[str, ...],
    is_tie: bool,
) -> None:
    """The last token is another one, so that nothing depends on what follows."""
    tampered(0, other_token(8))
    requested = ("-c", config(EAGLE), "-p", "x", "-n", "8", "--ignore-eos", "--dtype", dtype)
    result = run("generate", *requested, *sampling, "--tie-tolerance", tolerance)
    assert result.code == int(not is_tie)
    kind = "tie" if is_tie else "difference"
    assert re.search(rf"^{kind}: prompt 1, token 8: .* apart", result.out, re.MULTILINE)
    verdict = "yes up to 1 rounding ties" if is_tie else "NO"
    last = result.out.splitlines()[-1]
    assert last == f"identical to decoding without MTP: {verdict} (8 tokens)"


def test_a_wrong_log_probability_is_a_difference(
    run: Run, config: Callable[..., str], tampered: Callable[..., None]
) -> None:
    requested = ("generate", "-c", config(EAGLE), *LOGPROBS, "--ignore-eos")
    right = json.loads(run(*requested, "--json").out)
    assert (right["identical"], right["logprobs"]["differences"]) == (True, [])
    assert right["logprobs"]["num_values"] >= 2 * 12 + 5

    def change(result: PromptResult) -> PromptResult:
        assert result.logprobs is not None
        token, one = next(iter(result.logprobs[4].items()))
        result.logprobs[4][token] = one._replace(logprob=one.logprob - 0.001)
        return dataclasses.replace(result, prompt_logprobs=(result.prompt_logprobs or [])[:2])

    tampered(0, change)
    result = run(*requested, "--json")
    assert result.code == 1
    document = json.loads(result.out)
    assert (document["identical"], document["comparison"]["identical"]) == (False, True)
    found = [(one["kind"], one["position"]) for one in document["logprobs"]["differences"]]
    assert ("log-probability", 5) in found
    assert ("prompt log-probability", 3) in found
    shown = run(*requested)
    assert shown.code == 1
    line = r"^difference: prompt 1, prompt log-probability 3: .*, nothing, expected -"
    assert re.search(line, shown.out, re.MULTILINE)
    assert "identical to decoding without MTP: NO" in shown.out


def test_log_probabilities_after_a_cut_need_float32(run: Run, config: Callable[..., str]) -> None:
    file = config({**EAGLE, "mtp": {"logprobs_mode": "processed"}})
    requested = (*LOGPROBS, "--temperature", "0.7", "--top-k", "5", "--dtype", "bfloat16", "--json")
    result = run("generate", "-c", file, *requested)
    assert (result.code, json.loads(result.out)["logprobs"]) == (0, None)
    assert "log-probabilities not compared: outside float32, rounding moves top_k" in result.err


# --- a grid ---


def test_all_combinations_are_compared_in_one_table(run: Run, tmp_path: Path) -> None:
    """Of a checkpoint without a tokenizer, whose prompts are random ids."""
    write_echo_checkpoint(tmp_path, vocab_size=96)
    grid = ("--grid", "k=0,1,3", "--grid", "batch=1,3", "--grid", "dtype=float32,bfloat16")
    options = ("-n", "8", "--ignore-eos", "--num-prompts", "4", "--compare-drafts", "--json")
    result = run("generate", str(tmp_path), *grid, *options)
    assert result.code == 0
    document = json.loads(result.out)
    assert (document["kind"], document["identical"]) == ("generate", True)
    found = [
        (one["max_draft_len"], one["config"]["max_batch_size"], one["dtype"])
        for one in document["results"]
    ]
    dtypes = ("float32", "bfloat16")
    assert found == [(k, size, dtype) for k in (0, 1, 3) for size in (1, 3) for dtype in dtypes]
    for one in document["results"]:
        assert one["comparison"]["num_tokens"] == one["comparison"]["num_equal"] == 32
        drafts, again = one["max_draft_len"], one["without_executor"]
        assert (again is None) == (drafts == 0)
        if drafts and one["dtype"] == "float32":
            assert again["num_equal_texts"] == again["num_prompts"] == 4
            assert 1 < again["acceptance_length"] == again["acceptance_length_of_executor"]


def test_a_difference_in_a_grid_names_its_combination(
    run: Run, config: Callable[..., str], tampered: Callable[..., None]
) -> None:
    requested = ("-c", config(EAGLE), "--grid", "k=1,2", "-p", "x", "--num-prompts", "2")
    requested = ("generate", *requested, "-n", "6", "--ignore-eos", "--dtype", "float32")
    result = run(*requested)
    rows = re.findall(r"^ *(K=\d batch \d+ float32) ", result.out, re.MULTILINE)
    assert (result.code, rows) == (0, ["K=1 batch 8 float32", "K=2 batch 8 float32"])
    assert result.out.splitlines()[-1] == "identical to decoding without MTP: yes (24 tokens)"
    tampered(1, other_token(4))
    result = run(*requested)
    assert result.code == 1
    for row in rows:
        assert f"\ndifference: {row}, prompt 2, token 4: " in result.out
    assert result.out.endswith("identical to decoding without MTP: NO (24 tokens)\n")


def test_parity_runs_generate(run: Run, config: Callable[..., str]) -> None:
    file = config(EAGLE)
    options = ("--k", "1,2", "--batch-size=1", "-n", "4", "-p", "x", "--json")
    result = run("parity", "-c", file, *options)
    assert result.code == 0
    line = f"generate --compare-drafts -n 64 -c {file} --grid=k=1,2 --grid=batch=1 -n 4 -p x --json"
    assert f"parity is now: mtp-plugin {line}" in result.err
    assert [one["max_draft_len"] for one in json.loads(result.out)["results"]] == [1, 2]
    shown = run("parity", "-c", file, "-n", "2", "-p", "def", "--num-prompts", "2").out
    assert "prompt 1 of 2\ndef\n" in shown


OTHERS = {
    "logit_bias": dict.fromkeys(range(0, 200, 7), 4.0),
    "allowed_token_ids": [*range(0, 200, 2), *range(0, 200, 7)],
    "bad_words": [[7], [14, 0], [0, 0]],
    "bad_token_ids": [28, 42],
    "prompt_ignore_length": 2,
    "stop_token_ids": [21],
    "min_tokens": 9,
    "max_draft_len": 1,
    "logprobs": 2,
}


@pytest.mark.parametrize("is_sampled", [False, True])
def test_every_option_is_compared(run: Run, config: Callable[..., str], is_sampled: bool) -> None:
    others = [text for name, value in OTHERS.items() for text in ("--option", f"{name}={value}")]
    sampling = (*SAMPLING, *PENALTIES) if is_sampled else ("--frequency-penalty", "0.4")
    requested = ("-c", config(VANILLA), "-p", "def f(", "--num-prompts", "3", "-n", "10", "--json")
    result = run("generate", *requested, *sampling, *others, "--compare-drafts")
    assert result.code == 0
    document = json.loads(result.out)
    assert document["sampling_params"].keys() >= OTHERS.keys()
    assert document["comparison"]["num_equal"] == document["comparison"]["num_tokens"] >= 27
    assert document["logprobs"]["num_values"] >= 2 * document["comparison"]["num_tokens"]
    assert document["without_executor"]["num_equal_texts"] == 3


def test_json_is_one_document(run: Run, config: Callable[..., str]) -> None:
    file = config(VANILLA)
    result = run("generate", "-c", file, "-p", "def f(", "-p", "é", "-n", "16", "--json")
    assert result.code == 0
    document = json.loads(result.out)
    assert [*document][:2] == ["kind", "versions"]
    assert [*document][-2:] == ["identical", "results"]
    with LLM(file) as llm:
        outputs = llm.generate(["def f(", "é"], SamplingParams(max_new_tokens=16))
    for found, output, prompt in zip(document["results"], outputs, ["def f(", "é"], strict=True):
        assert found["prompt"] == prompt
        assert found["prompt_token_ids"] == output.prompt_token_ids
        assert found["token_ids"] == output.token_ids
        assert found["text"] == output.text
        assert FINISH_REASONS[FinishReason(found["finish_reason"])] == output.finish_reason
        acceptance = found["acceptance"]
        assert acceptance["steps_by_emitted_tokens"] == output.acceptance.histogram
        assert acceptance["acceptance_length"] == output.acceptance.acceptance_length
        assert acceptance["per_position"] == output.acceptance.per_position
    emitted = sum(len(output.token_ids) for output in outputs)
    for name in ("run", "run_without_mtp"):
        assert document[name]["num_tokens"] == emitted
        assert document[name]["seconds"] > 0
        assert document[name]["tokens_per_second"] > 0
    assert document["run"]["acceptance"]["emitted"] == emitted - 2
    assert document["run_without_mtp"]["num_steps"] > document["run"]["num_steps"]
    assert document["comparison"] == {
        "identical": True,
        "expected_identical": True,
        "num_tokens": emitted,
        "num_equal": emitted,
        "num_ties": 0,
        "ties": [],
        "differences": [],
    }
    assert document["identical"] is True
    assert document["label"] is document["run"]["acceptance"]["label"] is None
    assert found["logprobs"] is found["prompt_logprobs"] is None
    assert document["max_draft_len"] == 3
    assert document["config"]["speculative_config"]["max_draft_len"] == 3
    assert set(document["versions"]) == {"mtp_plugin", "python", "torch", "transformers"}


LOGPROBS = ("--option", "logprobs=2", "--option", "prompt_logprobs=0", "-p", "def f(", "-n", "12")


def test_json_has_log_probabilities(run: Run, config: Callable[..., str]) -> None:
    file = config(EAGLE)
    (found,) = json.loads(run("generate", "-c", file, *LOGPROBS, "--json").out)["results"]
    requested = SamplingParams(max_new_tokens=12, logprobs=2, prompt_logprobs=0)
    with LLM(file) as llm:
        (output,) = llm.generate(["def f("], requested)
    assert output.logprobs is not None
    assert output.prompt_logprobs is not None

    def document(entries: Any) -> list[dict[str, Any]]:
        return [
            {"token_id": token, "logprob": one.logprob, "rank": one.rank}
            for token, one in entries.items()
        ]

    assert found["logprobs"] == [document(entries) for entries in output.logprobs]
    _, *others = output.prompt_logprobs
    assert found["prompt_logprobs"] == [None, *map(document, others)]
    assert len(found["logprobs"]) == 12
    assert len(found["prompt_logprobs"]) == 6


def test_json_of_what_cannot_be(run: Run, config: Callable[..., str]) -> None:
    """After cuts an id may have no probability at all, and JSON has no infinity."""
    file = config({**EAGLE, "mtp": {"logprobs_mode": "processed"}})
    options = ("--option", "logprobs=2", "--option", "allowed_token_ids=[7]", "-n", "2")
    result = run("generate", "-c", file, "-p", "x", *options, "--json", "--ignore-eos")
    assert "Infinity" not in result.out
    for entries in json.loads(result.out)["results"][0]["logprobs"]:
        assert [one["logprob"] for one in entries] == [0.0, None]
    # and named by the request, where decoding without MTP and without the executor are with it
    named = (*options, "--option", "logprobs_mode=processed", "--ignore-eos", "--json")
    again = run("generate", "-c", file, "-p", "x", *named, "--compare-drafts")
    assert again.code == 0
    assert json.loads(again.out)["results"] == json.loads(result.out)["results"]


@pytest.mark.parametrize("way", ["rejection", "coupled"])
def test_the_same_drafts_without_the_executor(
    run: Run, checkpoint: Path, tmp_path: Path, way: str
) -> None:
    """Sampled texts too are the same for the same seeds."""
    file = tmp_path / "config.yaml"
    speculative = {**EAGLE, "mtp": {"verification": way}}
    file.write_text(yaml.safe_dump({"model": str(checkpoint), "speculative_config": speculative}))
    arguments = ("-p", "def f(", "-p", "é", "-n", "16", "--temperature", "0.8", "--json")
    result = run("generate", "-c", str(file), *arguments, "--compare-drafts")
    assert result.code == 0
    document = json.loads(result.out)
    assert (document["comparison"] is None) == (way == "rejection")
    assert ("compared with the same drafts alone: rejection" in result.err) == (way == "rejection")
    length = document["run"]["acceptance"]["acceptance_length"]
    assert document["without_executor"] == {
        "num_prompts": 2,
        "num_equal_texts": 2,
        "num_ties": 0,
        "differences": [],
        "acceptance_length": length,
        "acceptance_length_of_executor": length,
    }
    if way == "rejection":
        result = run("generate", "-c", str(file), *arguments)
        assert json.loads(result.out)["without_executor"] is None
        assert "\nnot compared: rejection" in result.err
        assert "without the executor" not in result.err


@pytest.mark.thinned("worker", "way")
@pytest.mark.parametrize("worker", [EAGLE, VANILLA], ids=["eagle", "vanilla"])
@pytest.mark.parametrize("way", ["rejection", "coupled"])
@pytest.mark.parametrize("option", ["speculate=false", "max_draft_len=1"])
def test_as_few_drafts_without_the_executor(
    run: Run, config: Callable[..., str], worker: dict[str, Any], way: str, option: str
) -> None:
    file = config({**worker, "mtp": {"verification": way}})
    prompts = ("-p", "def f(", "-p", "é", "-n", "16", "--temperature", "0.8")
    requested = ("-c", file, *prompts, "--no-compare", "--compare-drafts", "--json")
    result = run("generate", *requested, "--option", option)
    assert result.code == 0
    document = json.loads(result.out)
    found, accepted = document["without_executor"], document["run"]["acceptance"]
    assert found["num_equal_texts"] == 2
    assert found["acceptance_length"] == found["acceptance_length_of_executor"]
    assert (accepted["acceptance_length"] > 1) == (option == "max_draft_len=1")


def mistaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let decoding without the executor end the first text with another token."""
    honest = Reference.with_drafts

    def wrong(*arguments: Any, **options: Any) -> list[PromptResult]:
        first, *others = honest(*arguments, **options)
        tokens = [*first.token_ids[:-1], (first.token_ids[-1] + 1) % 256]
        return [dataclasses.replace(first, token_ids=tokens), *others]

    monkeypatch.setattr(Reference, "with_drafts", wrong)


@pytest.mark.parametrize("way", ["rejection", "coupled"])
def test_drafts_compare_by_themselves(
    run: Run, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    file = config({**EAGLE, "mtp": {"verification": way}})
    arguments = ("-p", "def f(", "-p", "é", "-n", "8", "--temperature", "0.8", "--seed", "3")
    arguments = ("generate", "-c", file, *arguments, "--no-compare", "--compare-drafts")
    result = run(*arguments)
    assert result.code == 0
    assert "identical" not in result.out
    assert "\nprompts 1-2 without the executor: 2 of 2 texts equal, " in result.out
    mistaken(monkeypatch)
    result = run(*arguments)
    assert "\nprompts 1-2 without the executor: 1 of 2 texts equal, " in result.out
    assert result.code == int(way == "coupled")
    line = "difference: prompt 1, token without the executor 8: "
    assert (line in result.out) == (way == "coupled")


def test_drafts_that_cannot_compare_are_reported(run: Run, config: Callable[..., str]) -> None:
    cache = {"tokens_per_block": 8, "max_tokens": 80}
    file = config(
        {**EAGLE, "mtp": {"verification": "rejection"}}, kv_cache_config=cache, max_seq_len=64
    )
    texts = [word for text in "abc" for word in ("-p", text)]
    arguments = ("-n", "40", "--ignore-eos", "--temperature", "0.8", "--json", "--compare-drafts")
    result = run("generate", "-c", file, *texts, *arguments)
    assert result.code == 0
    assert json.loads(result.out)["without_executor"] is None
    why = r"preempted \d+ times, after which rejection samples anew"
    assert re.search(f"^not decoded again: {why}$", result.err, re.MULTILINE)
    assert "\nnot compared: " in result.err


def test_no_memory_for_drafts_loses_no_report(
    run: Run, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def greedy(*_: Any, **__: Any) -> list[PromptResult]:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate much")

    monkeypatch.setattr(Reference, "with_drafts", greedy)
    arguments = ("-p", "ab", "-n", "4", "--json", "--compare-drafts")
    result = run("generate", "-c", config(EAGLE), *arguments)
    assert result.code == 0
    document = json.loads(result.out)
    assert document["comparison"]["identical"]
    assert document["without_executor"] is None
    assert "not decoded again: out of memory" in result.err.splitlines()


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupt_ends_cleanly(
    run: Run, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    steps, closed = [], []
    step, shutdown = PyExecutor.step, PyExecutor.shutdown

    def interrupted(self: PyExecutor) -> list[StepEvent]:
        steps.append(1)
        if len(steps) == 9:
            raise KeyboardInterrupt
        return step(self)

    def watched(self: PyExecutor) -> None:
        shutdown(self)
        closed.append(self.engine.blocks.num_free_blocks == self.engine.blocks.num_blocks)

    monkeypatch.setattr(PyExecutor, "step", interrupted)
    monkeypatch.setattr(PyExecutor, "shutdown", watched)
    extra = ["--json"] if as_json else []
    result = run("generate", "-c", config(EAGLE), "-p", "ab", "-n", "60", *extra)
    assert result.code == 130
    assert result.err.endswith("interrupted\n")
    assert closed == [True]
    assert not as_json or result.out == ""
    assert as_json or result.out.endswith("\n")


@pytest.mark.parametrize("during", ["load", "finish"])
def test_an_interrupt_outside_of_decoding_is_one_line(
    run: Run, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"mtp_plugin.cli.generate.{during}", interrupted)
    result = run("generate", "-c", config(EAGLE), "-p", "ab", *FEW)
    assert (result.code, result.out) == (130, "")
    assert result.err.endswith("interrupted\n")
    assert during == "finish" or result.err == "interrupted\n"


def test_a_failed_request_is_an_error(
    run: Run, config: Callable[..., str], checkpoint: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in checkpoint.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors["lm_head.weight"].fill_(float("nan"))
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    result = run("generate", "-c", config(EAGLE, model=str(broken)), "-p", "ab", "--no-marks")
    assert result.code == 2
    expected = "error: prompt 1 of 1 failed after 0 tokens: the target gave a row of logits without"
    assert result.err.splitlines()[-1].startswith(expected)
    assert "Traceback" not in result.err
