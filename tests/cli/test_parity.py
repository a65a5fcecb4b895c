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
from mtp_plugin.hosts.embedded.models import load_model
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats
from mtp_plugin.tools.parity import Oracle, oracle
from mtp_plugin.tools.terminal import parity, parity_report
from mtp_plugin.tools.terminal.decoding import PromptResult
from mtp_plugin.tools.terminal.plain_decoding import CHUNK_LEN, PlainDecoding
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
def tampered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """An executor that emits another token at a place of one prompt's output."""

    def tamper(prompt: int, position: int, change: Callable[[list[int]], list[int]]) -> None:
        honest = parity.run_batch

        def run_batch(*arguments: Any) -> Any:
            ran = honest(*arguments)
            wrong = ran.results[prompt]
            tokens = change(wrong.token_ids[: position + 1]) + wrong.token_ids[position + 1 :]
            ran.results[prompt] = dataclasses.replace(wrong, token_ids=tokens)
            return ran

        monkeypatch.setattr(parity, "run_batch", run_batch)

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
    assert expected["identical"] is True
    assert expected["dtype"] == "float32"
    assert expected["device"] == "cpu"
    found = [(v["worker"], v["max_draft_len"], v["batch_size"]) for v in expected["results"]]
    assert found == [(w, k, b) for w in ("eagle", "vanilla") for k in (1, 3) for b in (1, 3)]
    for variant in expected["results"]:
        assert variant["num_prompts"] == 4
        assert variant["num_tokens"] == variant["num_equal"] == 32
        assert variant["ties"] == variant["differences"] == []
        assert 1 < variant["acceptance_length"] <= variant["max_draft_len"] + 1


def test_the_table_and_the_verdict(run: Run, checkpoint: str) -> None:
    result = run("-m", checkpoint, "--k", "2", "--num-prompts", "3", "-n", "6", "--ignore-eos")
    assert result.code == 0
    row = next(line.split() for line in result.out.splitlines() if "eagle" in line)
    assert row[:8] == ["eagle", "2", "8", "3", "18", "18", "0", "0"]
    last = "identical to decoding without MTP: yes (18 tokens; ties: 0; differences: 0)"
    assert result.out.splitlines()[-1] == last


@pytest.mark.thinned(cases=2)
@pytest.mark.parametrize(
    ("mtp", "sampling"),
    [
        ({}, ()),
        ({}, ("--temperature", "0.9", "--top-k", "50", "--repetition-penalty", "1.2")),
        ({"draft_sampling": "greedy"}, ("--temperature", "0.3", "--repetition-penalty", "1.3")),
        ({}, ("--temperature", "0.3", "--option", "draft_sampling=greedy")),
        ({"draft_vocab": 60}, ()),
    ],
    ids=["greedy", "sampled", "greedy drafts", "greedy drafts requested", "draft vocabulary"],
)
def test_as_many_drafts_are_without_the_executor(
    run: Run, checkpoint: str, tmp_path: Path, mtp: dict[str, Any], sampling: tuple[str, ...]
) -> None:
    """By another way to the same text: no step accepts more or fewer."""
    file = tmp_path / "config.yaml"
    speculative = {"decoding_type": "MTP", "mtp": mtp}
    file.write_text(yaml.safe_dump({"model": checkpoint, "speculative_config": speculative}))
    result = run(
        *("-c", str(file), "--worker", "eagle,vanilla", "--k", "1,3", "--batch-size", "5"),
        *("--num-prompts", "5", "-n", "10", "--json", "--ignore-eos", *sampling),
    )
    assert result.code == 0
    variants = json.loads(result.out)["results"]
    for variant in variants:
        found = variant["without_executor"]
        assert (found["num_prompts"], found["num_equal_texts"]) == (4, 4)
        assert found["differences"] == []
        assert found["num_ties"] == 0
        assert found["acceptance_length"] == found["acceptance_length_of_executor"]
    lengths = {variant["without_executor"]["acceptance_length"] for variant in variants}
    assert len(lengths) > 1


