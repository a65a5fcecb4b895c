"""Prompts of one length: text where the subject can read, else random ids."""

from __future__ import annotations

import json
import random
from pathlib import Path

from mtp_plugin.errors import expect
from mtp_plugin.requests.tokenizer import encode
from mtp_plugin.tools.bench.case import BenchmarkError
from mtp_plugin.tools.bench.e2e.subject import Subject

BUNDLED = "prompts.json"
"""Prompts that lie in the folder around a checkpoint."""


def make_prompts(subject: Subject, count: int, length: int, seed: int) -> list[list[int]]:
    """``count`` different prompts of ``length`` tokens; the first ones do not depend on the count.

    Text prompts are bundled ones in a row, the last one cut where it was the last one before.

    Raises:
        BenchmarkError: bundled prompts that cannot be read.
    """
    dice = random.Random(seed)
    texts = _bundled(subject)
    if not texts:
        vocab = subject.model.facts.vocab_size
        return [[dice.randrange(vocab) for _ in range(length)] for _ in range(count)]
    whole = [encode(subject.tokenizer, text) for text in texts]
    prompts = []
    for number in range(count):
        last = whole[number % len(whole)]
        if number >= len(whole):
            last = last[: dice.randint(len(last) // 2, len(last))]
        order = [*dice.sample(whole, len(whole)), last]
        stream = [token for ids in order for token in ids]
        while len(stream) < length:
            stream = stream + stream
        prompts.append(stream[-length:])
    return prompts


def make_pieces(subject: Subject, count: int, longest: int, seed: int) -> list[list[int]]:
    """``count`` prompts of 1 to ``longest`` tokens each.

    Raises:
        BenchmarkError: bundled prompts that cannot be read.
    """
    dice = random.Random(seed)
    prompts = make_prompts(subject, count, longest, seed)
    return [prompt[-dice.randint(1, longest) :] for prompt in prompts]


def _bundled(subject: Subject) -> list[str]:
    file = Path(subject.path).parent / BUNDLED
    if subject.tokenizer is None or not file.is_file():
        return []
    content = json.loads(file.read_text(encoding="utf-8"))
    texts = [item["prompt"] if isinstance(item, dict) else item for item in content]
    expect(
        all(isinstance(text, str) and text for text in texts),
        BenchmarkError,
        f"{file}: expected a list of prompts",
    )
    return texts
