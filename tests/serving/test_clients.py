"""Clients in an environment of their own (`make test-clients`): aiperf and lm-eval."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from mtp_plugin import LLM, SamplingParams
from tests.serving.conftest import TRAINED, Running, running

CLIENTS = os.environ.get("MTP_PLUGIN_TEST_CLIENTS")
"""Folder with the clients' commands."""
pytestmark = pytest.mark.skipif(CLIENTS is None, reason="only in `make test-clients`")

PROMPTS = ["class A:\n    def f(", "def g(a, b):\n"]
AIPERF = (
    "--model tiny --endpoint-type completions --streaming --request-count 8 --concurrency 2 "
    "--synthetic-input-tokens-mean 16 --output-tokens-mean 24 --no-gpu-telemetry --ui none"
)
TASKS = {
    "tiny_generate": {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": 0,
        "doc_to_choice": ["self", "zzz"],
        "metric_list": [{"metric": "acc"}],
    },
}


def run(name: str, *arguments: str) -> str:
    environment = {**os.environ, "no_proxy": "127.0.0.1", "NO_COLOR": "1"}
    environment.pop("PYTHONPATH", None)
    command = [str(Path(CLIENTS or "", name).absolute()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_aiperf_fills_its_table_of_speculative_decoding(llm: LLM, tmp_path: Path) -> None:
    with running(llm, metrics_prefix="vllm:") as server:
        folders = ["--tokenizer", TRAINED, "--artifact-dir", str(tmp_path)]
        shown = run("aiperf", "profile", "--url", server.url, *AIPERF.split(), *folders)
    assert "Spec Decode" in shown
    assert "Accepted drafts per step" in shown
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == 8
    assert report["total_usage_accepted_prediction_tokens"]["avg"] > 0
    metrics = (tmp_path / "server_metrics_export.json").read_text()
    assert "vllm:spec_decode_num_accepted_tokens" in metrics


def test_lm_eval_scores_as_generate_does(server: Running, llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=16, stop="\n\n")
    answers = [output.text for output in llm.generate(PROMPTS, params)]
    rows = [{"prompt": p, "answer": a} for p, a in zip(PROMPTS, answers, strict=True)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        content = {"task": name, "test_split": "test", **source, **task}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(content))
    url = f"{server.url}/v1/completions"
    model = f"model=tiny,base_url={url},tokenizer={TRAINED},num_concurrent=2,max_retries=1"
    options = ["--tasks", ",".join(TASKS), "--include_path", str(tmp_path)]
    output = ["--output_path", str(tmp_path / "out")]
    run("lm_eval", "--model", "local-completions", "--model_args", model, *options, *output)
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    assert results["tiny_generate"]["exact_match,none"] == 1

    def score(prompt: str, answer: str) -> float:
        encode = llm.get_tokenizer().encode
        start, ids = len(encode(prompt)), encode(prompt + answer)
        (scored,) = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
        pairs = zip(ids[start:], scored.prompt_logprobs[start:], strict=True)
        return sum(known[token].logprob for token, known in pairs)

    right = [score(prompt, "self") > score(prompt, "zzz") for prompt in PROMPTS]
    assert results["tiny_choice"]["acc,none"] == sum(right) / len(right)
