"""A byte-level BPE tokenizer: every digit is one token, and the thinking tags are special."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from integration.thinking_model.problems import BEGIN, END, END_OF_TEXT

VOCAB_SIZE = 512
SPECIAL_TOKENS = (END_OF_TEXT, BEGIN, END)
"""In the order of their ids."""


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train the tokenizer."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write the two files that transformers reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        # the template begins the thinking phase, as those of reasoning models do
        "chat_template": f"{{{{ messages[-1].content }}}}\n{BEGIN}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
