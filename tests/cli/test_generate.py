"""The command line, from arguments to exit code."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from mtp_plugin import cli, infer
from mtp_plugin.config import LLMConfig, MTPDecodingConfig, json_schema, load_config
from mtp_plugin.executor import LLM, PyExecutor, SamplingParams, StepEvent
from mtp_plugin.executor.models import load_model, write_random_checkpoint
from mtp_plugin.infer import greedy_decode
from mtp_plugin.requests.detokenizer import Segment
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats
from mtp_plugin.tools.parity import Drafting, oracle
from mtp_plugin.tools.terminal import prompts
from mtp_plugin.tools.terminal.console import OutputConsole
from mtp_plugin.tools.terminal.decoding import Decoded
from mtp_plugin.tools.terminal.plain_decoding import PlainDecoding
from mtp_plugin.tools.terminal.report import same_as_target_only
from mtp_plugin.tools.terminal.stream_view import StreamView

SPECIALS = ["<eos>", "<think>", "</think>", "<pad>"]
VOCAB = 256 + len(SPECIALS)
EAGLE = {"decoding_type": "MTP", "max_draft_len": 3}
VANILLA = {**EAGLE, "use_mtp_vanilla": True}
RELAXED = {
    **EAGLE,
    "use_relaxed_acceptance_for_thinking": True,
    "relaxed_topk": VOCAB,
    "relaxed_delta": 1.0,
}


SYNTHETIC = {
    **EAGLE,
    "mtp": {"verification": "synthetic", "synthetic_acceptance": [0.9, 0.8, 0.7]},
}


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the special tokens."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=text == "<eos>") for text in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer, in a folder of its own."""
    path = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write_random_checkpoint(
        path,
        "glm4_moe",
        num_mtp_layers=3,
        seed=3,
        echo_draft=True,
        residual_scale=0.4,
        vocab_size=VOCAB,
        eos_token_id=256,
    )
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def config(checkpoint: Path, tmp_path: Path) -> Callable[..., str]:
    """Writes a YAML file; returns its path."""

    def write(speculative: dict[str, Any] | None = None, **options: Any) -> str:
        content = {
            "model": str(checkpoint),
            "max_num_tokens": 128,
            "kv_cache_config": {"tokens_per_block": 8, "max_tokens": 2048},
            "speculative_config": speculative,
            **options,
        }
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(content))
        return str(file)

    return write


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Calls the console script in this process, without colours."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["mtp-plugin", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return Result(code if isinstance(code, int) else int(code is not None), out, err)

    return call


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Puts a file descriptor in the place of standard input."""
    opened = []

    def put(descriptor: int) -> None:
        opened.append(os.fdopen(descriptor, "r"))
        monkeypatch.setattr(sys, "stdin", opened[-1])

    yield put
    for file in opened:
        file.close()


def texts_shown(out: str) -> list[str]:
    """What stands between the titles of each text, marks included."""
    return re.findall(r"── text\n(.*?)\n── \d+ tokens?, ended by", out, re.DOTALL)


def bare(text: str) -> str:
    return text.replace("«", "").replace("»", "")


# --- generate ---


@pytest.mark.parametrize("speculative", [EAGLE, VANILLA], ids=["eagle", "vanilla"])
def test_generate_shows_text_table_and_verdict(
    run: Run, config: Callable[..., str], speculative: dict[str, Any]
) -> None:
    file = config(speculative)
    result = run("generate", "-c", file, "-p", "def f(", "-p", "import", "-n", "20")
    assert result.code == 0
    with LLM(file) as llm:
        outputs = llm.generate(["def f(", "import"], SamplingParams(max_new_tokens=20))
    assert [bare(text) for text in texts_shown(result.out)] == [
        output.text.rstrip("\n") for output in outputs
    ]
    assert "── prompt 1 of 2\ndef f(\n── text" in result.out
    assert "── prompt 2 of 2\nimport\n── text" in result.out
    for row in ("tokens per step (acceptance length)", "accepted up to draft 1..3", "speed-up"):
        assert row in result.out
    assert re.search(r"tokens +40 +40", result.out)
    last = result.out.splitlines()[-1]
    assert last == "identical to decoding without MTP: yes (40 tokens)"
    assert "loading weights" in result.err


def test_marks_stand_around_accepted_drafts(run: Run, config: Callable[..., str]) -> None:
    file = config(EAGLE)
    result = run("generate", "-c", file, "-p", "def f(", "-n", "30", "--no-compare")
    drafted, own, in_draft = "", "", False
    with LLM(file) as llm:
        for events in llm.stream("def f(", SamplingParams(max_new_tokens=30)):
            for segment in events[0].segments:
                drafted += segment.text if segment.from_draft else ""
                own += "" if segment.from_draft else segment.text
    shown_drafted = shown_own = ""
    for char in texts_shown(result.out)[0]:
        if char in "«»":
            assert in_draft is (char == "»")
            in_draft = char == "«"
        elif in_draft:
            shown_drafted += char
        else:
            shown_own += char
    assert not in_draft
    assert len(drafted) > 5
    assert (shown_drafted, shown_own.rstrip()) == (drafted, own.rstrip())


def test_marks_can_be_left_out(run: Run, config: Callable[..., str]) -> None:
    result = run("generate", "-c", config(EAGLE), "-p", "ab", "-n", "12", "--no-marks")
    assert not set("«»") & set(result.out)
    assert result.code == 0


def test_colours_in_place_of_marks(
    run: Run, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config(EAGLE)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = run("generate", "-c", file, "-p", "ab", "-n", "16", "--no-compare").out
    assert "\x1b[32m" in coloured
    assert "«" not in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "«" in run("generate", "-c", file, "-p", "ab", "-n", "16", "--no-compare").out


def test_no_compare_leaves_the_other_runs_out(run: Run, config: Callable[..., str]) -> None:
    result = run("generate", "-c", config(EAGLE), "-p", "ab", "-n", "8", "--no-compare")
    assert result.code == 0
    assert "without MTP" not in result.out
    assert "identical" not in result.out


def test_without_mtp_there_is_no_acceptance(run: Run, config: Callable[..., str]) -> None:
    result = run("generate", "-c", config(None), "-p", "ab", "-n", "8")
    assert result.code == 0
    assert "acceptance" not in result.out
    assert "drafts" not in result.out.split("── 8 tokens")[1]
    assert result.out.splitlines()[-1] == "identical to target-only decoding: yes (8 tokens)"


def test_relaxed_acceptance_says_what_it_does_not_promise(
    run: Run, config: Callable[..., str]
) -> None:
    result = run("generate", "-c", config(RELAXED), "-p", "<think>so", "-n", "40")
    found = re.search(
        r"^identical to decoding without MTP: not promised by relaxed acceptance; (\d+) of 40 "
        r"tokens agree up to the first difference of each prompt$",
        result.out,
        re.MULTILINE,
    )
    assert found
    assert int(found[1]) < 40
    assert result.code == 0


def test_synthetic_acceptance_is_marked_wherever_it_shows(
    run: Run, config: Callable[..., str]
) -> None:
    options = ("-p", "ab", "-n", "40")
    result = run("generate", "-c", config(SYNTHETIC), *options)
    assert result.code == 0
    assert "── text (synthetic, not the model's)" in result.out
    assert (
        "synthetic acceptance (90% / 80% / 70%): for benchmarks: drafts are accepted by draw, the "
        "text is not the model's"
    ) in result.out
    assert "tokens per step (synthetic)" in result.out
    assert "accepted by synthetic draw up to draft 1..3" in result.out
    assert re.search(
        r"^identical to decoding without MTP: not promised by synthetic acceptance; \d+ of 40 ",
        result.out,
        re.MULTILINE,
    )
    document = json.loads(run("generate", "-c", config(SYNTHETIC), *options, "--json").out)
    assert document["label"]["is_drawn"] is True
    assert document["run"]["acceptance"]["label"]["name"] == "synthetic"
    assert document["results"][0]["acceptance"]["label"]["name"] == "synthetic"
    assert document["comparison"]["expected_identical"] is False
    honest = run("generate", "-c", config(EAGLE), *options)
    assert "synthetic" not in honest.out
    document = json.loads(run("generate", "-c", config(EAGLE), *options, "--json").out)
    assert document["label"] is None
    assert document["run"]["acceptance"]["label"] is None


def test_doctor_tells_synthetic_rates(run: Run, config: Callable[..., str]) -> None:
    result = run("doctor", "-c", config(SYNTHETIC))
    assert result.code == 0
    assert re.search(
        r"^acceptance +synthetic, 90% / 80% / 70%: for benchmarks: drafts are accepted by draw, "
        r"the text is not the model's$",
        result.out,
        re.MULTILINE,
    )
    assert "synthetic" not in run("doctor", "-c", config(EAGLE)).out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--stop", "a", "--stop", "\n"),
        ("--min-tokens", "12"),
        ("--ignore-eos",),
        ("--stop", "b", "--min-tokens", "9"),
    ],
    ids=" ".join,
)
def test_stops_and_least_lengths_compare_too(
    run: Run, config: Callable[..., str], arguments: tuple[str, ...]
) -> None:
    options = ("-p", "def f(", "-p", "x", "-p", "import", "-n", "40")
    result = run("generate", "-c", config(EAGLE), *options, *arguments)
    assert result.code == 0, result.out
    assert "identical to decoding without MTP: yes" in result.out


SAMPLING = ["--temperature", "0.8", "--top-k", "40", "--top-p", "0.95", "--min-p", "0.01"]
PENALTIES = [
    *("--repetition-penalty", "1.3", "--presence-penalty", "0.4"),
    *("--frequency-penalty", "0.2"),
]


def test_drawn_texts_compare_too(run: Run, config: Callable[..., str]) -> None:
    """Every option reaches the request and target-only decoding; the seed decides the draws."""
    file = config({**EAGLE, "mtp": {"seed": 7}})
    prompts = ["-p", "def f(x):\n", "-p", "def f(x):\n", "-n", "16", "--ignore-eos", "--json"]

    def texts(*arguments: str) -> list[list[int]]:
        result = run("generate", "-c", file, *prompts, *arguments)
        assert result.code == 0
        told = json.loads(result.out)
        assert told["comparison"]["identical"] is True
        assert told["comparison"]["num_equal"] == 32
        return [one["token_ids"] for one in told["results"]]

    greedy, drawn = texts(), texts(*SAMPLING)
    # the same prompt, drawn by its number
    assert greedy[0] == greedy[1]
    assert drawn[0] != drawn[1]
    assert texts(*PENALTIES) != greedy
    seeded = texts(*SAMPLING, *PENALTIES, "--seed", "5")
    assert seeded[0] == seeded[1]
    assert texts(*SAMPLING, *PENALTIES, "--seed", "6") != seeded
    oracle_text = infer.decode(
        load_model(load_config(file).model).target,
        list(byte_tokenizer().encode("def f(x):\n")),
        SamplingParams(
            **{"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 5},
            **{"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
            max_new_tokens=16,
            ignore_eos=True,
        ),
    )
    assert seeded[0] == oracle_text.token_ids


@pytest.mark.parametrize("named", [False, True])
def test_a_budget_of_thinking(run: Run, config: Callable[..., str], named: bool) -> None:
    """Its end stands where it is spent, and target-only decoding writes the same; decoding without
    MTP knows the tokenizer's tags alone."""
    begin, end = (byte_tokenizer().encode(tag) for tag in ("<think>", "</think>"))
    tags = {"begin_thinking_phase_token": begin[0], "end_thinking_phase_token": ord("x") - 33}
    file = config({**EAGLE, **tags} if named else EAGLE)
    asked = ("generate", "-c", file, "-p", "<think>ab", "-n", "12", "--ignore-eos", "--json")
    result = run(*asked, "--thinking-token-budget", "4")
    assert result.code == 0
    told = json.loads(result.out)
    tokens = told["results"][0]["token_ids"]
    assert tokens[4] == (tags["end_thinking_phase_token"] if named else end[0])
    assert told["comparison"]["identical"] is True
    assert ("not timed without MTP" in result.err) is named
    assert (told["run_without_mtp"] is None) is named
    assert json.loads(run(*asked).out)["results"][0]["token_ids"] != tokens
    refused = run(*asked, "--thinking-budget", "-2")
    assert refused.code == 2
    assert "thinking_token_budget must be an integer >= 0, got -2" in refused.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature must be a number >= 0, got -1.0"),
        (["--top-k", "-2"], "top_k must be an integer >= -1, got -2"),
        (["--top-p", "1.5"], "top_p must be a number from 0 to 1, got 1.5"),
        (["--repetition-penalty", "0"], "repetition_penalty must be a finite number > 0, got 0.0"),
    ],
)
def test_sampling_options_out_of_range(
    run: Run, config: Callable[..., str], arguments: list[str], message: str
) -> None:
    result = run("generate", "-c", config(EAGLE), "-p", "x", *arguments)
    assert result.code == 2
    assert result.err.splitlines()[-1] == f"error: sampling parameters: {message}"


