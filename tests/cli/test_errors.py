"""What is refused is one line that names it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from tokenizers.processors import TemplateProcessing

from tests.cli.calls import EAGLE, FEW, Run, byte_tokenizer


def test_named_errors_are_one_line_each(run: Run, config: Callable[..., str]) -> None:
    file = config({"decoding_type": "MTP", "max_draft_len": 99}, max_batch_sizes=3)
    result = run("generate", "-c", file, "-p", "x")
    assert result.code == 2
    lines = result.err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"error: {file}: ") for line in lines)
    assert "max_draft_len: should be less than or equal to 16, got 99" in result.err
    assert "max_batch_sizes: unknown key; did you mean max_batch_size?" in result.err
    assert result.out == ""


def test_doctor_reports_of_a_tokenizer_that_is_not_read(
    run: Run, config: Callable[..., str], checkpoint: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    (other / "tokenizer.json").rename(other / "tokenizer.model")
    result = run("doctor", "-c", config(EAGLE, model=str(other)))
    expected = "prompts must be token ids (tokenizer.model is not read, expected tokenizer.json)"
    assert f"none: {expected}" in result.out
    result = run("generate", "-m", str(other), "-p", "ab")
    assert result.code == 2
    assert f"no tokenizer: {expected}" in result.err.splitlines()
    assert result.err.splitlines()[-1] == (
        "error: request 0: a text prompt needs a tokenizer, the checkpoint has no tokenizer.json"
    )


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
