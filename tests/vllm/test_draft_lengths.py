"""Tokens per second by draft length: the command itself, in small."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from integration.vllm.draft_lengths import LENGTHS
from integration.vllm.engine_process import ROOT

pytest.importorskip("vllm")


def test_one_engine_measures_every_draft_length(tmp_path):
    file = tmp_path / "result.json"
    command = [sys.executable, "-m", "integration.vllm.draft_lengths", "--json", str(file)]
    small = ["--prompts", "short", "--batches", "2", "--osl", "16", "--turns", "1"]
    ran = subprocess.run(
        [*command, *small, "--routing", "third"], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout
    found = json.loads(file.read_text())
    assert found["matched"]
    assert found["complete"]
    measured = [(cell["engine"], cell["k"]) for cell in found["cells"]]
    assert measured == [*(("drafts", k) for k in LENGTHS), ("off", 0)]
    rows = found["engines"]["drafts"]["routed_rows"]
    assert [[2 * (k + 1), k + 1] for k in LENGTHS if [2 * (k + 1), k + 1] not in rows] == []
    assert [each["equal"] + each["ties"] for each in found["outputs"].values()] == [4] * 4
    assert "third    short       2" in ran.stdout
