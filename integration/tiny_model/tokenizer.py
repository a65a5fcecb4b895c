"""The byte-level BPE tokenizer of the tiny model."""

from pathlib import Path

from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Encode each text and close it with the document separator."""
    separator = tokenizer.encode(END_OF_TEXT).ids
    return [encoding.ids + separator for encoding in tokenizer.encode_batch(texts)]
