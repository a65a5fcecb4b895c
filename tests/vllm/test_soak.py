"""The soak test of ``integration/vllm`` itself."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from integration.vllm.engine_process import ROOT, EngineProcess, engine_settings, prepare
from integration.vllm.load import run_batch
from integration.vllm.reference import run_reference

pytest.importorskip("vllm")


def test_short_soak_passes(tmp_path):
    file = tmp_path / "result.json"
    command = [sys.executable, "-m", "integration.vllm.soak", "--seconds", "15"]
    subprocess.run(
        [*command, "--longest", "24", "--json", str(file)], cwd=ROOT, check=True, timeout=400
    )
    found = json.loads(file.read_text())
    assert found["problems"] == []
    assert found["methods"] == ["coupled", "rejection", "block"]
    assert found["comparison"]["compared"] == found["traffic"]["compared"] > 5
    assert found["comparison"]["equal"] > 5


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    prepare(folder, on_gpu=False)
    engine = EngineProcess(
        "reference", engine_settings(0, False, {}, max_num_seqs=4), folder, in_process=True
    )
    engine.wait_until_ready()
    yield engine
    engine.close()


PROMPT = [5, 300, 7, 80, 41]
GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


@pytest.mark.parametrize("options", [GREEDY, {**GREEDY, "temperature": 0.8, "seed": 3}])
def test_only_differences_within_the_margin_are_ties(reference, tmp_path, options):
    requests = [{"prompt": PROMPT, "params": options}]
    tokens = reference.call(run_batch, 200, requests=requests)["tokens"][0]
    wrong = [*tokens[:3], (tokens[3] + 1) % 2048]

    def counts_of(got, margin):
        line = {
            "number": 0,
            "prompt": PROMPT,
            "params": options,
            "is_aborted": True,
            "num_drafts": 3,
            "result": {"tokens": got},
        }
        file = tmp_path / "finished.jsonl"
        file.write_text(f'{json.dumps(line)}\n{{"end": true}}\n')
        arguments = {"finished_file": str(file), "margin": margin, "logprob_tolerance": 0.01}
        found = reference.call(run_reference, 200, **arguments)
        counts = found["counts"]
        assert len(found["problems"]) == counts["failures"]
        return counts["equal"], counts["ties"], counts["failures"]

    assert counts_of(tokens[:4], 0.001) == (1, 0, 0)
    assert counts_of(wrong, 0.001) == (0, 0, 1)
    assert counts_of(wrong, 100.0) == (0, 1, 0)
