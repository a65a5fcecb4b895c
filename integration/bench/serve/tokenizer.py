"""A tokenizer for models without one, so that their output is detokenized too."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_tokenizer(vocab_size: int) -> Any:
    """Return a byte-level tokenizer whose tokens are words of letters after a space."""
    vocab = {"Ġ" + _word(token): token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def _word(number: int) -> str:
    word = ""
    while True:
        number, letter = divmod(number, len(LETTERS))
        word += LETTERS[letter]
        if not number:
            return word
