"""``mtp-plugin doctor -- vllm serve ...`` with vLLM's own parser."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.tools.test_launch_line import LINES, run

VLLM = [row for row in LINES if "sglang" not in row[2]]


@pytest.mark.parametrize(("verdict", "words", "line"), VLLM)
def test_verdict_by_the_own_parser(
    capsys: pytest.CaptureFixture[str], verdict: str, words: str, line: str
) -> None:
    code, lines = run(capsys, line)
    assert code == (verdict == "refused"), lines
    for word in words.split("; "):
        assert word in "\n".join(lines)


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
