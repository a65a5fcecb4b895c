"""Whole generations in the host's loop, on the oldest and the newest API version.

They have the text of plain decoding and the acceptance of the embedded executor; nothing is left.
"""

from __future__ import annotations

import pytest

from tests.contract_host.conftest import LENGTHS, ask, free_strangers, options_of, texts
from tests.contract_host.line_rules import FULL
from tests.contract_host.requests import FinishReason
from tests.trtllm_request import word_list

lines = pytest.mark.parametrize("line", FULL)
loops = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
mixed = pytest.mark.parametrize(
    ("line", "overlap"),
    [("1.2", False), ("1.3b", True)],
    ids=lambda value: {False: "plain", True: "overlap"}.get(value, value),
)
ways = pytest.mark.parametrize("vanilla", [False, True], ids=["eagle", "vanilla"])


@lines
@loops
@pytest.mark.thinned("vanilla")
@ways
def test_text_and_acceptance(overlap, vanilla, make, prompts, decoded, embedded_steps):
    """Six requests over a batch of four, so that mates come and go; padded to four."""
    host = make(vanilla=vanilla, overlap=overlap, padded_sizes=(4,), warms_up=True)
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
def test_preemption_and_chunks(line, overlap, make, check):
    """Acceptance is another then: a request that starts over has its steps begin elsewhere, and a
    chunk whose successor only the newest API version gives feeds the draft layers a guess."""
    pauses = {"chunk_tokens": 16, "pauses_at": (2, 6, 7, 12)}
    host = make(vanilla=line == "1.2", overlap=overlap, block_size=4, **pauses)
    check(host, [18, 1, 12, 16, 2])
    assert host.executor.num_pauses == 4
    assert host.executor.acceptance_length > 1.7


@mixed
def test_stops(overlap, make, prompts, decoded):
    """An end id, a stop word that spans two steps, one in a batch of two, one that begins in the
    prompt, and one that the last token completes."""
    host = make(overlap=overlap)
    lengths = [14, 14, 14, 14, 6]
    plain = texts(decoded, prompts, lengths)
    end, word = plain[0][9], plain[1][4:8]
    requests = ask(prompts, lengths)
    requests[0].py_end_id = end
    requests[1].py_stop_words_list = word_list([[99, 98], word])
    requests[3].py_stop_words_list = word_list([[*prompts[3][-2:], *plain[3][:2]]])
    requests[4].py_stop_words_list = word_list([plain[4][-2:]])
    cut = [plain[0][: plain[0].index(end) + 1], plain[1][:8], plain[2], plain[3][:2], plain[4]]
    assert host.generate(requests) == cut
    length, words = FinishReason.LENGTH, FinishReason.STOP_WORDS
    reasons = [FinishReason.END_ID, words, length, words, length]
    assert [request.finish_reason for request in requests] == reasons
    host.assert_drained()


@mixed
def test_draws_and_log_probabilities(line, overlap, make, prompts, decoded):
    """Two sampled with a seed, one with log-probabilities, one with defaults."""
    host = make(vanilla=line == "1.3b", overlap=overlap, padded_sizes=(4,))
    requests = ask(prompts, [12] * 4, return_log_probs=True)
    requests[0].sampling_config = options_of(line, temperature=0.8, random_seed=5)
    requests[1].sampling_config = options_of(line, temperature=1.1, top_k=20, top_p=0.9)
    for number in (0, 1, 3):
        requests[number].py_return_log_probs = False
    outputs = host.generate(requests)
    reported = decoded(prompts[2], max_new_tokens=12, logprobs=0)
    assert outputs == [
        decoded(prompts[0], 1, max_new_tokens=12, temperature=0.8, seed=5).token_ids,
        decoded(prompts[1], 2, max_new_tokens=12, temperature=1.1, top_k=20, top_p=0.9).token_ids,
        reported.token_ids,
        decoded(prompts[3], max_new_tokens=12).token_ids,
    ]
    (given,) = requests[2].py_result.log_probs
    assert len(given) == 12
    for token, mine, expected in zip(reported.token_ids, given, reported.logprobs, strict=True):
        assert mine[token].logprob == pytest.approx(expected.logprob, abs=1e-4)
    assert requests[3].py_result.log_probs == [[]]
    host.assert_drained()
