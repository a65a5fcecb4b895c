"""``mtp-plugin tune``: options, the table, and what to paste; the engines are stubs."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from mtp_plugin import extras
from mtp_plugin.tools.tune import run as tuning
from mtp_plugin.tools.tune.answer import Setting
from mtp_plugin.tools.tune.engine import EngineFailedError, encode_prompts
from tests.cli.calls import Run


class StubEngine:
    """K drafts take K ms longer; K = 2 does not start."""

    arguments: list[str]
    slower = 8 / 7
    """Steps of vLLM without the plugin."""

    def __init__(
        self, setting: Setting, arguments: list[str], log: Path, cache: str | None
    ) -> None:
        self.k = setting.num_drafts
        self.time = 1 if setting.has_plugin else self.slower
        assert cache is None
        log.touch()
        type(self).arguments = arguments

    def result(self, on_wait: Any) -> dict[str, Any]:
        on_wait()
        if self.k == 2:
            raise EngineFailedError("ValueError: too large")
        return {"vllm": "0.32.0", "device": "cpu", "dtype": "float32", "has_schedule": True}

    def call(self, function: Any, given: list[Any]) -> Any:
        if function is encode_prompts:
            return [[1, 2] for _ in given]
        # drafts of a batch of 64 take too long
        step_ms = [self.time * (4.0 + self.k * (10 if len(given) == 64 else 1))]
        return {"tokens": [[1] for _ in given], "step_ms": step_ms, "acceptance": [0.7] * self.k}

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "EngineProcess", StubEngine)
    monkeypatch.setattr(extras, "version_of", lambda _: "0.32.0")
    module = type(sys)("vllm")
    module.__spec__ = sys.__spec__
    monkeypatch.setitem(sys.modules, "vllm", module)


def test_table_and_options_to_paste(run: Run, tmp_path: Path) -> None:
    given = ("--host", "vllm", "--model", "M", "--k-max", "3", "--logs", str(tmp_path))
    result = run("tune", *given, "--methods", "block", "--", "--model-impl", "vllm")
    assert StubEngine.arguments == ["--model", "M", "--model-impl", "vllm"]
    lines = result.out.splitlines()
    assert lines[:2] == [
        "vLLM 0.32.0, float32 on cpu",
        "8 prompts of general prompts, greedy, at most 128 tokens each",
    ]
    assert lines[2].split()[:4] == ["batch", "step", "ms", "tokens/s"]
    assert lines[5].split()[:5] == ["1", "7.00", "443", "100%", "3.10"]
    assert "no numbers for K = 2, coupled: ValueError: too large" in lines
    assert "K = 3, coupled: outputs identical to K = 0: 8 of 8" in lines
    assert "answer, batch 8: K = 3, coupled, 1.77 times as fast as K = 0" in lines
    assert "answer, batch 64: K = 0, 1.00 times as fast as K = 0" in lines
    assert lines[-2] == (
        "the plugin gains 1.14 with greedy requests (tokens per second over K = 3, vLLM without "
        "the plugin; batch 1: 1.14, batch 8: 1.14)"
    )
    assert lines[-1] == (
        "vllm serve M --model-impl vllm --speculative-config "
        '\'{"method": "mtp", "num_speculative_tokens": 3, '
        '"num_speculative_tokens_per_batch_size": [[1, 22, 3], [23, 64, 0]]}\' '
        "--additional-config '{\"mtp_plugin\": {}}'"
    )
    assert result.code == 1
    assert result.err.startswith("greedy requests: all methods are the same, coupled is measured")
    assert f"logs of the engines: {tmp_path}" in result.err
    assert "K = 3, coupled: step time, batch 64" in result.err


def test_json_document(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    given = ("--model", "M", "--prompts", str(prompts), "--k", "0,1", "--batch-sizes", "64")
    result = run("tune", *given, "--temperature", "0.8", "--json")
    document = json.loads(result.out)
    assert result.code == 0
    assert [entry["setting"]["num_drafts"] for entry in document["settings"]] == [0, 1]
    assert document["sampling"] == {"temperature": 0.8}
    assert list(tmp_path.iterdir()) == [prompts]  # no logs are left
    assert document["answer"]["options"] == {"--additional-config": {"mtp_plugin": {}}}


def test_plugin_that_does_not_gain(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StubEngine, "slower", 1.01)
    given = ("--model", "M", "--k", "1", "--batch-sizes", "1", "--temperature", "0.6")
    lines = run("tune", *given).out.splitlines()
    assert lines[-2] == (
        "the plugin does not gain at T = 0.6: 1.01 (tokens per second over K = 1, vLLM without "
        "the plugin; batch 1: 1.01)"
    )


def test_another_drafter(run: Run) -> None:
    result = run("tune", "--model", "M", "--k", "1", "--drafter", "draft_model,SMALL")
    assert "answer, batch 1: K = 1, coupled, draft_model,SMALL, " in result.out
    assert '{"method": "draft_model", "model": "SMALL", "num_speculative_tokens": 1' in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--drafter", "suffix"), "drafter: expected one of mtp, draft_model, eagle, eagle3, "),
        (("--drafter", "eagle"), "drafter: eagle needs a draft model: eagle,MODEL"),
        (("--drafter", "ngram,M"), "drafter: ngram has no draft model, got 'M': leave it out"),
        (
            ("--drafter", "ngram", "--methods", "block"),
            "--methods: ngram has no draft probabilities, coupled alone can be measured",
        ),
        (
            ("--drafter", "ngram", "--draft-vocab", "8"),
            "--draft-vocab needs the drafter mtp, got ngram: leave it out",
        ),
        (("--host", "sglang"), "expected vllm, got 'sglang'"),
        (("--k", "1", "--k-max", "2"), "--k and --k-max exclude each other"),
        (("--k", "-1"), "expected whole numbers above -1"),
        (("--methods", "greedy"), "expected coupled or rejection or block"),
        (("--batch-sizes", ""), "expected at least one batch size"),
        (("--prompts", "none.jsonl"), "none.jsonl: no such file"),
        (("--prompts", "none.txt"), "none.txt: expected a file .jsonl"),
        (("--", "--speculative_config", "{}"), "tune sets --speculative_config itself"),
        (("--", "--model=X"), "tune sets --model=X itself"),
        (("--", "-sc.method", "mtp"), "tune sets -sc.method itself"),
        (("--draft-vocab", "none,none.json"), "--draft-vocab: none.json: no such file"),
        (("--draft-vocab", "0"), "expected none, a number above 0 or a file of ids, got '0'"),
        (("--temperature", "-1"), "--temperature: expected"),
        (("--top-p", "1.5"), "--top-p: expected"),
        (("--logs", "/dev/null/logs"), "--logs /dev/null/logs: cannot be made: Not a directory"),
    ],
)
def test_wrong_options_are_named(run: Run, arguments: tuple[str, ...], message: str) -> None:
    result = run("tune", "--model", "M", *arguments)
    assert result.code == 2
    assert message in " ".join(result.err.replace("│", " ").split())


def test_tune_needs_vllm(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm")
    result = run("tune", "--model", "M")
    assert result.code == 2
    assert "vllm is not installed" in result.err
