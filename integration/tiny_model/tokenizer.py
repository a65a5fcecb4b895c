"""The byte-level BPE tokenizer of the tiny model."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
THINK_START = "<think>"
THINK_END = "</think>"
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ message.content }}
{%- else -%}
{{ '# ' + message.content | replace('\\n', '\\n# ') }}
{%- endif -%}
{%- if not loop.last or add_generation_prompt -%}
{{ '\\n' }}
{%- endif -%}
{%- endfor -%}
"""
"""Messages are comments, answers are code: the model only continues Python files."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE whose first ids are the three special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[
            AddedToken(END_OF_TEXT, special=True, normalized=False),
            AddedToken(THINK_START, special=False, normalized=False),
            AddedToken(THINK_END, special=False, normalized=False),
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write `tokenizer.json` and the settings that `AutoTokenizer` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Encode each text and close it with the document separator."""
    separator = tokenizer.encode(END_OF_TEXT).ids
    return [encoding.ids + separator for encoding in tokenizer.encode_batch(texts)]
