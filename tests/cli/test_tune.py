"""``mtp-plugin tune``: options, the table, and what to paste; the engines are stubs."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from integration.random_models import write_random_checkpoint
from mtp_plugin import extras
from mtp_plugin.config import LLMConfig, MTPDecodingConfig
from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.tools.tune import embedded
from mtp_plugin.tools.tune import run as tuning
from mtp_plugin.tools.tune.answer import METHODS, Answer, Setting
from mtp_plugin.tools.tune.engine import EngineFailedError
from tests.cli.calls import EAGLE, RELAXED, Run


class StubEngine:
    """K drafts take K ms longer; K = 2 does not start."""

    arguments: list[str]
    slower: float = 8 / 7
    """Steps of vLLM without the plugin; 0: it does not start."""
    busy = 1.0
    """Steps of K = 0."""
    rate = 0.7

    def __init__(
        self, setting: Setting, arguments: list[str], log: Path, cache: str | None
    ) -> None:
        self.k = setting.num_drafts
        self.time = (1.0 if self.k else self.busy) if setting.has_plugin else self.slower
        assert cache is None
        log.touch()
        type(self).arguments = arguments

    def result(self, on_wait: Any) -> dict[str, Any]:
        on_wait()
        if self.k == 2 or not self.time:
            raise EngineFailedError("ValueError: too large")
        return {"vllm": "0.32.0", "device": "cpu", "dtype": "float32"}

    def encode(self, given: list[Any]) -> list[list[int]]:
        return [[1, 2] for _ in given]

    def run(self, given: list[Any]) -> dict[str, Any]:
        # drafts of a batch of 64 take too long
        step_ms = [self.time * (4.0 + self.k * (10 if len(given) == 64 else 1))]
        return {
            "tokens": [[1] for _ in given],
            "step_ms": step_ms,
            "acceptance": [self.rate] * self.k,
        }

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


def test_vllm_alone_that_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StubEngine, "slower", 0)
    result = run("tune", "--model", "M", "--k", "1", "--batch-sizes", "1")
    assert result.code == 1
    assert result.out.splitlines()[-2] == (
        "what the plugin gains is not known, since vLLM alone failed: the gains above are over "
        "K = 0 with the plugin"
    )


def test_gain_that_acceptance_does_not_explain(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StubEngine, "busy", 2.47 * 5 / 4)
    monkeypatch.setattr(StubEngine, "rate", 0.0)
    given = ("--model", "M", "--k", "1", "--batch-sizes", "1", "--drafter", "ngram")
    lines = run("tune", *given).out.splitlines()
    assert lines[4].endswith("K = 1, coupled, ngram *")
    assert lines[-4:-1] == [
        "* K = 1, coupled, ngram: not recommended, 2.47 times as fast as K = 0 at batch 1, more "
        "than its 1.00 tokens per step explain: was the machine busy? measure again on an idle one",
        "engines ran one after the other, so that another load of the machine counts as a "
        "difference; --at-once N measures N of them in turns, if they fit on the device",
        "answer: leave drafts off, no setting without * is clearly faster than K = 0",
    ]


def test_default_draft_lengths(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    start = StubEngine.__init__

    def init(self: StubEngine, setting: Setting, *others: Any) -> None:
        lengths.append(setting.num_drafts)
        start(self, setting, *others)

    monkeypatch.setattr(StubEngine, "__init__", init)
    result = run("tune", "--model", "M", "--batch-sizes", "64")
    assert lengths == [0, 1, 2, 3]  # K = 2 does not start, K = 3 is slower than K = 1
    assert (
        "K = 5, coupled: not measured, K = 3 is slower than fewer drafts at every batch size; --k "
        "measures it"
    ) in result.out.splitlines()
    lengths.clear()
    run("tune", "--model", "M", "--batch-sizes", "1")
    assert lengths == [0, 1, 2, 3, 5, 7, 7]  # at last without the plugin


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
        (("--host", "sglang"), "expected vllm or embedded, got 'sglang'"),
        (("--config", "c.yaml"), "--config is not for --host vllm"),
        (("--no-graphs",), "--graphs is not for --host vllm"),
        (("-p", "a", "-p", ""), "prompt 2 of 2: the prompt is empty"),
        (("--k", "1", "--k-max", "2"), "--k and --k-max exclude each other"),
        (("--k", "-1"), "expected whole numbers above -1"),
        (("--methods", "greedy"), "expected coupled or rejection or block"),
        (("--batch-sizes", ""), "expected at least one batch size"),
        (("--prompts", "none.jsonl"), "none.jsonl: no such file"),
        (("--prompts", "none.csv"), "none.csv: expected a file .jsonl"),
        (("--prompts", "none.txt"), "prompt file none.txt: no such file"),
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
    assert "vllm is not installed; run it in the environment of vLLM, or with --host" in result.err


# --- the embedded executor ---

SHORT = ("-p", "ab", "-p", "c", "-n", "8", "--batch-sizes", "2", "--steps", "1")
BY_METHOD = ("--temperature", "0.8", "--methods", "coupled,rejection,block")


@pytest.fixture
def embedded_run(run: Run) -> Run:
    """Calls ``mtp-plugin tune --host embedded``."""
    return lambda *arguments: run("tune", "--host", "embedded", *arguments)


def test_bench_is_the_old_name(run: Run, config: Callable[..., str]) -> None:
    file = config(EAGLE)
    given = ("-c", file, "--prompt", "ab", "-n", "8", "--batch-size", "1,3", "--json")
    given = (*given, "--steps", "1")
    result = run("bench", *given)
    assert result.code == 0, result.err
    command = ["mtp-plugin", "tune", "--host", "embedded", "--batch-sizes", "1,8", "-n", "64"]
    assert result.err.startswith(f"bench is now: {shlex.join([*command, *given])}\n")
    document = json.loads(result.out)
    assert (document["dtype"], document["max_new_tokens"]) == ("float32", 8)
    off, drafts = document["settings"]
    assert [entry["setting"]["num_drafts"] for entry in (off, drafts)] == [0, 3]
    assert (drafts["num_outputs"], drafts["num_equal"], drafts["ties"]) == (1, 1, [])
    with LLM(file) as llm:
        (output,) = llm.generate(["ab"], SamplingParams(max_new_tokens=8))
    assert drafts["acceptance"] == output.acceptance.per_position
    length = output.acceptance.acceptance_length
    assert drafts["acceptance_length"] == pytest.approx(length)
    assert length > 1
    for entry in (off, drafts):
        for size, speed in entry["tokens_per_second"].items():
            step = entry["step_ms"][size]
            assert speed == pytest.approx(1000 * int(size) * entry["acceptance_length"] / step)
    chosen = document["answer"]["options"]["speculative_config"]
    assert chosen is None or chosen["max_draft_len"] == 3


def test_table_methods_and_config_to_paste(
    embedded_run: Run, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "MIN_SAMPLED", 2)
    file = config({**EAGLE, "mtp": {"verification": "rejection"}})
    result = embedded_run(
        "-c", file, *SHORT, *BY_METHOD, "--k", "1", "--draft-vocab", "9", "--at-once", "3"
    )
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0] == "embedded executor, float32 on cpu"
    assert lines[1].startswith("2 prompts of the command line, temperature 0.8, at most 8 tokens")
    rows = lines[3:7]
    names = [f"K = 1, {name}, draft vocabulary 9" for name in ("coupled", "rejection", "block")]
    assert ["K" + row.partition("  K")[2] for row in rows] == ["K = 0", *names]
    assert f"{names[0]}: outputs identical to K = 0: 2 of 2" in lines
    assert f"{names[2]}: greedy outputs identical to K = 0: 2 of 2" in lines
    at = next(n for n, line in enumerate(lines) if line.startswith("speculative_config:"))
    LLMConfig.model_validate({"model": "M", **yaml.safe_load("\n".join(lines[at:]))})


def test_no_numbers_without_identical_outputs(
    embedded_run: Run, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verification accepts another token than the target's; its logits are right."""
    honest = embedded.run_requests

    def run_requests(llm: LLM, requests: Any, on_step: Any) -> Any:
        ran = honest(llm, requests, on_step)
        if llm.pieces.plan.max_draft_len == 3 and len(ran.results[0].token_ids) == 8:
            tokens = list(ran.results[0].token_ids)
            tokens[5] ^= 1
            ran.results[0] = dataclasses.replace(ran.results[0], token_ids=tokens)
        return ran

    monkeypatch.setattr(embedded, "run_requests", run_requests)
    result = embedded_run("-c", config(EAGLE), *SHORT, "--k", "1,3", "--dtype", "bfloat16")
    assert result.code == 1
    assert (
        "no numbers for K = 3, coupled: 1 of 2 outputs differ from K = 0 and are no ties; the "
        "first is request 1, token 6"
    ) in result.out
    assert "K = 1, coupled: outputs identical to K = 0: 2 of 2" in result.out
    assert "logs of the engines" not in result.err


