"""Whole generations in the host's loop, on the oldest and the newest API version.

They have the text of plain decoding and the acceptance of the embedded executor; nothing is left.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.contract_host.behaviours import FinishReason
from tests.contract_host.conftest import END_ID
from tests.contract_host.host import Host, make_host
from tests.contract_host.line_rules import FULL, LINES
from tests.contract_host.requests import LlmRequest

lines = pytest.mark.parametrize("line", FULL)
loops = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
mixed = pytest.mark.parametrize(
    ("line", "overlap"),
    [("1.2", False), ("1.3b", True)],
    ids=lambda value: {False: "plain", True: "overlap"}.get(value, value),
)
ways = pytest.mark.parametrize("vanilla", [False, True], ids=["eagle", "vanilla"])

LENGTHS = [16, 1, 10, 14, 2, 12]


def ask(prompts: list[list[int]], lengths: list[int] = LENGTHS, **options: Any) -> list[LlmRequest]:
    """A request per length, ids from 1 on."""
    return [
        LlmRequest(number, prompts[number - 1], count, end_id=END_ID, **options)
        for number, count in enumerate(lengths, start=1)
    ]


def texts(decoded: Any, prompts: list[list[int]], lengths: list[int] = LENGTHS) -> list[list[int]]:
    return [
        decoded(prompt, max_new_tokens=count).token_ids
        for prompt, count in zip(prompts, lengths, strict=False)
    ]


def options_of(line: str, **options: Any) -> SimpleNamespace:
    """A sampling config in the line's form."""
    if not LINES[line].is_newest:
        options = {name: [value] for name, value in options.items()}
    return SimpleNamespace(beam_width=1, **options)


def free_strangers(host: Host) -> None:
    """Free unknown ids."""
    host.executor.managers.free_resources(LlmRequest(77_777, [1], 1))


@lines
@loops
@pytest.mark.thinned("vanilla")
@ways
def test_text_and_acceptance(line, overlap, vanilla, tiny_model, prompts, decoded, embedded_steps):
    """Six requests over a batch of four, so that mates come and go; padded to four."""
    host = make_host(line, tiny_model, vanilla=vanilla, overlap=overlap, padded_sizes=(4,))
    free_strangers(host)
    requests = ask(prompts)
    assert host.generate(requests) == texts(decoded, prompts)
    free_strangers(host)
    expected = embedded_steps(prompts[: len(LENGTHS)], LENGTHS, vanilla=vanilla)
    assert host.executor.histogram == expected
    assert host.executor.acceptance_length > 2
    steps = host.executor.histogram.total()
    assert host.executor.num_verified == 3 * steps
    assert host.executor.num_accepted >= sum((n - 1) * c for n, c in expected.items())
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)
    assert host.engine.num_padded_steps > 0
    assert host.engine.attn_metadata.spilled_rows == 0
    host.assert_drained()


@mixed
@ways
def test_preemption_and_chunks(line, overlap, vanilla, tiny_model, prompts, decoded):
    """Acceptance is another then: who starts over has its steps begin elsewhere, and a chunk whose
    successor only the newest API version gives feeds the draft layers a guess."""
    host = make_host(
        line,
        tiny_model,
        vanilla=vanilla,
        overlap=overlap,
        block_size=4,
        num_blocks=28,
        chunk_tokens=16,
        pauses_at=() if vanilla else (2, 6, 7, 12),
        warms_up=False,
    )
    lengths = [18, 1, 12, 16, 2]
    assert host.generate(ask(prompts, lengths)) == texts(decoded, prompts, lengths)
    assert host.executor.num_pauses >= (1 if vanilla else 4)  # without blocks, or on request
    assert host.executor.acceptance_length > 1.7
    host.assert_drained()


@mixed
def test_stops(line, overlap, tiny_model, prompts, decoded):
    """An end id, a stop word that spans two steps, one in a batch of two, one that begins in the
    prompt, and one that the last token completes."""
    host = make_host(line, tiny_model, vanilla=False, overlap=overlap)
    lengths = [14, 14, 14, 14, 6]
    plain = texts(decoded, prompts, lengths)
    end, word = plain[0][9], plain[1][4:8]
    requests = ask(prompts, lengths)
    requests[3].py_stop_words_list = [[*prompts[3][-2:], *plain[3][:2]], [4, -1, -1, -1]]
    requests[4].py_stop_words_list = [plain[4][-2:], [2, -1]]
    requests[0].py_end_id = end
    requests[1].py_stop_words_list = [[99, 98, *word], [2, 6, -1, -1, -1, -1]]
    assert host.generate(requests) == [
        plain[0][: plain[0].index(end) + 1],
        plain[1][:8],
        plain[2],
        plain[3][:2],
        plain[4],
    ]
    length, words = FinishReason.LENGTH, FinishReason.STOP_WORDS
    reasons = [FinishReason.END_ID, words, length, words, length]
    assert [request.finish_reason for request in requests] == reasons
    host.assert_drained()


@mixed
def test_draws_and_log_probabilities(line, overlap, tiny_model, prompts, decoded):
    """Two sampled with a seed, one with log-probabilities, one with defaults."""
    vanilla = line == "1.3b"
    host = make_host(line, tiny_model, vanilla=vanilla, overlap=overlap, padded_sizes=(4,))
    requests = ask(prompts, [12] * 4)
    requests[0].sampling_config = options_of(line, temperature=0.8, random_seed=5)
    requests[1].sampling_config = options_of(line, temperature=1.1, top_k=20, top_p=0.9)
    requests[2].py_return_log_probs = True
    outputs = host.generate(requests)
    reported = decoded(prompts[2], max_new_tokens=12, logprobs=0)
    assert outputs == [
        decoded(prompts[0], 1, max_new_tokens=12, temperature=0.8, seed=5).token_ids,
        decoded(prompts[1], 2, max_new_tokens=12, temperature=1.1, top_k=20, top_p=0.9).token_ids,
        reported.token_ids,
        decoded(prompts[3], max_new_tokens=12).token_ids,
    ]
    given = [entry[0][0] for entry in requests[2].py_result.log_probs]
    assert len(given) == 12
    for token, mine, expected in zip(reported.token_ids, given, reported.logprobs, strict=True):
        assert mine[token].logprob == pytest.approx(expected.logprob, abs=1e-4)
    host.assert_drained()
