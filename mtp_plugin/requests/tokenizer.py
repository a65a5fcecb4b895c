"""Text to token ids, and what decodes them again."""

from __future__ import annotations

from typing import Any

from mtp_plugin.errors import MTPPluginError


def load_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise MTPPluginError(f"tokenizer of {path}: {error}") from error


def encode(tokenizer: Any, text: str, **options: bool) -> list[int]:
    """Token ids of a text; transformers says nothing of long ones, which admission knows better."""
    from transformers import PreTrainedTokenizerBase

    inherited = getattr(type(tokenizer), "encode", None) is PreTrainedTokenizerBase.encode
    if inherited and "encode" not in vars(tokenizer):
        options["verbose"] = False
    return list(tokenizer.encode(text, **options))


def detokenizer_of(tokenizer: Any) -> Any:
    """What decodes for a tokenizer: its backend where its class adds nothing but time to that.

    A step decodes every token of every request, and transformers' own part of it takes several
    times as long as the backend's.
    """
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.clean_up_tokenization_spaces:
        return tokenizer
    kind = type(tokenizer)
    inherits = (
        kind.decode is PreTrainedTokenizerBase.decode
        and kind._decode is PreTrainedTokenizerFast._decode
        and "decode" not in vars(tokenizer)
    )
    return tokenizer.backend_tokenizer if inherits else tokenizer