def test_drafts_without_the_executor_are_reported(run: Run, checkpoint: str) -> None:
    result = run("-m", checkpoint, "--k", "2", "--num-prompts", "3", "-n", "6", "--ignore-eos")
    lines = [line for line in result.out.splitlines() if "without the executor" in line]
    expected = re.fullmatch(
        r"eagle K=2, prompts 1-3 without the executor: the text of target-only decoding, "
        r"accepted (\d\.\d\d) "
        r"\(by the executor (\d\.\d\d)\)",
        *lines,
    )
    assert expected is not None
    assert expected[1] == expected[2]


@pytest.fixture
def mistaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding without the executor ends the first text with another token."""
    honest = PlainDecoding.with_drafts

    def wrong(*arguments: Any, **options: Any) -> list[PromptResult]:
        first, *others = honest(*arguments, **options)
        return [dataclasses.replace(first, token_ids=other(first.token_ids)), *others]

    monkeypatch.setattr(PlainDecoding, "with_drafts", wrong)


@pytest.mark.usefixtures("mistaken")
def test_another_text_without_the_executor_is_a_difference(run: Run, checkpoint: str) -> None:
    arguments = ("-m", checkpoint, "--num-prompts", "2", "-n", "4", "--ignore-eos")
    result = run(*arguments)
    assert result.code == 1
    other_text = "another text of 1 than target-only decoding, accepted "
    assert f"prompts 1-2 without the executor: {other_text}" in result.out
    assert "difference without the executor: eagle K=3 batch 8, prompt 1, token 4: " in result.out
    last = "identical to decoding without MTP: NO (8 tokens; ties: 0; differences: 1)"
    assert result.out.splitlines()[-1] == last
    expected = json.loads(run(*arguments, "--json").out)
    assert expected["identical"] is False
    found = expected["results"][0]["without_executor"]
    assert (found["num_equal_texts"], len(found["differences"])) == (1, 1)


@pytest.mark.usefixtures("mistaken")
def test_a_tie_without_the_executor_is_no_difference(run: Run, checkpoint: str) -> None:
    arguments = ("-m", checkpoint, "--num-prompts", "2", "-n", "4", "--ignore-eos")
    arguments = (*arguments, "--dtype", "bfloat16", "--tie-tolerance", "1e6")
    result = run(*arguments)
    assert result.code == 0
    assert re.search("the text of target-only decoding, [1-9] rounding ties, acc", result.out)
    assert result.out.splitlines()[-1].startswith("identical to decoding without MTP: yes (")
    expected = json.loads(run(*arguments, "--json").out)
    assert expected["identical"] is True
    found = expected["results"][0]["without_executor"]
    assert found["num_ties"] >= 1
    assert found["differences"] == []


@pytest.mark.parametrize(
    "speculative",
    [
        {"max_draft_len": 2, "draft_len_schedule": {1: 2, 4: 1}},
        {"max_concurrency": 2},
        {"acceptance_window": 8, "acceptance_length_threshold": 1.2, "max_draft_len": 2},
        {"use_mtp_vanilla": True, "mtp": {"draft_window": "trtllm"}},
        {"use_mtp_vanilla": True, "mtp": {"chain": "target_shift"}},
    ],
    ids=["schedule", "concurrency", "gate", "window", "chain"],
)
def test_drafts_that_depend_on_more_than_the_text_are_not_made_again(
    run: Run, checkpoint: str, tmp_path: Path, speculative: dict[str, Any]
) -> None:
    file = tmp_path / "config.yaml"
    speculative = {"decoding_type": "MTP", **speculative}
    file.write_text(yaml.safe_dump({"model": checkpoint, "speculative_config": speculative}))
    result = run("-c", str(file), "--num-prompts", "2", "-n", "4", "--json", "--ignore-eos")
    assert result.code == 0
    (variant,) = json.loads(result.out)["results"]
    assert variant["without_executor"] is None


SAMPLING = (
    *("--temperature", "0.9", "--top-k", "50", "--top-p", "0.95", "--min-p", "0.02"),
    *("--repetition-penalty", "1.2", "--presence-penalty", "0.3", "--frequency-penalty", "0.2"),
)


@pytest.mark.thinned
@pytest.mark.parametrize("seed", [(), ("--seed", "11")], ids=["numbers", "seed"])
def test_sampled_texts_are_compared(run: Run, checkpoint: str, seed: tuple[str, ...]) -> None:
    result = run(
        *("-m", checkpoint, "--worker", "eagle,vanilla", "--k", "2", "--batch-size", "1,4"),
        *("--num-prompts", "4", "-n", "8", "--json", "--ignore-eos", *SAMPLING, *seed),
    )
    assert result.code == 0
    expected = json.loads(result.out)
    assert expected["sampling_params"]["temperature"] == 0.9
    assert expected["sampling_params"].get("seed") == (11 if seed else None)
    assert len(expected["results"]) == 4
    for variant in expected["results"]:
        assert variant["num_tokens"] == variant["num_equal"] == 32
        assert variant["differences"] == []
        assert variant["acceptance_length"] > 1


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


@pytest.mark.parametrize("sampling", [(), SAMPLING], ids=["greedy", "sampled"])
def test_every_other_option_is_compared(
    run: Run, checkpoint: str, sampling: tuple[str, ...]
) -> None:
    others = [text for name, value in OTHERS.items() for text in ("--option", f"{name}={value}")]
    requested = ("-m", checkpoint, "--worker", "eagle,vanilla", "--k", "2", "--num-prompts", "4")
    result = run(
        *requested, "-n", "10", "--json", "--frequency-penalty", "0.4", *sampling[:-2], *others
    )
    assert result.code == 0
    expected = json.loads(result.out)
    assert expected["sampling_params"].keys() >= OTHERS.keys()
    for variant in expected["results"]:
        assert variant["num_tokens"] == variant["num_equal"] >= 4 * 10
        assert variant["differences"] == []
        assert variant["logprobs"]["num_values"] >= 2 * variant["num_tokens"]
        assert variant["logprobs"]["differences"] == []
        plain = variant["without_executor"]
        assert plain["acceptance_length"] == plain["acceptance_length_of_executor"]


@pytest.mark.parametrize(
    ("option", "count"), [((), 64), (("--option", "max_tokens=5"), 5), (("-n", "6"), 6)]
)
def test_how_many_tokens_there_may_be(
    run: Run, checkpoint: str, option: tuple[str, ...], count: int
) -> None:
    result = run("-m", checkpoint, "--num-prompts", "1", "--ignore-eos", "--json", *option)
    assert result.code == 0, result.err
    (variant,) = json.loads(result.out)["results"]
    assert variant["num_tokens"] == variant["num_equal"] == count


LOGPROBS = ("--option", "logprobs=3", "--option", "prompt_logprobs=1", "-n", "8", "--ignore-eos")


@pytest.mark.thinned(cases=2)
@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_are_compared(
    run: Run, checkpoint: str, tmp_path: Path, mode: str, dtype: str
) -> None:
    file = tmp_path / "config.yaml"
    speculative = {"decoding_type": "MTP", "max_draft_len": 2, "mtp": {"logprobs_mode": mode}}
    file.write_text(yaml.safe_dump({"model": checkpoint, "speculative_config": speculative}))
    requested = (
        "-c",
        str(file),
        "--num-prompts",
        "3",
        "--dtype",
        dtype,
        "--temperature",
        "0.7",
        *LOGPROBS,
    )
    result = run(*requested, "--repetition-penalty", "1.3", "--json")
    assert result.code == 0
    (variant,) = json.loads(result.out)["results"]
    found = variant["logprobs"]
    assert found["num_values"] >= 3 * 8 * 3
    assert 0 < found["largest_gap"] < (1e-4 if dtype == "float32" else 1)
    assert found["differences"] == []
    line = re.compile(
        r"^eagle K=2 batch 8, \d+ log-probabilities: at most \S+ apart$", re.MULTILINE
    )
    assert line.search(run(*requested, "--option", f"logprobs_mode={mode}").out)
    # what is after a cut hangs on its place, which half precision moves
    result = run(*requested, "--top-k", "5")
    is_refused = (mode, dtype) == ("processed", "bfloat16")
    assert result.code == (2 if is_refused else 0)
    refusal = "parity: logprobs=3 of what top_k leaves: expected float32, got bfloat16"
    assert (refusal in result.err) == is_refused


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

    honest = parity.run_batch
    monkeypatch.setattr(parity, "run_batch", run_batch)
    monkeypatch.setattr(parity_report, "SHOWN_MISMATCHES", 2)
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
    assert {one["in_prompt"] for one in lost} == {True}
    assert min(one["position"] for one in lost) == 3
    assert {one["logprob"] for one in lost} == {None}
    result = run(*requested)
    assert result.code == 1
    lines = [line for line in result.out.splitlines() if line.startswith("log-probability: ")]
    assert lines[0].startswith("log-probability: eagle K=3 batch 8, prompt 2, prompt token 3: noth")
    assert f"\nand {len(lost) + 1 - 2} further log-probabilities\n" in result.out
    assert result.out.splitlines()[-1].startswith(
        "identical to decoding without MTP: NO (16 tokens"
    )


def test_log_probabilities_that_nothing_requests(run: Run, checkpoint: str) -> None:
    requested = ("-m", checkpoint, "--num-prompts", "1", "-n", "2")
    assert "log-prob" not in run(*requested).out
    assert json.loads(run(*requested, "--json").out)["results"][0]["logprobs"] is None


def test_words_that_are_never_written_are_compared(run: Run) -> None:
    requested = ("-m", str(TINY), "-p", "def f(self", "-n", "12", "--k", "2", "--json")
    (variant,) = json.loads(run(*requested, "--option", "bad_words=[self]").out)["results"]
    assert variant["num_tokens"] == variant["num_equal"] == 12
    assert variant["without_executor"]["num_equal_texts"] == 1


def test_a_budget_of_thinking_is_compared(run: Run, checkpoint: str, tmp_path: Path) -> None:
    tags = {"begin_thinking_phase_token": 5, "end_thinking_phase_token": 6}
    file = tmp_path / "config.yaml"
    speculative = {"decoding_type": "MTP", "max_draft_len": 1, **tags}
    file.write_text(yaml.safe_dump({"model": checkpoint, "speculative_config": speculative}))
    requested = ("-c", str(file), "--num-prompts", "3", "-n", "8", "--ignore-eos", "--json")
    assert run(*requested, "--option", "thinking_token_budget=2").code == 0


def test_a_request_may_not_name_what_draws_texts_of_its_own(
    run: Run, checkpoint: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    speculative = {"decoding_type": "MTP", "mtp": {"verification": ["coupled", "block"]}}
    file.write_text(yaml.safe_dump({"model": checkpoint, "speculative_config": speculative}))
    result = run("-c", str(file), "--temperature", "1", "--option", "verification=block")
    assert result.code == 2
    assert "parity: block verification samples other outputs by design" in result.err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_draw_is_a_difference(
    run: Run, checkpoint: str, tampered: Callable[..., None], dtype: str
) -> None:
    """The least likely token, whose scores no rounding brings near."""

    def unlikely(tokens: list[int]) -> list[int]:
        model = load_model(checkpoint)
        row = Oracle(model).logits([*prompt, *tokens[:-1]], 1)[0]
        return [*tokens[:-1], int(row.argmin())]

    (prompt,) = parity.make_prompts([], None, VOCAB, 1, 0)
    tampered(0, 5, unlikely)
    arguments = ("-m", checkpoint, "--num-prompts", "1", "-n", "8", "--dtype", dtype)
    result = run(*arguments, *SAMPLING, "--ignore-eos")
    assert result.code == 1
    line = next(line for line in result.out.splitlines() if line.startswith("difference: "))
    assert "prompt 1, token 6: " in line
    assert ", scores " in line
    assert " is a tie" in line


def test_ties_of_draws_are_excused_and_reported(
    run: Run, checkpoint: str, tampered: Callable[..., None]
) -> None:
    tampered(0, 3, other)
    arguments = ("-m", checkpoint, "--num-prompts", "1", "-n", "4", "--temperature", "1")
    result = run(*arguments, "--ignore-eos", "--dtype", "bfloat16", "--tie-tolerance", "1e6")
    assert result.code == 0
    assert "tie: eagle K=3 batch 8, prompt 1, token 4: " in result.out
    assert result.out.endswith("yes (4 tokens; ties: 1; differences: 0)\n")


def test_the_engine_s_seed_decides_draws_without_one(
    run: Run, checkpoint: str, tmp_path: Path
) -> None:
    file = tmp_path / "seeded.yaml"
    speculative = {"decoding_type": "MTP", "mtp": {"seed": 2**63 + 1}}
    file.write_text(yaml.safe_dump({"model": checkpoint, "speculative_config": speculative}))
    result = run("-c", str(file), "--num-prompts", "3", "-n", "8", "--temperature", "1", "--json")
    assert result.code == 0
    (variant,) = json.loads(result.out)["results"]
    assert variant["num_equal"] == variant["num_tokens"]


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
    truth = Oracle(model).continuation(prefix, [], 5)
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


@pytest.mark.parametrize(
    ("change", "token"),
    [(lambda tokens: tokens[:-1], None), (lambda tokens: [*tokens, 3], 3)],
    ids=["one-less", "one-more"],
)
def test_another_length_is_reported(
    run: Run, checkpoint: str, tampered: Callable[..., None], change: Any, token: int | None
) -> None:
    tampered(0, 5, change)
    result = run("-m", checkpoint, "--num-prompts", "2", "-n", "6", "--json", "--ignore-eos")
    assert result.code == 1
    (found,) = json.loads(result.out)["results"][0]["differences"]
    assert found["token"] == token
    assert found["gap"] is None


class Half(NamedTuple):
    note: str
    tolerance: str
    dtype: str
    code: int
    ties: int


@pytest.mark.parametrize(
    "case",
    [
        Half("a wide tolerance calls it a tie", "1e6", "bfloat16", 0, 1),
        Half("the usual one does not", "4", "bfloat16", 1, 0),
        Half("float32 has no ties", "1e6", "float32", 1, 0),
    ],
    ids=lambda case: case.note,
)
def test_ties_are_excused_and_differences_are_not(
    run: Run, checkpoint: str, tampered: Callable[..., None], case: Half
) -> None:
    """The last token is another one, so that nothing depends on what follows."""
    tampered(0, 7, other)
    result = run(
        *("-m", checkpoint, "--num-prompts", "2", "-n", "8", "--json", "--ignore-eos"),
        *("--dtype", case.dtype, "--tie-tolerance", case.tolerance, "--batch-size", "1"),
    )
    assert result.code == case.code
    expected = json.loads(result.out)
    (variant,) = expected["results"]
    assert variant["num_ties"] == len(variant["ties"]) == case.ties
    assert variant["num_differences"] == 1 - case.ties
    (found,) = variant["ties"] or variant["differences"]
    assert found["position"] == 8
    assert found["gap"] > 0
    assert variant["num_equal"] == 15


def test_ties_are_reported(run: Run, checkpoint: str, tampered: Callable[..., None]) -> None:
    tampered(0, 3, other)
    result = run(
        *("-m", checkpoint, "--num-prompts", "1", "-n", "4", "--dtype", "bfloat16"),
        *("--tie-tolerance", "1e6", "--ignore-eos"),
    )
    assert result.code == 0
    assert "tie: eagle K=3 batch 8, prompt 1, token 4: " in result.out
    assert " is a tie" in result.out
    assert result.out.endswith("yes (4 tokens; ties: 1; differences: 0)\n")


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

    plain = oracle.decode
    monkeypatch.setattr(oracle, "decode", decode)
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


def test_prompts_of_the_folder_and_pieces_of_them(run: Run) -> None:
    result = run("-m", str(TINY), "--num-prompts", "10", "-n", "3", "--k", "3", "--json")
    assert result.code == 0
    (variant,) = json.loads(result.out)["results"]
    assert variant["num_prompts"] == 10


def test_batches_padded_as_graphs_would_be(run: Run, checkpoint: str) -> None:
    arguments = ("-m", checkpoint, "--batch-size", "3", "--num-prompts", "3", "-n", "6", "--json")
    result = run(*arguments, "--graphs", "--ignore-eos")
    assert result.code == 0
    expected = json.loads(result.out)
    assert expected["config"]["cuda_graph_config"]["enable_padding"] is True
    result = run(*arguments, "--graphs", "--device", "cpu")
    assert result.code == 2
    assert "expected null with device: cpu" in result.err


def test_a_config_without_mtp_is_compared_as_it_is(
    run: Run, checkpoint: str, tmp_path: Path
) -> None:
    file = tmp_path / "plain.yaml"
    file.write_text(yaml.safe_dump({"model": checkpoint, "speculative_config": None}))
    result = run("-c", str(file), "--num-prompts", "2", "-n", "4", "--json")
    assert result.code == 0
    (variant,) = json.loads(result.out)["results"]
    assert (variant["worker"], variant["max_draft_len"]) == ("none", 0)


RELAXED = {
    "decoding_type": "MTP",
    "use_relaxed_acceptance_for_thinking": True,
    "relaxed_topk": 2,
    "begin_thinking_phase_token": 3,
    "end_thinking_phase_token": 4,
}
SYNTHETIC = {
    "decoding_type": "MTP",
    "mtp": {"verification": "synthetic", "synthetic_acceptance": 0.5},
}


@pytest.mark.parametrize("speculative", [RELAXED, SYNTHETIC], ids=["relaxed", "synthetic"])
def test_a_text_that_may_differ_by_design_is_refused(
    run: Run, checkpoint: str, tmp_path: Path, speculative: dict[str, Any]
) -> None:
    file = tmp_path / "different.yaml"
    file.write_text(yaml.safe_dump({"model": checkpoint, "speculative_config": speculative}))
    result = run("-c", str(file))
    assert result.code == 2
    assert "changes the text by design" in result.err


@pytest.mark.parametrize(
    "option", ["relaxed_acceptance=false", "relaxed_topk=1", "speculate=false"]
)
def test_a_request_that_is_strict_under_such_a_config_is_compared(
    run: Run, checkpoint: str, tmp_path: Path, option: str
) -> None:
    file = tmp_path / "relaxed.yaml"
    relaxed = {**RELAXED, "max_draft_len": 2, "relaxed_topk": 8, "relaxed_delta": 0.9}
    file.write_text(yaml.safe_dump({"model": checkpoint, "speculative_config": relaxed}))
    result = run("-c", str(file), "--num-prompts", "2", "-n", "6", "--option", option, "--json")
    assert result.code == 0, result.err
    (variant,) = json.loads(result.out)["results"]
    assert variant["num_tokens"] == 12
    assert variant["without_executor"]["differences"] == []


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_sampled_texts_of_their_own_are_refused(verification: str) -> None:
    mtp = {"verification": verification, "draft_sampling": "plain"}
    config = LLMConfig(
        model="nowhere", speculative_config=MTPDecodingConfig.model_validate({"mtp": mtp})
    )
    with pytest.raises(ConfigError, match=f"{verification} verification samples other outputs"):
        parity.run_parity(
            [(parity.Variant("eagle", 1, 8), config)],
            [],
            SamplingParams(temperature=0.7),
            num_prompts=1,
            seed=0,
            tie_ulps=4,
            on_progress=print,
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected either --config or --model"),
        (("-m", "x", "-c", "y"), "expected either --config or --model"),
        (("-m", "CHECKPOINT", "--worker", "medusa"), "expected eagle or vanilla"),
        (("-m", "CHECKPOINT", "--k", "1,x"), "expected whole numbers above 0"),
        (("-m", "CHECKPOINT", "--batch-size", "0"), "expected whole numbers above 0"),
        (("-m", "CHECKPOINT", "--tie-tolerance", "-1"), "expected at least 0 ulps, got -1"),
        (("-m", "CHECKPOINT", "--tie-tolerance", "nan"), "expected at least 0 ulps, got nan"),
        (("-m", "CHECKPOINT", "--k", "4", "--worker", "vanilla"), "more than the checkpoint's 3"),
        (("-m", "CHECKPOINT", "--dtype", "float8"), "dtype: should be 'auto', "),
        (("-m", "nowhere"), "nowhere"),
        (("-m", "CHECKPOINT", "--temperature", "-1"), "temperature must be a number >= 0"),
    ],
)
def test_wrong_options_are_named(
    run: Run, checkpoint: str, arguments: tuple[str, ...], message: str
) -> None:
    result = run(*(checkpoint if a == "CHECKPOINT" else a for a in arguments))
    assert result.code == 2
    assert message in " ".join(result.err.replace("\u2502", " ").split())
    assert "loading weights" not in result.err


EARLY_ERRORS = [
    ("--worker medusa", "expected eagle or vanilla, with commas between, got 'medusa'"),
    ("--k 1,x", "expected whole numbers above 0 with commas between, got '1,x'"),
    ("--k 17", "--k: expected at most 16 drafts, got 17"),
    ("--batch-size 0", "expected whole numbers above 0 with commas between, got '0'"),
    ("--tie-tolerance nan", "expected at least 0 ulps, got nan"),
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
