"""Text to token ids, and what decodes them again."""

from __future__ import annotations

import sys
from typing import Any

from mtp_plugin.errors import MTPPluginError
from mtp_plugin.extras import MODEL_PACKAGES, require


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a checkpoint directory.

    Raises:
        MTPPluginError: it does not load.
        MissingExtraError: transformers is not installed.
    """
    require("a checkpoint's tokenizer", *MODEL_PACKAGES)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise MTPPluginError(f"tokenizer of {path}: {error}") from error


def encode(tokenizer: Any, text: str, **options: bool) -> list[int]:
    """Token ids of a text; transformers says nothing of long ones, which admission knows better."""
    transformers = _transformers()
    if transformers is not None:
        base = transformers.PreTrainedTokenizerBase
        inherited = getattr(type(tokenizer), "encode", None) is base.encode
        if inherited and "encode" not in vars(tokenizer):
            options["verbose"] = False
    return list(tokenizer.encode(text, **options))


def detokenizer_of(tokenizer: Any) -> Any:
    """What decodes for a tokenizer: its backend where its class adds nothing but time to that.

    A step decodes every token of every request, and transformers' own part of it takes several
    times as long as the backend's.
    """
    transformers = _transformers()
    if transformers is None:
        return tokenizer
    fast = transformers.PreTrainedTokenizerFast
    if not isinstance(tokenizer, fast) or tokenizer.clean_up_tokenization_spaces:
        return tokenizer
    kind = type(tokenizer)
    inherits = (
        kind.decode is transformers.PreTrainedTokenizerBase.decode
        and kind._decode is fast._decode
        and "decode" not in vars(tokenizer)
    )
    return tokenizer.backend_tokenizer if inherits else tokenizer


def _transformers() -> Any:
    """The package where it is loaded, as it is wherever a tokenizer is of its classes; or None."""
    return sys.modules.get("transformers")
