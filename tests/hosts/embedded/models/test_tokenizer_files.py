"""Tokenizers of a checkpoint: read without any code of it, and refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from mtp_plugin.errors import CheckpointError
from mtp_plugin.hosts.embedded.models import read_config, read_tokenizer, unread_tokenizer

Edited = Callable[..., Path]
SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "b"}


@pytest.fixture
def with_tokenizer(edited: Edited) -> Callable[..., Path]:
    def write(family: str = "glm4_moe", **settings: Any) -> Path:
        path = edited(family)
        tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="c"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps({**SETTINGS, **settings}))
        return path

    return write


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_tokenizer(read_config(path))
    return str(caught.value).replace(str(path), "PATH")


def test_none_or_another_kind(with_tokenizer: Callable[..., Path]) -> None:
    path = with_tokenizer()
    (path / "tokenizer.model").write_bytes(b"")
    assert unread_tokenizer(path) == ""
    (path / "tokenizer.json").unlink()
    assert read_tokenizer(read_config(path)) is None
    assert unread_tokenizer(path) == " (tokenizer.model is not read, expected tokenizer.json)"
    (path / "tokenizer.model").unlink()
    assert unread_tokenizer(path) == ""


@pytest.mark.parametrize("family", ["glm4_moe", "mimo"])
def test_read_without_running_code(with_tokenizer: Callable[..., Path], family: str) -> None:
    path = with_tokenizer(family, auto_map={"AutoTokenizer": ["evil.Slow", "evil.Fast"]})
    (path / "evil.py").write_text("raise SystemExit('code of a checkpoint ran')")
    tokenizer = read_tokenizer(read_config(path))
    assert list(tokenizer.encode("a b", add_special_tokens=False)) == [0, 1]
    assert tokenizer.eos_token_id == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer_class": 5}, "tokenizer_class: expected text or null, got 5"),
        ({"fast_tokenizer_files": ["../other.json"]}, "fast_tokenizer_files: expected none, got a"),
        ({"model_max_length": "x"}, "model_max_length: expected a number or null, got 'x'"),
        ({"model_max_length": True}, "model_max_length: expected a number or null, got true"),
        ({"init_inputs": ["/etc/passwd"]}, "init_inputs: expected none, got a list"),
    ],
)
def test_settings(
    with_tokenizer: Callable[..., Path], settings: dict[str, Any], message: str
) -> None:
    assert refusal(with_tokenizer(**settings)).startswith(f"PATH/tokenizer_config.json: {message}")


LONG = json.dumps({"version": "9" * 5000, "model": {"type": "WordLevel", "vocab": {}}})


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("tokenizer.json", "{}", "KeyError: "),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}', ""),
        ("tokenizer.json", LONG, ""),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 5}}', "TypeError: "),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "AttributeError: "),
        ("tokenizer_config.json", '{"auto_map": 5}', "AttributeError: "),
        ("tokenizer_config.json", '{"eos_token": {"deep": {"er": 1}}}', ""),
    ],
)
def test_what_transformers_trips_over(
    with_tokenizer: Callable[..., Path], file: str, content: str, expected: str
) -> None:
    path = with_tokenizer()
    (path / file).write_text(content)
    message = refusal(path)
    assert message.startswith(f"tokenizer of PATH: it cannot be loaded: {expected}")
    assert len(message) < 600
