"""The same checkpoint through transformers' own ``generate``, with and without ``use_mtp``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
import transformers

from integration.bench.case import BenchmarkError
from integration.bench.e2e.batch import Run, synchronize
from integration.bench.e2e.gate import Gate, Match
from integration.bench.e2e.subject import Subject
from mtp_plugin.errors import expect
from mtp_plugin.hosts.embedded.models import LoadedModel
from mtp_plugin.hosts.embedded.models.loader import quiet_transformers
from mtp_plugin.tools.parity import transformers_attention

SHARE_OF_SHORT_RUN = 4
"""A run of one n-th of the tokens is taken off, and with it all that a call costs but decoding."""


@dataclass(frozen=True)
class GenerateFigures:
    """One way to call ``generate``, batch 1."""

    seconds: float
    num_tokens: int
    decode_tokens_per_second: float
    """Without prompts and, with ``use_mtp``, without loading the MTP layers, which every call of
    ``generate`` does anew."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "tokens": self.num_tokens,
            "tokens_per_second": self.num_tokens / self.seconds,
            "decode_tokens_per_second": self.decode_tokens_per_second,
        }


@dataclass(frozen=True)
class GenerateOutcome:
    """``generate`` without and with ``use_mtp``, or why there are no results."""

    without_mtp: GenerateFigures | None = None
    with_mtp: GenerateFigures | None = None
    match: Match | None = None
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For the JSON document; without figures unless the tokens matched."""
        without_mtp, with_mtp = self.without_mtp, self.with_mtp
        described: dict[str, Any] = {
            "version": transformers.__version__,
            "batch": 1,
            "host_bound": True,  # every call of it launches eagerly
            "match": None if self.match is None else self.match.as_dict(),
            "error": self.error,
        }
        if without_mtp is not None:
            described["generate"] = without_mtp.as_dict()
        if with_mtp is not None:
            described["generate_use_mtp"] = with_mtp.as_dict()
        if without_mtp is not None and with_mtp is not None:
            ratio = with_mtp.decode_tokens_per_second / without_mtp.decode_tokens_per_second
            described["speed_up"] = ratio
        return described


def measure_transformers(
    subject: Subject, gate: Gate, prompts: Sequence[list[int]], num_tokens: int, off: Run
) -> GenerateOutcome:
    """Run the prompts one after the other through ``generate``, both ways.

    Args:
        off: the executor's run of these prompts without MTP, whose tokens both must give.
    """
    model = subject.model
    found = GenerateOutcome()
    quiet = quiet_transformers()
    with transformers_attention(model), _without_end(model), _known_mtp_keys(model), quiet:
        for use_mtp in (False, True):
            try:
                figures, tokens = _measure(subject, prompts, num_tokens, use_mtp=use_mtp)
            except Exception as error:  # what transformers lacks for a family is its own to say
                return replace(found, error=f"use_mtp={use_mtp}: {type(error).__name__}: {error}")
            match = gate.match_tokens(prompts, tokens, off.token_ids[: len(prompts)])
            found = replace(found, match=match)
            if not match.holds:
                return replace(found, error=f"use_mtp={use_mtp}: {'; '.join(match.mismatches)}")
            found = (
                replace(found, with_mtp=figures) if use_mtp else replace(found, without_mtp=figures)
            )
    return found


def _measure(
    subject: Subject, prompts: Sequence[list[int]], num_tokens: int, *, use_mtp: bool
) -> tuple[GenerateFigures, list[list[int]]]:
    few = num_tokens // SHARE_OF_SHORT_RUN
    expect(few >= 1, BenchmarkError, f"generate: {num_tokens} tokens are too few to time")
    _generate(subject, prompts[0], few, use_mtp=use_mtp)  # warm
    seconds = short_seconds = 0.0
    tokens = []
    for prompt in prompts:
        spent, ids = _generate(subject, prompt, num_tokens, use_mtp=use_mtp)
        tokens.append(ids)
        seconds += spent
        short_seconds += _generate(subject, prompt, few, use_mtp=use_mtp)[0]
    decoded = len(prompts) * (num_tokens - few)
    rate = decoded / max(seconds - short_seconds, 1e-9)
    return GenerateFigures(seconds, len(prompts) * num_tokens, rate), tokens


def _generate(
    subject: Subject, prompt: list[int], num_tokens: int, *, use_mtp: bool
) -> tuple[float, list[int]]:
    target: Any = subject.model.target
    ids = torch.tensor([prompt], device=subject.device)
    options: dict[str, Any] = {"use_mtp": True} if use_mtp else {}
    synchronize(subject.device)
    start = perf_counter()
    output = target.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        **options,
    )
    synchronize(subject.device)
    seconds = perf_counter() - start
    return seconds, output[0, len(prompt) :].tolist()


@contextmanager
def _without_end(model: LoadedModel) -> Iterator[None]:
    """No token ends a text, as in the executor's runs."""
    generation: Any = model.target.generation_config
    former = generation.eos_token_id
    generation.eos_token_id = None
    try:
        yield
    finally:
        generation.eos_token_id = former


@contextmanager
def _known_mtp_keys(model: LoadedModel) -> Iterator[None]:
    """Let transformers know the keys of the MTP layers in the checkpoint.

    It finds them through a list that names the layer numbers of released models alone.
    """
    target: Any = model.target
    former = target._keys_to_ignore_on_load_unexpected
    names, facts = model.family.names, model.facts
    target._keys_to_ignore_on_load_unexpected = [
        re.escape(template.format(layer=facts.num_hidden_layers + depth, depth=depth)) + r"\..*"
        for depth in range(facts.num_mtp_layers)
        for template in (names.block, names.enorm, names.hnorm, names.eh_proj, names.norm)
    ]
    try:
        yield
    finally:
        target._keys_to_ignore_on_load_unexpected = former
