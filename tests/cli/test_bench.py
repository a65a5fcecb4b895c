"""``mtp-plugin bench``, from arguments to exit code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.random_models import write_random_checkpoint
from mtp_plugin.tools import bench
from mtp_plugin.tools.parity import TieRule
from tests.cli.calls import EAGLE, RELAXED, VANILLA, Run

SHORT = ("-p", "ab", "-n", "8", "--batch-size", "1,3")
NUMBERS = {
    "output_tokens",
    "tokens_per_second_without_mtp",
    "tokens_per_second_with_mtp",
    "speed_up",
    "acceptance_length",
    "acceptance_rate_per_position",
}


@pytest.fixture
def change_output(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool, int], None]:
    """Changes a token of the second of three requests, with MTP or without."""

    def change(of_mtp: bool, position: int) -> None:
        original = bench.run_batch

        def run_batch(llm: Any, prompts: Any, params: Any) -> Any:
            run = original(llm, prompts, params)
            if len(prompts) == 3 and bool(llm.pieces.plan.max_draft_len) is of_mtp:
                output = run.results[1]
                tokens = list(output.token_ids)
                tokens[position] ^= 1
                run.results[1] = dataclasses.replace(output, token_ids=tokens)
            return run

        monkeypatch.setattr(bench, "run_batch", run_batch)

    return change


@pytest.mark.parametrize("speculative", [EAGLE, VANILLA], ids=["eagle", "vanilla"])
def test_json_has_speed_and_acceptance_of_each_batch_size(
    run: Run, config: Callable[..., str], speculative: dict[str, Any]
) -> None:
    result = run("bench", "-c", config(speculative), *SHORT, "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert (document["max_draft_len"], document["dtype"]) == (3, "float32")
    assert [entry["batch_size"] for entry in document["results"]] == [1, 3]
    for entry in document["results"]:
        assert (entry["identical"], entry["ties"], entry["differences"]) == (True, 0, [])
        assert entry.keys() > NUMBERS
        assert entry["output_tokens"] == 8 * entry["batch_size"]
        ratio = entry["tokens_per_second_with_mtp"] / entry["tokens_per_second_without_mtp"]
        assert entry["speed_up"] == pytest.approx(ratio)
        rates = entry["acceptance_rate_per_position"]
        assert len(rates) == 3
        assert entry["acceptance_length"] == pytest.approx(1 + sum(rates))
        assert entry["acceptance_length"] > 1.2


def test_table_has_a_row_for_each_batch_size_and_the_verdict(
    run: Run, config: Callable[..., str]
) -> None:
    result = run("bench", "-c", config(EAGLE), *SHORT, "--k", "2")
    assert result.code == 0, result.err
    assert "float32 on cpu, K = 2, greedy" in result.out
    rows = [line.split() for line in result.out.splitlines() if line.strip()[:2] in ("1 ", "3 ")]
    assert [len(row) for row in rows] == [7, 7]
    assert result.out.endswith("identical to decoding without MTP: yes (96 tokens; ties: 0)\n")


@pytest.mark.parametrize("of_mtp", [True, False])
def test_no_number_without_identical_output(
    run: Run, config: Callable[..., str], change_output: Callable[..., None], of_mtp: bool
) -> None:
    change_output(of_mtp, 5)
    file = config(EAGLE)
    result = run("bench", "-c", file, *SHORT, "--json")
    assert result.code == 1
    same, different = json.loads(result.out)["results"]
    assert same["identical"]
    assert same.keys() > NUMBERS
    assert not different["identical"]
    assert not different.keys() & NUMBERS
    (line,) = different["differences"]
    assert line.startswith("request 2, token 6: ")
    result = run("bench", "-c", file, *SHORT)
    assert result.code == 1
    rows = [line.split() for line in result.out.splitlines() if line.strip().startswith("3 ")]
    assert rows == [["3", "differs"]]
    assert "difference: batch 3, request 2, token 6: " in result.out
    assert "identical to decoding without MTP: NO" in result.out


@pytest.mark.parametrize(("ulps", "code"), [(1e9, 0), (0.0, 1)])
def test_half_precision_ties_are_counted(
    run: Run,
    config: Callable[..., str],
    change_output: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    ulps: float,
    code: int,
) -> None:
    change_output(True, 7)
    monkeypatch.setattr(bench, "TieRule", lambda dtype: TieRule(dtype, ulps))
    result = run("bench", "-c", config(EAGLE), *SHORT, "--dtype", "bfloat16", "--json")
    assert result.code == code
    found = json.loads(result.out)["results"][1]
    assert found["identical"] is (code == 0)
    assert (found["ties"] > 0) is (code == 0)


def test_checkpoint_without_mtp_layers_is_refused(run: Run, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "glm4_moe", num_mtp_layers=0)
    result = run("bench", "-m", str(tmp_path))
    assert result.code == 2
    assert "error: bench: expected MTP layers to draft with, got none" in result.err


def test_config_whose_output_differs_by_design_is_refused(
    run: Run, config: Callable[..., str]
) -> None:
    result = run("bench", "-c", config(RELAXED), *SHORT)
    assert result.code == 2
    assert "bench: relaxed acceptance changes the text by design" in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch-size", "1,x"), "expected whole numbers above 0"),
        (("--batch-size", ""), "expected at least one size"),
        (("--k", "0"), "greater than or equal to 1"),
        (("--k", "99"), "--k: expected at most"),
        (("--dtype", "int8"), "dtype"),
    ],
)
def test_invalid_options_are_named(
    run: Run, config: Callable[..., str], options: tuple[str, ...], message: str
) -> None:
    result = run("bench", "-c", config(EAGLE), "-p", "ab", *options)
    assert result.code == 2
    assert message in result.err


@pytest.mark.parametrize("command", ["generate", "bench", "parity"])
def test_every_command_has_one_json_form(
    run: Run, config: Callable[..., str], command: str
) -> None:
    result = run(command, "-c", config(EAGLE), "-p", "def f(", "-n", "8", "--json")
    document = json.loads(result.out)
    assert list(document)[:2] == ["kind", "versions"]
    assert list(document)[-2:] == ["identical", "results"]
    assert (document["kind"], document["identical"]) == (command, True)
    assert all(isinstance(each, dict) for each in document["results"])
