"""What tests of the command line start with, and what comes of it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<eos>", "<think>", "</think>", "<pad>"]
VOCAB = 256 + len(SPECIALS)
EAGLE = {"decoding_type": "MTP", "max_draft_len": 3}
VANILLA = {**EAGLE, "use_mtp_vanilla": True}
RELAXED = {
    **EAGLE,
    "use_relaxed_acceptance_for_thinking": True,
    "relaxed_topk": VOCAB,
    "relaxed_delta": 1.0,
}
SYNTHETIC = {
    **EAGLE,
    "mtp": {"verification": "synthetic", "synthetic_acceptance": [0.9, 0.8, 0.7]},
}
FEW = ("-n", "2", "--no-compare", "--json")


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the special tokens."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=text == "<eos>") for text in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def open_empty_pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def texts_shown(out: str) -> list[str]:
    """The streamed outputs, marks included."""
    return re.findall(r"── output\n(.*?)\n── \d+ tokens?, finish reason", out, re.DOTALL)
