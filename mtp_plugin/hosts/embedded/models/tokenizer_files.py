"""Loads the tokenizer of a checkpoint directory after checking its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from mtp_plugin.checkpoint.files import TOKENIZER_FILE, TOKENIZER_SETTINGS, read_json
from mtp_plugin.config.messages import got
from mtp_plugin.errors import CheckpointError
from mtp_plugin.hosts.embedded.models.config_reader import LONGEST_REASON, CheckedConfig
from mtp_plugin.requests.tokenizer import is_failure

_OTHERS = ("added_tokens.json", "special_tokens_map.json")
_UNREAD = ("tokenizer.model", "spiece.model", "tiktoken.model", "vocab.json")
"""Tokenizers that transformers would have to convert first."""
_FOREIGN = ("fast_tokenizer_files", "init_inputs")
"""Settings that name other files, or positional arguments."""


def read_tokenizer(checked: CheckedConfig) -> Any:
    """Load the tokenizer of a checked config; None: the checkpoint has none.

    No code of the checkpoint runs: an `auto_map` is ignored.

    Raises:
        CheckpointError: a tokenizer file is not a JSON object or cannot be used.
    """
    if not (checked.directory / TOKENIZER_FILE).is_file():
        return None
    return read_tokenizer_of(checked.directory, config=checked.config)


def read_tokenizer_of(directory: Path, **settings: Any) -> Any:
    """Load the tokenizer of a folder that has the tokenizer's file; see `read_tokenizer`.

    Args:
        settings: further arguments of `AutoTokenizer`.
    """
    for name in (TOKENIZER_FILE, TOKENIZER_SETTINGS, *_OTHERS):
        if name == TOKENIZER_FILE or (directory / name).exists():
            _check_file(directory / name)
    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False, **settings
        )
    except BaseException as error:
        if not is_failure(error):
            raise
        raise CheckpointError(
            f"tokenizer of {directory}: it cannot be loaded: {type(error).__name__}: "
            f"{str(error)[:LONGEST_REASON]}"
        ) from error


def unread_tokenizer(directory: Path) -> str:
    """Describe a tokenizer in an unsupported format; empty: there is none."""
    if (directory / TOKENIZER_FILE).is_file():
        return ""
    found = [name for name in _UNREAD if (directory / name).is_file()]
    return f" ({found[0]} is not read, expected {TOKENIZER_FILE})" if found else ""


def _check_file(file: Path) -> None:
    content = read_json(file)
    if file.name != TOKENIZER_SETTINGS:
        return
    kind = content.get("tokenizer_class")
    if kind is not None and not isinstance(kind, str):
        raise CheckpointError(f"{file}: tokenizer_class: expected text or null, got {got(kind)}")
    longest = content.get("model_max_length")
    if isinstance(longest, bool) or not isinstance(longest, int | float | None):
        raise CheckpointError(
            f"{file}: model_max_length: expected a number or null, got {got(longest)}"
        )
    for key in _FOREIGN:
        if content.get(key):
            raise CheckpointError(f"{file}: {key}: expected none, got {got(content[key])}")
