"""What texts are compared with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.hosts.embedded.models import load_model
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats
from mtp_plugin.tools.comparison import PlainDecoding
from mtp_plugin.tools.terminal.decoding import PromptResult
from tests.cli.calls import EAGLE, VOCAB, byte_tokenizer
from tests.greedy import greedy_decode


@pytest.mark.parametrize(
    ("dtype", "ties", "equal"), [(torch.bfloat16, 1, 10), (torch.float32, 0, 4)]
)
def test_half_precision_ties_are_no_difference(
    checkpoint: Path, dtype: torch.dtype, ties: int, equal: int
) -> None:
    """Two words with the same row in the head: either may be chosen, and decoding goes on."""
    model = load_model(checkpoint, dtype=dtype)
    prompt, params = [5, 6, 7], SamplingParams(max_new_tokens=10, ignore_eos=True)
    truth = greedy_decode(model.target, prompt, 10)
    twin = VOCAB - 1
    head: Any = model.lm_head
    with torch.no_grad():
        head.weight[twin] = head.weight[truth[4]]
    emitted = [*truth[:4], twin]
    emitted += greedy_decode(model.target, prompt + emitted, 5)
    result = PromptResult(prompt, emitted, "", FinishReason.LENGTH, AcceptanceStats(3))
    plain = PlainDecoding(model, params, 512, None)
    (found,) = plain.verdicts([result])
    assert (len(found.ties), found.num_equal) == (ties, equal)
    if ties:
        assert found.difference is None
    else:
        assert found.difference is not None
        assert found.difference.position == 4
        assert (found.difference.token, found.difference.expected) == (twin, truth[4])


class Faithful(NamedTuple):
    note: str
    params: dict[str, Any]
    reason: FinishReason


FAITHFUL = [
    Faithful("the cap", {}, FinishReason.LENGTH),
    Faithful("a stop id", {"stop_token_ids": "5"}, FinishReason.END_ID),
    Faithful("a masked stop id", {"stop_token_ids": "5", "min_tokens": 8}, FinishReason.LENGTH),
    Faithful("a stop string", {"stop": "5"}, FinishReason.STOP_WORDS),
]


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> LLM:
    config = {"model": str(checkpoint), "speculative_config": EAGLE, "max_seq_len": 64}
    return LLM(config)


def decode(engine: LLM, params: SamplingParams) -> PromptResult:
    (output,) = engine.generate([[5, 6, 7]], params)
    reason = FinishReason(output.finish_reason)
    if isinstance(output.stop_reason, str):
        reason = FinishReason.STOP_WORDS
    return PromptResult(
        output.prompt_token_ids,
        output.token_ids,
        output.text,
        reason,
        output.acceptance,
    )


@pytest.mark.parametrize("case", FAITHFUL, ids=lambda case: case.note)
def test_oracle_ends_where_a_request_has_to(engine: LLM, case: Faithful) -> None:
    """A run is confirmed, and one token more, less or other is found, however it ended."""
    plain = decode(engine, SamplingParams(max_new_tokens=12, ignore_eos=True)).token_ids
    fifth = plain[5]
    options = dict(case.params)
    if "stop_token_ids" in options:
        options["stop_token_ids"] = (fifth,)
    if "stop" in options:
        options["stop"] = (byte_tokenizer().decode([fifth]),)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, **options)
    result = decode(engine, params)
    assert result.finish_reason is case.reason
    tokens = result.token_ids

    def differences(token_ids: list[int]) -> list[int]:
        engine.model.set_attn_implementation("sdpa")
        try:
            plain = PlainDecoding(engine.model, params, 64, engine.tokenizer)
            (found,) = plain.verdicts([dataclasses.replace(result, token_ids=token_ids)])
            return [] if found.difference is None else [found.difference.position + 1]
        finally:
            engine.model.set_attn_implementation("mtp_paged_sdpa")

    assert differences(tokens) == []
    assert differences(tokens[:-1]) == [len(tokens)]
    assert differences([*tokens, 3]) == [len(tokens) + 1]
    assert differences([*tokens[:2], tokens[2] ^ 1, *tokens[3:]]) == [3]