def test_a_difference_is_told_and_fails(
    run: Run, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def altered(model: Any, prompt: list[int], *arguments: Any, **options: Any) -> Any:
        decoded = infer.decode(model, prompt, *arguments, **options)
        if len(prompt) == 6:
            decoded.token_ids[4] = ord("!") - 33  # the byte-level alphabet starts there
        return decoded

    file = config(EAGLE)
    (ours,) = LLM(file).generate(["def f("], SamplingParams(max_new_tokens=12))
    monkeypatch.setattr(oracle, "decode", altered)
    result = run("generate", "-c", file, "-p", "x", "-p", "def f(", "-n", "12")
    assert result.code == 1
    token = ours.token_ids[4]
    spelled = byte_tokenizer().decode([token])
    verdict = result.out.splitlines()[-2:]
    assert verdict[0] == "identical to decoding without MTP: NO"
    assert verdict[1] == (
        f"  prompt 2, token 5: {token} {spelled!r}, target-only decoding has 0 {'!'!r}"
    )


def test_a_text_that_ends_too_early_is_a_difference(
    run: Run, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def longer(*arguments: Any, **options: Any) -> Any:
        decoded = infer.decode(*arguments, **options)
        decoded.token_ids.append(0)
        return decoded

    monkeypatch.setattr(oracle, "decode", longer)
    result = run("generate", "-c", config(EAGLE), "-p", "x", "-n", "6")
    assert result.code == 1
    assert "  prompt 1, token 7: the end, target-only decoding has 0 '!'" in result.out


def test_json_is_one_document(run: Run, config: Callable[..., str]) -> None:
    file = config(VANILLA)
    result = run("generate", "-c", file, "-p", "def f(", "-p", "é", "-n", "16", "--json")
    assert result.code == 0
    document = json.loads(result.out)
    with LLM(file) as llm:
        outputs = llm.generate(["def f(", "é"], SamplingParams(max_new_tokens=16))
    for found, output, prompt in zip(document["results"], outputs, ["def f(", "é"], strict=True):
        assert found["prompt"] == prompt
        assert found["prompt_token_ids"] == output.prompt_token_ids
        assert found["token_ids"] == output.token_ids
        assert found["text"] == output.text
        assert found["finish_reason"] == output.finish_reason.value
        acceptance = found["acceptance"]
        assert acceptance["steps_by_emitted_tokens"] == output.acceptance.histogram
        assert acceptance["acceptance_length"] == output.acceptance.acceptance_length
        assert acceptance["per_position"] == output.acceptance.per_position
    emitted = sum(len(output.token_ids) for output in outputs)
    for name in ("run", "run_without_mtp"):
        assert document[name]["num_tokens"] == emitted
        assert document[name]["seconds"] > 0
        assert document[name]["tokens_per_second"] > 0
    assert document["run"]["acceptance"]["emitted"] == emitted - 2
    assert document["run_without_mtp"]["num_steps"] > document["run"]["num_steps"]
    assert document["comparison"] == {
        "identical": True,
        "expected_identical": True,
        "num_tokens": emitted,
        "num_equal": emitted,
        "num_ties": 0,
        "differences": [],
    }
    assert document["max_draft_len"] == 3
    assert document["config"]["speculative_config"]["max_draft_len"] == 3
    assert set(document["versions"]) == {"mtp_plugin", "python", "torch", "transformers"}


@pytest.mark.parametrize("way", ["rejection", "coupled"])
def test_the_same_drafts_without_the_executor(
    run: Run, checkpoint: Path, tmp_path: Path, way: str
) -> None:
    """Drawn texts too are the same for the same seeds."""
    file = tmp_path / "config.yaml"
    speculative = {**EAGLE, "mtp": {"verification": way}}
    file.write_text(yaml.safe_dump({"model": str(checkpoint), "speculative_config": speculative}))
    arguments = ("-p", "def f(", "-p", "é", "-n", "16", "--temperature", "0.8", "--json")
    result = run("generate", "-c", str(file), *arguments, "--compare-drafts")
    assert result.code == 0
    document = json.loads(result.out)
    assert (document["comparison"] is None) == (way == "rejection")
    assert ("compared with the same drafts alone: rejection" in result.err) == (way == "rejection")
    length = document["run"]["acceptance"]["acceptance_length"]
    assert document["without_executor"] == {
        "num_prompts": 2,
        "num_equal_texts": 2,
        "num_ties": None if way == "rejection" else 0,
        "differences": None if way == "rejection" else [],
        "acceptance_length": length,
        "acceptance_length_of_executor": length,
    }
    result = run("generate", "-c", str(file), *arguments)
    assert json.loads(result.out)["without_executor"] is None
    assert ("\nnot compared: rejection" in result.err) == (way == "rejection")
    assert ("without the executor" in result.err) == (way == "coupled")


def mistaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let decoding without the executor end the first text with another token."""
    honest = PlainDecoding.with_drafts

    def wrong(*arguments: Any, **options: Any) -> list[Decoded]:
        first, *others = honest(*arguments, **options)
        tokens = [*first.token_ids[:-1], (first.token_ids[-1] + 1) % 256]
        return [dataclasses.replace(first, token_ids=tokens), *others]

    monkeypatch.setattr(PlainDecoding, "with_drafts", wrong)


@pytest.mark.parametrize("way", ["rejection", "coupled"])
def test_drafts_compare_by_themselves(
    run: Run, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    file = config({**EAGLE, "mtp": {"verification": way}})
    arguments = ("-p", "def f(", "-p", "é", "-n", "8", "--temperature", "0.8", "--seed", "3")
    arguments = ("generate", "-c", file, *arguments, "--no-compare", "--compare-drafts")
    what = "the executor's text" if way == "rejection" else "the text of target-only decoding"
    result = run(*arguments)
    assert result.code == 0
    assert "identical" not in result.out
    assert re.search(rf"prompts 1-2 without the executor: {what}, accepted (.*) \(by", result.out)
    mistaken(monkeypatch)
    result = run(*arguments)
    if way == "rejection":
        assert result.code == 0
        assert ": another text of 1 than the executor, accepted" in result.out
    else:
        assert result.code == 1
        assert ": another text of 1 than target-only decoding, accepted" in result.out
        assert re.search(r"  prompt 1, token 8: .*, target-only decoding has ", result.out)


@pytest.mark.parametrize(
    ("mtp", "why"),
    [
        ({"verification": "block"}, "block verification is not known without the executor"),
        ({"verification": "rejection"}, r"preempted \d+ times, after which rejection redraws"),
    ],
    ids=["block", "preempted"],
)
def test_drafts_that_cannot_compare_are_told(
    run: Run, config: Callable[..., str], mtp: dict[str, Any], why: str
) -> None:
    cache = {"tokens_per_block": 8, "max_tokens": 80}
    file = config({**EAGLE, "mtp": mtp}, kv_cache_config=cache, max_seq_len=64)
    texts = [word for text in "abc" for word in ("-p", text)]
    arguments = ("-n", "40", "--ignore-eos", "--temperature", "0.8", "--json", "--compare-drafts")
    result = run("generate", "-c", file, *texts, *arguments)
    assert result.code == 0
    assert json.loads(result.out)["without_executor"] is None
    assert re.search(f"^not decoded again: {why}$", result.err, re.MULTILINE)
    assert "\nnot compared: " in result.err


def test_no_memory_for_drafts_loses_no_report(
    run: Run, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def greedy(*_: Any, **__: Any) -> list[Decoded]:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate much")

    monkeypatch.setattr(PlainDecoding, "with_drafts", greedy)
    arguments = ("-p", "ab", "-n", "4", "--json", "--compare-drafts")
    result = run("generate", "-c", config(EAGLE), *arguments)
    assert result.code == 0
    document = json.loads(result.out)
    assert document["comparison"]["identical"]
    assert document["without_executor"] is None
    assert result.err.splitlines()[-1] == "not decoded again: out of memory"


def test_json_of_a_difference(
    run: Run, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = infer.Decoded([], FinishReason.LENGTH)
    monkeypatch.setattr(oracle, "decode", lambda *_, **__: nothing)
    result = run("generate", "-c", config(EAGLE), "-p", "ab", "-n", "4", "--json")
    assert result.code == 1
    (difference,) = json.loads(result.out)["comparison"]["differences"]
    assert (difference["prompt"], difference["position"], difference["expected"]) == (1, 1, None)


def test_json_without_compare(run: Run, config: Callable[..., str]) -> None:
    result = run("generate", "-c", config(None), "-p", "ab", "-n", "4", "--json", "--no-compare")
    document = json.loads(result.out)
    assert document["comparison"] is None
    assert document["run_without_mtp"] is None
    assert document["run"]["acceptance"] is None


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupt_ends_cleanly(
    run: Run, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    steps, closed = [], []
    step, shutdown = PyExecutor.step, PyExecutor.shutdown

    def interrupted(self: PyExecutor) -> list[StepEvent]:
        steps.append(1)
        if len(steps) == 9:
            raise KeyboardInterrupt
        return step(self)

    def watched(self: PyExecutor) -> None:
        shutdown(self)
        closed.append(self.engine.blocks.num_free_blocks == self.engine.blocks.num_blocks)

    monkeypatch.setattr(PyExecutor, "step", interrupted)
    monkeypatch.setattr(PyExecutor, "shutdown", watched)
    extra = ["--json"] if as_json else []
    result = run("generate", "-c", config(EAGLE), "-p", "ab", "-n", "60", *extra)
    assert result.code == 130
    assert result.err.endswith("interrupted\n")
    assert closed == [True]
    assert not as_json or result.out == ""
    assert as_json or result.out.endswith("\n")


def test_a_failed_request_is_an_error(
    run: Run, config: Callable[..., str], checkpoint: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in checkpoint.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors["lm_head.weight"].fill_(float("nan"))
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    result = run("generate", "-c", config(EAGLE, model=str(broken)), "-p", "ab", "--no-marks")
    assert result.code == 2
    told = "error: prompt 1 of 1 failed after 0 tokens: the target gave a row of logits without"
    assert result.err.splitlines()[-1].startswith(told)
    assert "Traceback" not in result.err


# --- where prompts come from ---


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("one.txt", b"def f(\n", ["def f(\n"]),
        ("one.txt", b"a\r\nb", ["a\r\nb"]),
        ("marked.txt", b"\xef\xbb\xbfa b", ["a b"]),
        ("marked.json", b'\xef\xbb\xbf["a"]', ["a"]),
        ("many.json", b'["a", "b\\n"]', ["a", "b\n"]),
        ("many.json", b'[{"prompt": "a", "path": "x.py"}, "b"]', ["a", "b"]),
    ],
)
def test_prompt_files(
    run: Run,
    config: Callable[..., str],
    tmp_path: Path,
    name: str,
    content: bytes,
    expected: list[str],
) -> None:
    (tmp_path / name).write_bytes(content)
    arguments = ("--prompt-file", str(tmp_path / name), "-p", "first", "-n", "2", "--no-compare")
    result = run("generate", "-c", config(EAGLE), *arguments, "--json")
    assert [r["prompt"] for r in json.loads(result.out)["results"]] == ["first", *expected]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("no.txt", None, "no such file"),
        ("a.md", b"x", "expected .txt (one prompt), .json (a list) or - (standard input)"),
        ("a.txt", b"\xff", "expected UTF-8 text"),
        ("a.json", b"[", "expected JSON"),
        ("a.json", b"[]", "expected a list of prompts that is not empty"),
        ("a.json", b'{"prompt": "x"}', "expected a list of prompts that is not empty"),
        ("a.json", b'["x", 3]', "item 2: expected text or an object with the text under 'prompt'"),
        ("a.json", b'[{"text": "x"}]', "item 1: expected text or an object with the text under"),
    ],
)
def test_prompt_files_refused(
    run: Run,
    config: Callable[..., str],
    tmp_path: Path,
    name: str,
    content: bytes | None,
    message: str,
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    result = run("generate", "-c", config(EAGLE), "--prompt-file", str(file))
    assert result.code == 2
    assert result.err.startswith(f"error: prompt file {file}: ")
    assert message in result.err
    assert result.err.count("\n") == 1


def prompt_taken(result: Result) -> list[str]:
    return [r["prompt"] for r in json.loads(result.out)["results"]]


FEW = ("-n", "2", "--no-compare", "--json")


def test_piped_text_is_a_prompt(
    run: Run, config: Callable[..., str], stdin: Callable[[int], None]
) -> None:
    reader, writer = os.pipe()
    os.write(writer, "def é\n".encode())
    os.close(writer)
    stdin(reader)
    assert prompt_taken(run("generate", "-c", config(EAGLE), *FEW)) == ["def é\n"]


def test_a_redirected_file_is_a_prompt(
    run: Run, config: Callable[..., str], stdin: Callable[[int], None], tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("abc")
    stdin(os.open(tmp_path / "text", os.O_RDONLY))
    assert prompt_taken(run("generate", "-c", config(EAGLE), *FEW)) == ["abc"]


def test_a_given_prompt_leaves_standard_input_alone(
    run: Run, config: Callable[..., str], stdin: Callable[[int], None]
) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"later")
    os.close(writer)
    stdin(reader)
    assert prompt_taken(run("generate", "-c", config(EAGLE), "-p", "x", *FEW)) == ["x"]
    assert sys.stdin.read() == "later"


def test_standard_input_by_name(
    run: Run, config: Callable[..., str], stdin: Callable[[int], None]
) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"piped")
    os.close(writer)
    stdin(reader)
    arguments = ("-p", "x", "--prompt-file", "-", *FEW)
    assert prompt_taken(run("generate", "-c", config(EAGLE), *arguments)) == ["x", "piped"]


def open_terminal() -> int:
    return os.openpty()[1]


def open_silent_pipe() -> int:
    return os.pipe()[0]


def open_empty_pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


NOTHING = [
    pytest.param(open_terminal, id="a terminal"),
    pytest.param(open_silent_pipe, id="a pipe that nobody writes to"),
    pytest.param(open_empty_pipe, id="an empty pipe"),
    pytest.param(lambda: os.open(os.devnull, os.O_RDONLY), id="the null device"),
    pytest.param(None, id="closed"),
]


@pytest.mark.parametrize("opening", NOTHING)
def test_without_any_prompt_there_is_a_clear_error(
    run: Run,
    config: Callable[..., str],
    stdin: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: Path,
    opening: Callable[[], int] | None,
) -> None:
    monkeypatch.setattr(prompts, "STDIN_WAIT_SECONDS", 0.05)
    if opening is None:
        monkeypatch.setattr(sys, "stdin", None)
    else:
        stdin(opening())
    result = run("generate", "-c", config(EAGLE))
    assert result.code == 2
    assert result.err.splitlines()[-1] == (
        "error: no prompt: give --prompt TEXT or --prompt-file FILE, or pipe one in "
        f"(and there is no {checkpoint.parent / 'prompts.json'})"
    )


def test_bundled_prompts_lie_around_the_checkpoint(
    run: Run,
    config: Callable[..., str],
    stdin: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: Path,
) -> None:
    monkeypatch.setattr(prompts, "STDIN_WAIT_SECONDS", 0.05)
    stdin(open_silent_pipe())
    bundled = checkpoint.parent / "prompts.json"
    bundled.write_text('[{"prompt": "one"}, {"prompt": "two"}]')
    try:
        result = run("generate", "-c", config(EAGLE), *FEW)
    finally:
        bundled.unlink()
    assert prompt_taken(result) == ["one", "two"]
    told = result.err.splitlines()
    assert told[0].startswith("nothing came on standard input within 0.05 s")
    assert told[1] == f"no prompt was given: taking those of {bundled}"


# --- files beside the config ---


@pytest.mark.parametrize("command", [("generate", "-p", "ab", "-n", "4"), ("doctor",)])
def test_model_and_plugin_options_from_elsewhere(
    run: Run, checkpoint: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    file, options = tmp_path / "host.yaml", tmp_path / "options.yaml"
    cache = {"tokens_per_block": 8, "max_tokens": 2048}
    content = {"max_num_tokens": 128, "kv_cache_config": cache, "speculative_config": EAGLE}
    file.write_text(yaml.safe_dump({"tensor_parallel_size": 1, **content}))
    options.write_text("verification: [coupled, rejection]\n")
    result = run(*command, "-c", str(file), "-m", str(checkpoint), "--plugin-options", str(options))
    assert result.code == 0, result.err
    options.write_text("verifcation: coupled\n")
    result = run(*command, "-c", str(file), "-m", str(checkpoint), "--plugin-options", str(options))
    assert result.code != 0
    told = f"{options}: verifcation: unknown key; did you mean verification?"
    assert told in " ".join((result.out + result.err).split())


# --- a checkpoint alone ---


CHOSEN = "speculative_config: none given, 3 MTP layers: drafting with max_draft_len 3 (eagle)"


def test_generate_from_a_checkpoint_alone(run: Run, checkpoint: Path) -> None:
    result = run("generate", "-m", str(checkpoint), "-p", "ab", "-n", "12")
    assert result.code == 0
    assert result.err.splitlines()[0] == CHOSEN
    assert "accepted up to draft 1..3" in result.out
    assert result.out.splitlines()[-1] == "identical to decoding without MTP: yes (12 tokens)"


def test_doctor_of_a_checkpoint_alone(run: Run, checkpoint: Path) -> None:
    result = run("doctor", "--model", str(checkpoint))
    assert (result.code, result.err) == (0, f"{CHOSEN}\n")
    assert re.search(r"^drafts per step +K = 3 by 1 MTP layer$", result.out, re.MULTILINE)
    assert result.out.splitlines()[-1] == "no problems found"


def test_a_checkpoint_alone_without_mtp_layers(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    write_random_checkpoint(folder, "glm4_moe", num_mtp_layers=0, seed=1, vocab_size=VOCAB)
    byte_tokenizer().save_pretrained(folder)
    told = "speculative_config: none given, no MTP layers: decoding without drafts"
    result = run("generate", "-m", str(folder), "-p", "ab", "-n", "4")
    assert (result.code, result.err.splitlines()[0]) == (0, told)
    assert "acceptance" not in result.out
    result = run("doctor", "-m", str(folder))
    assert (result.code, result.err) == (0, f"{told}\n")


def test_a_checkpoint_alone_that_is_none(run: Run, tmp_path: Path) -> None:
    """`generate` ends with the first problem, `doctor` tells all of them."""
    result = run("generate", "-m", str(tmp_path / "none"), "-p", "x")
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert "none: expected a directory, it does not exist" in result.err
    result = run("doctor", "-m", str(tmp_path / "none"))
    assert result.code == 1
    assert "problem: checkpoint" in result.out
    assert "device" in result.out
    result = run("doctor", "-m", "~nosuchuser")
    assert result.code == 1
    assert "problem: ~nosuchuser: Could not determine home directory." in result.out


@pytest.mark.parametrize("command", ["generate", "doctor"])
def test_neither_a_file_nor_a_checkpoint(run: Run, checkpoint: Path, command: str) -> None:
    result = run(command)
    assert result.code == 2
    assert "expected --config FILE or --model DIR" in result.err
    result = run(command, "-m", str(checkpoint), "--plugin-options", "some.yaml")
    assert result.code == 2
    assert "--plugin-options goes with --config alone" in result.err


# --- errors ---


def test_named_errors_are_one_line_each(run: Run, config: Callable[..., str]) -> None:
    file = config({"decoding_type": "MTP", "max_draft_len": 99}, max_batch_sizes=3)
    result = run("generate", "-c", file, "-p", "x")
    assert result.code == 2
    lines = result.err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"error: {file}: ") for line in lines)
    assert "speculative_config.max_draft_len: expected an integer from 1 to 16" in result.err
    assert "max_batch_sizes: unknown key; did you mean max_batch_size?" in result.err
    assert result.out == ""


@pytest.mark.parametrize("command", ["generate", "parity", "config"])
def test_what_does_not_fit_the_checkpoint_names_the_file(
    run: Run, config: Callable[..., str], command: str
) -> None:
    file = config({**VANILLA, "max_draft_len": 4})
    result = run(command, *([file] if command == "config" else ["-c", file, "-p", "ab"]))
    assert result.code == 2
    last = result.err.splitlines()[-1]
    assert last.startswith(f"error: {file}: max_draft_len: 4 is more than the checkpoint's 3 MTP")


def test_doctor_tells_of_a_tokenizer_that_is_not_read(
    run: Run, config: Callable[..., str], checkpoint: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    (other / "tokenizer.json").rename(other / "tokenizer.model")
    result = run("doctor", "-c", config(EAGLE, model=str(other)))
    told = "prompts must be token ids (tokenizer.model is not read, expected tokenizer.json)"
    assert f"none: {told}" in result.out
    result = run("generate", "-m", str(other), "-p", "ab")
    assert result.code == 2
    assert f"no tokenizer: {told}" in result.err.splitlines()
    assert result.err.splitlines()[-1] == (
        "error: request 0: a text prompt needs a tokenizer, the checkpoint has no tokenizer.json"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-p", "x", "-n", "0"), "sampling parameters: max_new_tokens must be an integer >= 1"),
        (("-p", ""), "prompt 1 of 1: the prompt is empty"),
        (("-p", "x" * 600), "request 0: the prompt has 600 tokens, max_seq_len is 512"),
        (
            ("-p", "a", "-p", "x" * 600),
            "prompt 2 of 2: the prompt has 600 tokens, max_seq_len is 512",
        ),
        (("-p", "x", "--stop", ""), "sampling parameters: stop must be a string or a sequence"),
        (("-p", "x", "--stop", "<eos>"), "request 0: not supported: stop='<eos>' (special tokens"),
    ],
)
def test_requests_refused(
    run: Run, config: Callable[..., str], arguments: tuple[str, ...], message: str
) -> None:
    result = run("generate", "-c", config(EAGLE), *arguments, "--no-marks")
    assert result.code == 2
    assert result.err.splitlines()[-1].startswith(f"error: {message}")
    assert "Traceback" not in result.err


EMPTY = [
    pytest.param(("-p", "a", "-p", ""), None, "prompt 2 of 2", id="an option"),
    pytest.param(("--prompt-file", "FILE"), ("one.txt", ""), "prompt 1 of 1", id="a text file"),
    pytest.param(
        ("-p", "a", "--prompt-file", "FILE"),
        ("many.json", '["a", {"prompt": ""}, "b"]'),
        "prompt 3 of 4",
        id="a JSON file",
    ),
    pytest.param(("--prompt-file", "-"), None, "prompt 1 of 1", id="standard input"),
]


@pytest.mark.parametrize("command", ["generate", "parity"])
@pytest.mark.parametrize(("arguments", "file", "place"), EMPTY)
def test_an_empty_prompt_is_found_before_a_weight_is_loaded(
    run: Run,
    config: Callable[..., str],
    stdin: Callable[[int], None],
    tmp_path: Path,
    command: str,
    arguments: tuple[str, ...],
    file: tuple[str, str] | None,
    place: str,
) -> None:
    stdin(open_empty_pipe())
    name, content = file or ("none.txt", "")
    (tmp_path / name).write_text(content)
    named = [str(tmp_path / name) if a == "FILE" else a for a in arguments]
    result = run(command, "-c", config(EAGLE), *named)
    assert (result.code, result.err) == (2, f"error: {place}: the prompt is empty\n")


def test_an_empty_text_may_have_a_token(
    run: Run, config: Callable[..., str], checkpoint: Path, tmp_path: Path
) -> None:
    """Some tokenizers begin every text with one of their own."""
    folder = tmp_path / "begins"
    shutil.copytree(checkpoint, folder)
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<think> $A", special_tokens=[("<think>", 257)]
    )
    tokenizer.save_pretrained(folder)
    result = run("generate", "-c", config(EAGLE, model=str(folder)), "-p", "", *FEW)
    assert result.code == 0
    assert json.loads(result.out)["results"][0]["prompt_token_ids"] == [257]


@pytest.mark.parametrize("command", ["generate", "config"])
def test_a_missing_file(run: Run, command: str, tmp_path: Path) -> None:
    file = str(tmp_path / "none.yaml")
    result = run(command, *(["-c"] if command == "generate" else []), file)
    assert (result.code, result.err) == (2, f"error: {file}: no such file; expected a YAML file\n")


def test_a_missing_checkpoint(run: Run, config: Callable[..., str], tmp_path: Path) -> None:
    result = run("generate", "-c", config(EAGLE, model=str(tmp_path / "none")), "-p", "x")
    assert result.code == 2
    assert "none: expected a directory, it does not exist" in result.err


def test_wrong_usage(run: Run) -> None:
    assert run("generate").code == 2
    assert run("nonsense").code == 2


# --- config, doctor, version ---


def test_config_prints_what_loads_again(
    run: Run, config: Callable[..., str], checkpoint: Path, tmp_path: Path
) -> None:
    file = config({"decoding_type": "MTP", "use_mtp_vanilla": True})
    result = run("config", file)
    assert result.code == 0
    again = tmp_path / "again.yaml"
    again.write_text(result.out)
    loaded = load_config(again)
    assert loaded == load_config(file).resolve(3)
    assert loaded.speculative_config.draft_len == 3
    assert loaded.model == str(checkpoint)


def test_config_of_a_checkpoint_elsewhere(
    run: Run, config: Callable[..., str], tmp_path: Path
) -> None:
    result = run("config", config(EAGLE, model=str(tmp_path / "elsewhere")))
    assert result.code == 0
    assert yaml.safe_load(result.out)["speculative_config"]["max_draft_len"] == 3
    assert result.err.startswith("warning: draft length not looked up in the checkpoint: ")


def test_config_with_an_older_name_warns(run: Run, config: Callable[..., str]) -> None:
    result = run("config", config({"decoding_type": "MTP", "num_nextn_predict_layers": 2}))
    assert result.code == 0
    assert yaml.safe_load(result.out)["speculative_config"]["max_draft_len"] == 2
    assert re.fullmatch(r"warning: .*num_nextn_predict_layers is the older name .*\n", result.err)


def test_config_schema(run: Run) -> None:
    assert json.loads(run("config", "--schema").out) == json_schema()


def test_config_takes_a_file_or_the_schema(run: Run, config: Callable[..., str]) -> None:
    assert run("config").code == 2
    assert run("config", config(None), "--schema").code == 2


def test_doctor_finds_no_problem(run: Run, config: Callable[..., str]) -> None:
    result = run("doctor", "-c", config(VANILLA))
    assert result.code == 0
    found = dict(re.findall(r"^(\S+(?: \S+)*) {2,}(.*)$", result.out, re.MULTILINE))
    assert found["family"] == "glm4_moe (Glm4MoeForCausalLM)"
    assert found["layers"] == "2 and 3 MTP"
    assert found["drafts per step"] == "K = 3 by 3 MTP layers"
    assert found["KV rows per request"].startswith("its tokens and up to 8 for the next step")
    assert found["KV blocks"] == "256 of 8 tokens"
    assert found["slots"] == "26 and the sentinel"
    assert found["tokenizer"] == f"{VOCAB} tokens"
    assert found["draft head"].startswith("concat embed_hidden, target state post_norm")
    assert result.out.splitlines()[-1] == "no problems found"


def test_doctor_tells_a_cut_draft_vocabulary(
    run: Run, config: Callable[..., str], tmp_path: Path
) -> None:
    """How much is left of it, and what is wrong with its file, which needs no weight either."""
    ids = tmp_path / "ids.json"
    ids.write_text("[5, 3, 9]")
    file = config({**EAGLE, "mtp": {"draft_vocab": str(ids)}})
    result = run("doctor", "-c", file)
    assert result.code == 0
    assert re.search(rf"^draft vocabulary +3 of {VOCAB} ids$", result.out, re.MULTILINE)
    assert "draft vocabulary" not in run("doctor", "-c", config(EAGLE)).out
    for content, message in (
        ("[5, 5]", "expected every id once, got 5 more than once"),
        (f"[{VOCAB}]", f"expected ids of the vocabulary of {VOCAB}, got {VOCAB}"),
    ):
        ids.write_text(content)
        result = run("doctor", "-c", config({**EAGLE, "mtp": {"draft_vocab": str(ids)}}))
        assert result.code == 1
        assert f"problem: mtp.draft_vocab: {ids}: {message}" in result.out.replace("\n", "")


def test_doctor_loads_no_weight(
    run: Run, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("mtp_plugin.executor.models.loader.read_tensors", refuse)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", refuse)
    assert run("doctor", "-c", config(EAGLE)).code == 0
    assert run("doctor", "-c", config(None)).code == 0


def test_doctor_lists_every_problem(run: Run, config: Callable[..., str]) -> None:
    file = config(
        {**VANILLA, "max_draft_len": 4},
        max_seq_len=9999,
        kv_cache_config={"tokens_per_block": 64, "max_tokens": 63},
    )
    result = run("doctor", "-c", file)
    assert result.code == 1
    problems = [p for p in result.out.splitlines() if p.startswith("problem: ")]
    assert [p.split(": ")[1] for p in problems] == [
        "kv_cache_config.max_tokens",
        "max_draft_len",
        "max_seq_len",
    ]
    assert "no problems found" not in result.out


def test_doctor_on_a_damaged_checkpoint(
    run: Run, config: Callable[..., str], checkpoint: Path, tmp_path: Path
) -> None:
    """R43: a missing MTP tensor is found before any weight is loaded."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.3.eh_proj.weight"]
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    result = run("doctor", "-c", config(EAGLE, model=str(broken)))
    assert result.code == 1
    assert "1 are missing: model.layers.3.eh_proj.weight" in result.out
    assert re.search(r"^tokenizer +none: prompts must be token ids$", result.out, re.MULTILINE)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", {"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of"),
        ("config.json", {"num_hidden_layers": 9999}, "config.json says num_hidden_layers = 9999"),
        ("config.json", {"hidden_act": 5}, "hidden_act: expected one of 'silu'"),
        ("generation_config.json", {"eos_token_id": -1}, "eos_token_id.0: expected a token id"),
        ("tokenizer_config.json", {"tokenizer_class": 5}, "tokenizer_class: expected text or null"),
    ],
)
def test_doctor_names_what_generate_refuses(
    run: Run,
    config: Callable[..., str],
    checkpoint: Path,
    tmp_path: Path,
    file: str,
    content: dict[str, Any],
    message: str,
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(checkpoint, bad)
    changed = {**json.loads((bad / file).read_text()), **content}
    (bad / file).write_text(json.dumps(changed))
    options = config(EAGLE, model=str(bad))
    found = run("doctor", "-c", options)
    assert found.code == 1
    refused = run("generate", "-c", options, "-p", "ab", "-n", "2")
    assert refused.code == 2
    (line,) = [line for line in refused.err.splitlines() if message in line]
    assert f"problem: {line.removeprefix('error: ')}" in found.out


def test_keys_on_which_transformers_would_act_are_told(
    run: Run, config: Callable[..., str], checkpoint: Path, tmp_path: Path
) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(checkpoint, odd)
    content = json.loads((odd / "config.json").read_text())
    content |= {"attn_implementation": "org/kernel", "seq_aux": True}
    (odd / "config.json").write_text(json.dumps(content))
    told = "left out, as transformers would act on them: config.json: attn_implementation"
    found = run("doctor", "-c", config(EAGLE, model=str(odd)))
    assert found.code == 0
    assert told in found.out
    assert "not read: seq_aux" in found.out
    decoded = run("generate", "-c", config(EAGLE, model=str(odd)), "-p", "ab", "-n", "2")
    assert decoded.code == 0
    assert told in decoded.err


def test_doctor_without_a_checkpoint_or_a_readable_config(
    run: Run, config: Callable[..., str], tmp_path: Path
) -> None:
    result = run("doctor", "-c", config(EAGLE, model=str(tmp_path / "none")))
    assert result.code == 1
    assert "problem: checkpoint" in result.out
    result = run("doctor", "-c", config(EAGLE, max_batch_size=0, nonsense=1))
    assert result.code == 1
    assert result.out.count("problem: ") == 2


def test_version_and_help(run: Run) -> None:
    assert re.fullmatch(r"mtp-plugin \d+\.\d+\.\d+\n", run("--version").out)
    result = run("--help")
    assert result.code == 0
    assert all(command in result.out for command in ("generate", "config", "doctor"))


# --- the view ---


def event(*segments: tuple[str, bool], end: FinishReason | None = None) -> StepEvent:
    shown = [Segment(text, from_draft) for text, from_draft in segments]
    return StepEvent(0, list(range(len(segments))), shown, end)


def plain_console(encoding: str = "utf-8", **options: Any) -> OutputConsole:
    return OutputConsole(
        file=io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline=""), **options
    )


