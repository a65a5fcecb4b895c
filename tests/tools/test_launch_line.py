"""``mtp-plugin doctor -- LINE``: verdicts on commands that start vLLM or SGLang."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path

import pytest

from mtp_plugin.errors import LONGEST_LINE
from mtp_plugin.tools import launch_line
from mtp_plugin.tools.launch_line import MAX_WORDS, main
from tests.checkpoint.forms import LAYERS, TINY, all_of, declare, drop, write
from tests.hostile import HOSTILE_TEXT

with (Path(__file__).parent / "launch_lines.tsv").open() as file:
    rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    LINES = [tuple(row) for row in rows if not row[0].startswith("#")]
MTP = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'"""
PLUGIN = """--additional-config '{"mtp_plugin": {}}'"""
EAGLE = "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1"


@pytest.fixture(autouse=True)
def engines_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_PLUGINS", "SGLANG_PLUGINS", "MTP_PLUGIN_SGLANG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch_line, "find_spec", lambda _: None)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    code = main(words)
    output, error = capsys.readouterr()
    assert (code == 2) == bool(error)
    lines = [*output.splitlines(), *error.splitlines()]
    assert all(line.isprintable() and len(line) < LONGEST_LINE + 20 for line in lines)
    starts = ["next: " if code < 2 else "error: "]
    assert [line[: len(starts[0])] for line in lines if line.startswith(starts[0])] == starts
    return code, lines


def check_verdict(
    capsys: pytest.CaptureFixture[str], verdict: str, words: str, *line: str
) -> tuple[int, list[str]]:
    code, lines = run(capsys, *line)
    assert code == {"starts": 0, "refused": 1}[verdict], lines
    for word in words.split("; "):
        assert word in "\n".join(lines)
    return code, lines


@pytest.mark.parametrize(
    ("verdict", "words", "line"), LINES, ids=[str(n + 1) for n in range(len(LINES))]
)
def test_verdict_on_a_line(
    capsys: pytest.CaptureFixture[str], verdict: str, words: str, line: str
) -> None:
    found = check_verdict(capsys, verdict, words, *shlex.split(line))
    assert run(capsys, line) == found  # the whole command in quotes


@pytest.mark.parametrize("line", [row[2] for row in LINES])
def test_the_next_line_starts(capsys: pytest.CaptureFixture[str], line: str) -> None:
    _, lines = run(capsys, line)
    following = lines[-1].removeprefix("next: ")
    if not following.endswith("# with this corrected"):
        code, lines = run(capsys, following)
        assert code == 0
        assert lines[-1] == f"next: {following}"
        assert not any(line.startswith("missing: ") for line in lines)


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (f"vllm serve MODEL {MTP} {PLUGIN}", 0, "3 declared, 3 found"),
        (f"sglang serve MODEL {EAGLE}", 1, """model-override-args '{"num_nextn_predict_layers"""),
    ],
)
def test_a_folder_is_checked_too(
    capsys: pytest.CaptureFixture[str], line: str, code: int, words: str
) -> None:
    found, lines = run(capsys, line.replace("MODEL", str(TINY)))
    assert found == code
    assert any(words in line for line in lines)


@pytest.mark.parametrize(
    ("line", "code", "word"),
    [
        (f"vllm serve MODEL {MTP}", 1, "mtp, K = 3: the checkpoint has no MTP layers"),
        (f"sglang serve MODEL {EAGLE}", 1, "EAGLE, K = 3: the checkpoint has no MTP layers"),
        ("vllm serve MODEL", 0, "drafts         none"),
        ("sglang serve MODEL", 0, "drafts         none"),
        (f"vllm serve MODEL {PLUGIN} --spec-method ngram --spec-tokens 4", 0, "ngram, K = 4"),
    ],
)
def test_a_folder_without_mtp_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, code: int, word: str
) -> None:
    write(tmp_path, all_of(declare(num_nextn_predict_layers=0), drop(*LAYERS)))
    found, lines = run(capsys, line.replace("MODEL", str(tmp_path)))
    assert found == code
    assert word in "\n".join(lines)


def test_a_variable_of_the_shell_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No command that leaves it out would help."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    code, lines = run(capsys, f"vllm serve X/Y {MTP}")
    assert code == 1
    assert lines[-1].endswith("# with this corrected")


DEEP = "[" * 100_000
BOMBS = {
    "deep JSON": ["--speculative-config", DEEP],
    "closed deep JSON": ["--speculative-config", '{"a": ' * 900 + "1" + "}" * 900],
    "2 MB of JSON": ["--speculative-config", json.dumps({"method": "x" * 2**21})],
    "many keys": ["--speculative-config", json.dumps({f"k{n}": n for n in range(50_000)})],
    "many flags": [f"--flag-{n}" for n in range(MAX_WORDS - 10)],
    "too many flags": ["--flag"] * (MAX_WORDS + 1),
    "many dots": [f"--speculative-config{'.a' * 5000}", "1"],
    "a long number": ["--speculative-config.num_speculative_tokens", "9" * 5000],
    "many drafts": ["--spec-method", "mtp", "--spec-tokens", "999999999999"],
    "drafts of another type": ["--speculative-config", '{"method": [1], "model": {"a": 1}}'],
    "a list": ["--speculative-config", "[1]"],
    "text": ["--additional-config", "mtp_plugin"],
    "no value": ["--additional-config"],
    "not a number": ["-dp", "NaN", "--max-num-seqs", "x", "--speculative-config.tail", "1"],
    "unquoted JSON": ["--speculative-config", "{method:mtp,num_speculative_tokens:3}"],
}


@pytest.mark.parametrize("words", BOMBS.values(), ids=BOMBS)
@pytest.mark.parametrize("front", [("vllm", "serve", "X/Y"), ("sglang", "serve", "X/Y")])
def test_hostile_values_have_a_verdict(
    capsys: pytest.CaptureFixture[str], front: tuple[str, ...], words: list[str]
) -> None:
    run(capsys, *front, *words)
    run(capsys, *front, *words, "--additional-config", '{"mtp_plugin": {"draft_len": "auto"}}')


@pytest.mark.parametrize(
    "text", [HOSTILE_TEXT[name] for name in HOSTILE_TEXT if "lone" not in name]
)
def test_text_of_a_line_forges_no_line(capsys: pytest.CaptureFixture[str], text: str) -> None:
    for words in (
        (text,),
        ("vllm", "serve", text, "--spec-method", text, "--spec-tokens", text),
        ("vllm", "serve", "--speculative-config", json.dumps({"method": text, text: text})),
        ("vllm", "serve", text, text, f"--{text}", text, "-tp", text, f"--{text}.{text}", text),
        ("sglang", "serve", text, "--device", text, "--speculative-algorithm", text),
        (f"A={text}", f"VLLM_PLUGINS={text}", "vllm", "serve", "--model", text, "--runner", text),
        (f"MTP_PLUGIN_SGLANG={text}", "sglang", "serve", text, "--dp-size", text),
    ):
        _, lines = run(capsys, *words)
        assert "\nnext: rm" not in "\n".join(lines)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("vllm serve 'X", "expected a shell command: No closing quotation"),
        ("", "expected a command with vllm serve"),
        ("python train.py", "got 'python train.py'"),
        ("vllm serve X --speculative-config {method:mtp}", "expected JSON in single quotes"),
    ],
)
def test_what_is_no_line(capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    code, lines = run(capsys, line)
    assert code == 2
    assert message in lines[-1]