def test_interrupt_of_the_embedded_executor(
    embedded_run: Run,
    config: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def run_requests(*_: Any) -> Any:
        raise KeyboardInterrupt

    file, folder = config(EAGLE), tmp_path / "logs"
    folder.mkdir()
    monkeypatch.setattr(embedded, "run_requests", run_requests)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    result = embedded_run("-c", file, *SHORT)
    assert (result.code, result.out) == (130, "")
    assert result.err.endswith("interrupted\n")
    assert not [*folder.iterdir()]


def test_config_to_paste_of_the_embedded_executor(checkpoint: Path) -> None:
    mtp = {"seed": 7, "verification": "rejection", "draft_sampling": "plain"}
    settings = LLMConfig(model=str(checkpoint), speculative_config={**EAGLE, "mtp": mtp})
    host = embedded.EmbeddedHost(settings, (), 64, is_greedy=True)
    assert host.num_drafts == (0, 3)
    schedules = {
        (3, 1, 0): {2: 3, 22: 1},
        (3, 3, 1): {22: 3, 64: 1},
        (1, 3, 3): None,
    }
    for lengths, schedule in schedules.items():
        by_size = {n: Setting(k) for n, k in zip((1, 8, 64), lengths, strict=True)}
        keys = host.options(Answer(by_size, {}))["speculative_config"]
        assert keys.get("draft_len_schedule") == schedule
        assert (keys["max_draft_len"], keys["mtp"]) == (3, mtp)
        LLMConfig.model_validate({"model": "M", "max_num_tokens": 256, "speculative_config": keys})
    assert host.options(Answer({1: Setting(0)}, {})) == {"speculative_config": None}
    host = embedded.EmbeddedHost(settings, (0, 2), 64, is_greedy=False)
    for method in METHODS:
        keys = host.options(Answer({1: Setting(2, method)}, {}))["speculative_config"]
        assert MTPDecodingConfig.model_validate(keys).mtp.verifications == (method,)


@pytest.mark.parametrize(
    ("speculative", "arguments", "message"),
    [
        (EAGLE, ("--batch-sizes", "1,x"), "expected whole numbers above 0"),
        (EAGLE, ("--k", "99"), "max_draft_len: should be less than or equal to 16, got 99"),
        (EAGLE, ("--dtype", "int8"), "dtype: should be 'auto', "),
        (EAGLE, ("--drafter", "ngram"), "--drafter is not for --host embedded"),
        (EAGLE, ("--", "--model-impl", "x"), "-- ARGS is not for --host embedded"),
        (RELAXED, (), "tune: relaxed acceptance changes the text by design"),
        (None, (), "tune: expected MTP layers to draft with, got none"),
    ],
)
def test_wrong_options_of_the_embedded_executor_are_named(
    embedded_run: Run,
    config: Callable[..., str],
    speculative: Any,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    result = embedded_run("-c", config(speculative), "-p", "ab", *arguments)
    assert result.code == 2
    assert message in " ".join(result.err.replace("│", " ").split())


def test_checkpoint_without_mtp_layers_is_refused(run: Run, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "glm4_moe", num_mtp_layers=0)
    result = run("bench", "-m", str(tmp_path), "--k", "1")
    assert result.code == 2
    assert "error: tune: expected MTP layers to draft with, got none" in result.err