def written(console: OutputConsole) -> str:
    console.file.flush()
    return console.file.buffer.getvalue().decode(console.file.encoding)


def test_the_first_unfinished_text_is_live_and_the_others_wait() -> None:
    console = plain_console()
    view = StreamView(console, ["p", "q", "r"], marks=True)
    length = FinishReason.LENGTH
    view.show([(0, event(("a", False))), (1, event(("x", False))), (2, event(("1", False)))])
    assert written(console).endswith("── prompt 1 of 3\np\n── text\na")
    view.show([(1, event(("y", True), ("z", False), end=length)), (2, event(("2", True)))])
    assert written(console).endswith("── text\na")
    view.show([(0, event(("b", True), end=FinishReason.END_ID))])
    assert written(console).split("── text\n", 1)[1] == (
        "a«b»\n── 2 tokens, ended by stop\n"
        "\n── prompt 2 of 3\nq\n── text\nx«y»z\n── 3 tokens, ended by length\n"
        "\n── prompt 3 of 3\nr\n── text\n1«2"
    )
    view.show([(2, event(("3", True), ("4", False)))])
    view.close()
    assert written(console).endswith("1«23»4\n")


def test_drafts_of_neighbouring_runs_share_a_mark() -> None:
    console = plain_console()
    view = StreamView(console, ["p"], marks=True)
    view.show([(0, event(("a", True)))])
    view.show([(0, event(("b", True)))])
    view.show([(0, event(end=FinishReason.LENGTH))])
    assert "\n«ab»\n" in written(console)


