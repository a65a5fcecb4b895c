"""Prompts of one length: text if there is a tokenizer, else random ids."""

from __future__ import annotations

import random
from pathlib import Path

from integration.bench.e2e.subject import Subject
from mtp_plugin.requests.tokenizer import encode
from mtp_plugin.tools.terminal.prompts import BUNDLED, prompts_of_file


def make_prompts(subject: Subject, count: int, length: int, seed: int) -> list[list[int]]:
    """``count`` different prompts of ``length`` tokens; the first ones do not depend on the count.

    With a tokenizer they are bundled texts in a row, the last one cut if it was the last before.
    """
    rng = random.Random(seed)
    texts = _bundled(subject)
    if not texts:
        vocab = subject.model.facts.vocab_size
        return [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]
    whole = [encode(subject.tokenizer, text) for text in texts]
    prompts = []
    for number in range(count):
        last = whole[number % len(whole)]
        if number >= len(whole):
            last = last[: rng.randint(len(last) // 2, len(last))]
        order = [*rng.sample(whole, len(whole)), last]
        stream = [token for ids in order for token in ids]
        while len(stream) < length:
            stream = stream + stream
        prompts.append(stream[-length:])
    return prompts


def make_pieces(subject: Subject, count: int, longest: int, seed: int) -> list[list[int]]:
    """``count`` prompts of 1 to ``longest`` tokens each."""
    rng = random.Random(seed)
    prompts = make_prompts(subject, count, longest, seed)
    return [prompt[-rng.randint(1, longest) :] for prompt in prompts]


def _bundled(subject: Subject) -> list[str]:
    file = Path(subject.path).parent / BUNDLED
    return prompts_of_file(file) if subject.tokenizer is not None and file.is_file() else []
