"""``mtp-plugin doctor -- vllm serve ...`` with vLLM's own parser."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.vllm.engine_process import CHECKPOINT
from tests.tools.test_launch_line import LINES, check_verdict, run
from tests.vllm.test_wrong_configs import MTP, WRONG

VLLM = [row for row in LINES if "sglang" not in row[2]]


@pytest.mark.parametrize(("verdict", "words", "line"), VLLM)
def test_verdict_by_the_own_parser(
    capsys: pytest.CaptureFixture[str], verdict: str, words: str, line: str
) -> None:
    check_verdict(capsys, verdict, words, line)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--num-speculative-tokens 3", "unrecognized arguments: --num-speculative-tokens 3"),
        ("--max-num-seqs many", "argument --max-num-seqs: "),
        ("--help", "it only prints help"),
    ],
)
def test_what_the_own_parser_refuses(
    capsys: pytest.CaptureFixture[str], flag: str, message: str
) -> None:
    code, lines = run(capsys, f"vllm serve X/Y {flag}")
    assert code == 1
    assert any(line.startswith("problem: vLLM does not read the line: ") for line in lines)
    assert message in "\n".join(lines)


@pytest.mark.parametrize(("options", "speculative", "engine", "message"), WRONG[:-1])
def test_the_word_is_that_of_the_start(
    capsys: pytest.CaptureFixture[str],
    options: Any,
    speculative: dict[str, Any],
    engine: dict[str, Any],
    message: str,
) -> None:
    """The last ones are refused by vLLM itself."""
    words = ["vllm", "serve", str(CHECKPOINT), "--additional-config"]
    words += [json.dumps({"mtp_plugin": options}), "--speculative-config"]
    words.append(json.dumps({**MTP, **speculative}))
    for name, value in engine.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    code, lines = run(capsys, shlex.join(words))
    problems = "; ".join(line.removeprefix("problem: ") for line in lines if "problem: " in line)
    expected = message.removeprefix("additional_config.mtp_plugin is on, but ").split(". Change")
    assert code == 1
    assert expected[0] in problems