def test_marks_fit_the_encoding() -> None:
    console = plain_console("ascii")
    view = StreamView(console, ["p"], marks=True)
    view.show([(0, event(("a", True), end=FinishReason.LENGTH))])
    assert "-- text\n<<a>>\n-- 1 token, ended by length\n" in written(console)


def test_a_long_prompt_is_shown_by_its_end() -> None:
    console = plain_console()
    view = StreamView(console, ["x" * 5000 + "END"], marks=False)
    view.show([(0, event(("a", False)))])
    assert "\n..." in written(console)
    assert "xEND\n── text\na" in written(console)
    assert len(written(console)) < 1000


def test_a_terminal_gets_no_control_characters_of_the_model() -> None:
    console = plain_console(force_terminal=True, color_system=None)
    console.write("a\x1b[31mb\x07\tc\n\x9b")
    assert written(console) == "a\\x1b[31mb\\x07\tc\n\\x9b"


def test_a_pipe_gets_the_text_as_it_is() -> None:
    console = plain_console(force_terminal=False)
    console.write("a\x1b[31mb" + "x" * 300 + "[bold]")
    assert written(console) == "a\x1b[31mb" + "x" * 300 + "[bold]"


# --- the oracle ---


@pytest.mark.parametrize(
    ("dtype", "ties", "equal"), [(torch.bfloat16, 1, 10), (torch.float32, 0, 4)]
)
def test_half_precision_ties_are_no_difference(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, ties: int, equal: int
) -> None:
    """Two words with the same row in the head: either may be chosen, and decoding goes on."""
    model = load_model(checkpoint, dtype=dtype)
    prompt, params = [5, 6, 7], SamplingParams(max_new_tokens=10, ignore_eos=True)
    truth = greedy_decode(model.target, prompt, 10)
    twin = VOCAB - 1
    head: Any = model.lm_head
    with torch.no_grad():
        head.weight[twin] = head.weight[truth[4]]
    emitted = [*truth[:4], twin]
    emitted += greedy_decode(model.target, prompt + emitted, 5)
    result = Decoded(prompt, emitted, "", FinishReason.LENGTH, AcceptanceStats(3))
    plain = PlainDecoding(model, params, 512, None)
    found = plain.compare([result])
    assert (found.num_ties, found.num_equal) == (ties, equal)
    assert [(d.position, d.token, d.expected) for d in found.differences] == (
        [] if ties else [(5, twin, truth[4])]
    )
    # texts of drafts without the executor are judged alike
    monkeypatch.setattr(PlainDecoding, "with_drafts", lambda *_, **__: [result])
    config = LLMConfig(model="nowhere", speculative_config=MTPDecodingConfig(max_draft_len=1))
    drafting = Drafting.of(config, model, params)
    assert isinstance(drafting, Drafting)
    assert plain.run_with_drafts([result], drafting).comparison == found
    assert same_as_target_only(len(found.differences), found.num_ties) == (
        "the text of target-only decoding, 1 rounding ties"
        if ties
        else "another text of 1 than target-only decoding"
    )


