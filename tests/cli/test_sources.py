"""Files with the config, and a checkpoint alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import yaml

from integration.random_models import write_random_checkpoint
from mtp_plugin.config import LLMConfig
from mtp_plugin.hosts.embedded import requested_config
from tests.cli.calls import EAGLE, VOCAB, Run, byte_tokenizer


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
    expected = f"{options}: verifcation: unknown key; did you mean verification?"
    assert expected in " ".join((result.out + result.err).split())


# --- a checkpoint alone ---


CHOSEN = "speculative_config: none given, 3 MTP layers: drafting with max_draft_len 3 (eagle)"


def test_generate_from_a_checkpoint_alone(run: Run, checkpoint: Path) -> None:
    result = run("generate", str(checkpoint), "-p", "ab", "-n", "12")
    assert result.code == 0
    assert CHOSEN in result.err.splitlines()
    assert re.search(r"^ *with MTP .* \d+% / \d+% / \d+%$", result.out, re.MULTILINE)
    assert result.out.splitlines()[-1] == "identical to decoding without MTP: yes (12 tokens)"


def test_doctor_of_a_checkpoint_alone(run: Run, checkpoint: Path) -> None:
    result = run("doctor", "--model", str(checkpoint))
    assert (result.code, result.err) == (0, f"{CHOSEN}\n")
    assert re.search(r"^drafts per step +K = 3 by 1 MTP layer$", result.out, re.MULTILINE)
    assert result.out.splitlines()[-2] == "no problems found"


def test_a_checkpoint_alone_without_mtp_layers(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    write_random_checkpoint(folder, "glm4_moe", num_mtp_layers=0, seed=1, vocab_size=VOCAB)
    byte_tokenizer().save_pretrained(folder)
    expected = "speculative_config: none given, no MTP layers: decoding without drafts"
    result = run("generate", "-m", str(folder), "-p", "ab", "-n", "4")
    assert result.code == 0
    assert expected in result.err.splitlines()
    assert "accepted" not in result.out
    result = run("doctor", "-m", str(folder))
    assert (result.code, result.err) == (0, f"{expected}\n")


def test_a_checkpoint_alone_that_is_none(run: Run, tmp_path: Path) -> None:
    """`generate` ends with the first problem, `doctor` reports all of them."""
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


@pytest.mark.parametrize(
    "command", [("bench", "-n", "4", "--batch-size", "1"), ("generate", "-n", "4")]
)
def test_eager_steps_have_no_line_about_graphs(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """On a machine with a GPU, whose default is to use them."""
    monkeypatch.setattr(requested_config, "resolve_device", lambda _: torch.device("cuda"))
    result = run(*command, "-m", str(checkpoint), "--device", "cpu", "-p", "ab")
    assert result.code == 0, result.err
    assert CHOSEN in result.err.splitlines()
    assert "cuda_graph_config" not in result.err


# --- options instead of keys of the config ---


def test_draft_length_of_the_command_line(
    run: Run, config: Callable[..., str], checkpoint: Path
) -> None:
    schedule = {**EAGLE, "draft_len_schedule": {4: 3, 8: 1}}
    for source in (("-m", str(checkpoint)), ("-c", config(schedule)), ("-c", config(None))):
        for options, drafts in ((("--k", "2"), "K = 2 by 1 MTP layer"), (("--no-mtp",), "none")):
            result = run("doctor", *source, *options)
            assert result.code == 0, result.out
            assert re.search(rf"^drafts per step +{drafts}$", result.out, re.MULTILINE)
    result = run("generate", "-m", str(checkpoint), "-p", "ab", "-n", "4", "--k", "1")
    assert re.search(r"^ *with MTP .* \d+%$", result.out, re.MULTILINE)


def test_serve_takes_the_names_of_vllm(
    run: Run, config: Callable[..., str], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[LLMConfig] = []

    def load(settings: LLMConfig, *, on_progress: Callable[[str], None]) -> Any:
        on_progress("loading")
        served.append(settings)
        return MagicMock()

    monkeypatch.setattr("mtp_plugin.hosts.embedded.LLM", load)
    monkeypatch.setattr("mtp_plugin.serving.bind", nullcontext)
    monkeypatch.setattr("mtp_plugin.serving.serve", lambda *_: None)
    options = ("--max-model-len", "100", "--dtype", "bfloat16")
    for source in (
        (str(checkpoint),),
        ("--model", str(checkpoint)),
        ("-c", config(EAGLE, max_seq_len=50)),
    ):
        ran = run("serve", *source, *options)
        assert (ran.code, ran.err.splitlines()[-1]) == (0, "loading")
        assert (served[-1].model, served[-1].max_seq_len) == (str(checkpoint), 100)
        assert served[-1].dtype == "bfloat16"
    assert run("serve", str(checkpoint), "--no-mtp").code == 0
    assert served[-1].speculative_config is None
    assert run("serve", str(checkpoint), "--k", "1").code == 0
    assert served[-1].speculative_config.max_draft_len == 1
