"""``mtp-plugin doctor -- LINE``: verdicts on commands that start vLLM or SGLang."""

from __future__ import annotations

import csv
import shlex
from pathlib import Path

import pytest

from mtp_plugin.tools.launch_line import main

with (Path(__file__).parent / "launch_lines.tsv").open() as file:
    rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    LINES = [tuple(row) for row in rows if not row[0].startswith("#")]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_PLUGINS", "SGLANG_PLUGINS", "MTP_PLUGIN_SGLANG"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("verdict", "words", "line"), LINES, ids=range(1, len(LINES) + 1))
def test_verdict_on_a_line(
    capsys: pytest.CaptureFixture[str], verdict: str, words: str, line: str
) -> None:
    code = main(shlex.split(line))
    output = capsys.readouterr().out
    assert code == (verdict == "refused"), output
    for word in words.split("; "):
        assert word in output
    assert output.splitlines()[-1].startswith("next: ")