class Faithful(NamedTuple):
    note: str
    params: dict[str, Any]
    reason: FinishReason


FAITHFUL = [
    Faithful("the cap", {}, FinishReason.LENGTH),
    Faithful("a stop id", {"stop_token_ids": "5"}, FinishReason.END_ID),
    Faithful("a masked stop id", {"stop_token_ids": "5", "min_tokens": 8}, FinishReason.LENGTH),
    Faithful("a stop string", {"stop": "5"}, FinishReason.STOP_WORDS),
]


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> LLM:
    config = {"model": str(checkpoint), "speculative_config": EAGLE, "max_seq_len": 64}
    return LLM(config)


def decode(engine: LLM, params: SamplingParams) -> Decoded:
    (output,) = engine.generate([[5, 6, 7]], params)
    return Decoded(
        output.prompt_token_ids,
        output.token_ids,
        output.text,
        output.finish_reason,
        output.acceptance,
    )


@pytest.mark.parametrize("case", FAITHFUL, ids=lambda case: case.note)
def test_oracle_ends_where_a_request_has_to(engine: LLM, case: Faithful) -> None:
    """A run is confirmed, and one token more, less or other is found, however it ended."""
    plain = decode(engine, SamplingParams(max_new_tokens=12, ignore_eos=True)).token_ids
    fifth = plain[5]
    options = dict(case.params)
    if "stop_token_ids" in options:
        options["stop_token_ids"] = (fifth,)
    if "stop" in options:
        options["stop"] = (byte_tokenizer().decode([fifth]),)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, **options)
    result = decode(engine, params)
    assert result.finish_reason is case.reason
    tokens = result.token_ids

    def differences(token_ids: list[int]) -> list[int]:
        engine.model.set_attn_implementation("sdpa")
        try:
            return [
                difference.position
                for difference in PlainDecoding(engine.model, params, 64, engine.tokenizer)
                .compare([dataclasses.replace(result, token_ids=token_ids)])
                .differences
            ]
        finally:
            engine.model.set_attn_implementation("mtp_paged_sdpa")

    assert differences(tokens) == []
    assert differences(tokens[:-1]) == [len(tokens)]
    assert differences([*tokens, 3]) == [len(tokens) + 1]
    assert differences([*tokens[:2], tokens[2] ^ 1, *tokens[3:]]) == [3]


# --- the process ---


def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mtp_plugin", *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


def test_a_reader_that_leaves_ends_the_process_quietly(config: Callable[..., str]) -> None:
    process = start("generate", "-c", config(EAGLE), "-p", "ab", "-n", "400", "--no-compare")
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    told = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(60) == 141
    assert "Traceback" not in told
    assert "BrokenPipe" not in told


WRITING = (
    ("generate", "-c", "CONFIG", "-p", "ab", "-n", "4", "--no-compare", "--json"),
    ("generate", "-c", "CONFIG", "-p", "ab", "-n", "4", "--no-compare"),
    ("parity", "-c", "CONFIG", "-p", "ab", "-n", "4", "--json"),
    ("doctor", "-c", "CONFIG"),
    ("bench", "ops", "--cpu", "--filter", "accept"),
    ("config", "CONFIG"),
)
EACH_ON_ITS_OWN = """
import json, os, sys
import transformers.modeling_utils  # what takes long, once for all
from mtp_plugin.__main__ import main
for command in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        sys.argv[1:] = command
        sys.exit(main())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(2, f"ended with {code}\\n".encode())
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device here")
def test_output_that_cannot_be_written_is_one_line(config: Callable[..., str]) -> None:
    file = config(EAGLE)
    commands = [[file if a == "CONFIG" else a for a in arguments] for arguments in WRITING]
    ended = subprocess.run(
        [sys.executable, "-c", EACH_ON_ITS_OWN, json.dumps(commands)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=300,
        check=True,
    )
    told = ended.stderr.decode()
    assert "Traceback" not in told
    of_each = told.split("ended with 1\n")
    assert len(of_each) == len(WRITING) + 1, told
    assert of_each[-1] == ""
    message = "error: standard output cannot be written: No space left on device"
    assert [of_one.splitlines()[-1] for of_one in of_each[:-1]] == [message] * len(WRITING)


CLOSED = "standard output is closed; /dev/null takes what nobody reads"


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("--help >/dev/full", "the output cannot be written: No space left on device"),
        ("bench soak --help >/dev/full", "the output cannot be written: No space left on device"),
        ("--version >&-", CLOSED),
        *((f"{command} >&-", CLOSED) for command in ("generate", "doctor", "parity", "bench ops")),
        ("tools.bench ops >&-", CLOSED),
        ("tools.bench --help >/dev/full", "the output cannot be written: No space left on device"),
    ],
)
def test_output_that_goes_nowhere_is_one_line(way: str, message: str) -> None:
    module = "mtp_plugin." if way.startswith("tools.") else "mtp_plugin "
    ended = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m {module}{way}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.stderr.decode() == f"error: {message}\n"
    assert ended.returncode == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("doctor", "-c", "CONFIG"),
        ("parity", "-c", "CONFIG", "-p", "ab", "-n", "4"),
        ("bench", "ops", "--cpu", "--filter", "accept"),
    ],
    ids=["doctor", "parity", "bench"],
)
def test_a_report_that_nobody_reads_ends_the_process_quietly(
    config: Callable[..., str], arguments: tuple[str, ...]
) -> None:
    file = config(EAGLE)
    with start(*(file if a == "CONFIG" else a for a in arguments)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        told = process.stderr.read().decode()
        assert process.wait(60) == 141
    assert "Traceback" not in told
    assert "error" not in told


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_document_that_nobody_reads_ends_the_process_quietly(
    config: Callable[..., str], stream: str
) -> None:
    arguments = ("-c", config(EAGLE), "-p", "ab", "-n", "4", "--no-compare", "--json")
    with start("generate", *arguments) as process:
        getattr(process, stream).close()
        other = process.stdout if stream == "stderr" else process.stderr
        assert other is not None
        told = other.read().decode()
        assert process.wait(60) == 141
    assert "Traceback" not in told
    assert "Pipe" not in told
    assert stream == "stdout" or told == ""


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes inherit an ignored signal, as background jobs of a script have it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_process_cleanly(config: Callable[..., str]) -> None:
    process = start("generate", "-c", config(EAGLE), "-p", "ab", "-n", "450", "--ignore-eos")
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert told.decode().endswith("interrupted\n")
    assert "Traceback" not in told.decode()
    assert b"identical" not in out
