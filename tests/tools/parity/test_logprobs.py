"""Log-probabilities with those of the target, a row by hand and texts of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mtp_plugin.infer import SamplingRule
from mtp_plugin.infer.decoding import LogprobsMode
from mtp_plugin.infer.logprobs import logprobs_of
from mtp_plugin.requests.logprobs import Logprob, TokenLogprobs
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.tools.parity import LogprobComparison, LogprobMismatch, TieRule, compare_logprobs
from mtp_plugin.tools.parity.logprobs import TargetRow

VALUES = torch.tensor([-2.0, -0.5, -3.0, -2.0, -1.5, -torch.inf])
"""Ranks 3, 1, 5, 4, 2 and 6."""
ROW = TargetRow(VALUES, token=3, num_top=2, tolerance=0.01)
RIGHT = {3: Logprob(-2.0, 4), 1: Logprob(-0.5, 1), 4: Logprob(-1.5, 2)}


def compared(expected_value: TokenLogprobs, row: TargetRow = ROW) -> LogprobComparison:
    found = LogprobComparison()
    found.add(7, expected_value, row, in_prompt=False)
    return found


@pytest.mark.parametrize(
    ("expected_value", "gap"),
    [
        ({}, 0.0),
        ({3: Logprob(-2.0, 3)}, 0.0),
        ({3: Logprob(-2.0 + 2**-8, 4)}, 2**-8),
        ({4: Logprob(-1.5, 2)}, 0.0),
    ],
    ids=["exact", "the other rank of equals", "nearly", "another order"],
)
def test_what_the_target_says_is_no_difference(expected_value: TokenLogprobs, gap: float) -> None:
    assert compared({**RIGHT, **expected_value}) == LogprobComparison(3, gap)


@pytest.mark.parametrize(
    ("expected_value", "token"),
    [
        ({**RIGHT, 3: Logprob(-2.02, 4)}, 3),
        ({**RIGHT, 4: Logprob(-1.48, 2)}, 4),
        ({**RIGHT, 3: Logprob(-2.0, 2)}, 3),
        ({**RIGHT, 3: Logprob(-2.0, 5)}, 3),
        ({3: RIGHT[3], 1: RIGHT[1]}, 4),
        ({1: RIGHT[1], 4: RIGHT[4]}, 3),
        ({**RIGHT, 5: Logprob(-9.0, 6)}, 5),
        ({**RIGHT, 3: Logprob(float("nan"), 4)}, 3),
    ],
    ids=["lower", "higher", "rank", "late", "second left out", "left out", "impossible", "NaN"],
)
def test_what_the_target_does_not_say_is_reported(
    expected_value: TokenLogprobs, token: int
) -> None:
    (found,) = compared(expected_value).mismatches
    expected = {3: RIGHT[3], 4: RIGHT[4], 5: Logprob(-torch.inf, 6)}[token]
    assert found == LogprobMismatch(7, False, token, expected_value.get(token), expected, 0.01)


def test_rounding_may_order_what_is_equally_likely() -> None:
    row = TargetRow(torch.tensor([-1.0, -1.01, -3.0]), token=2, num_top=1, tolerance=0.01)
    expected_value = {2: Logprob(-3.0, 3), 1: Logprob(-1.005, 1)}
    assert compared(expected_value, row).mismatches == []
    assert compared({2: expected_value[2], 1: Logprob(-1.005, 3)}, row).mismatches != []


def test_where_nothing_is_reported_each_id_is_lacking_once() -> None:
    row = TargetRow(VALUES, token=4, num_top=3, tolerance=0.01)
    assert [one.token for one in compared({}, row).mismatches] == [4, 1, 0]


def test_an_id_without_probabilities_need_not_be_reported_of() -> None:
    row = TargetRow(torch.tensor([0.0, -torch.inf]), token=0, num_top=2, tolerance=0.01)
    assert compared({0: Logprob(0.0, 1)}, row).mismatches == []
    assert compared({0: Logprob(0.0, 1), 1: Logprob(-torch.inf, 2)}, row) == LogprobComparison(2)


TABLE = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)) * 3
PROMPT, EMITTED = [3, 1, 4], [1, 5, 2]


class Table:
    """A target whose logits hang on the last token alone."""

    def logits(self, token_ids: Sequence[int], num_rows: int) -> torch.Tensor:
        return TABLE[list(token_ids)[-num_rows:]]


def entry_of(row: torch.Tensor, token: int, num_top: int) -> TokenLogprobs:
    own, order = logprobs_of(row, token, num_top), row.sort(descending=True).indices.tolist()
    expected_value = {token: Logprob(own.logprob, order.index(token) + 1)}
    for rank, (other, value) in enumerate(own.top.items(), 1):
        expected_value.setdefault(other, Logprob(value, rank))
    return expected_value


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.9}], ids=["", "sampled"])
def test_prompt_and_text(mode: LogprobsMode, options: dict[str, Any]) -> None:
    """Each token by the row before it; processed rows of the output if requested."""
    params = SamplingParams(logprobs=2, prompt_logprobs=1, logit_bias={5: 2.0}, **options)
    sampling = SamplingRule(params, PROMPT)
    rows = TABLE[[PROMPT[-1], *EMITTED[:-1]]]
    if mode == "processed":
        rows = torch.stack([sampling.scores(row, EMITTED[:n]) for n, row in enumerate(rows)])
    text = [entry_of(row, token, 2) for row, token in zip(rows, EMITTED, strict=True)]
    before = TABLE[PROMPT[:-1]]
    prompt = [None, *(entry_of(row, t, 1) for row, t in zip(before, PROMPT[1:], strict=True))]

    def found(**expected_value: Any) -> LogprobComparison:
        expected_value = {"logprobs": text, "prompt_logprobs": prompt, **expected_value}
        rule: Any = TieRule(torch.float32)
        return compare_logprobs(Table(), rule, sampling, EMITTED, mode=mode, **expected_value)  # type: ignore[arg-type]

    assert found().mismatches == []
    assert found().num_values == sum(map(len, [*text, *prompt[1:]]))  # type: ignore[arg-type]
    assert found(logprobs=None).num_values == sum(map(len, prompt[1:]))  # type: ignore[arg-type]
    assert found(prompt_logprobs=None).num_values == sum(map(len, text))
    (lost, *_) = found(logprobs=text[:2]).mismatches
    assert (lost.position, lost.in_prompt, lost.token, lost.reported) == (
        2,
        False,
        EMITTED[2],
        None,
    )
    (lost, *_) = found(prompt_logprobs=[*prompt[:1], prompt[2], prompt[2]]).mismatches
    assert (lost.position, lost.in_prompt) == (1, True)
    if options:
        wrong: Any = "raw" if mode == "processed" else "processed"
        assert compare_logprobs(
            Table(),  # type: ignore[arg-type]
            TieRule(torch.float32),
            sampling,
            EMITTED,
            logprobs=text,
            prompt_logprobs=None,
            mode=wrong,
        ).mismatches


def test_how_near_log_probabilities_are_the_same() -> None:
    single, half = TieRule(torch.float32), TieRule(torch.bfloat16)
    assert single.logprob_tolerance(10.0, 1.0) == 1e-4
    assert single.logprob_tolerance(10.0, 1e-3) == 4 * 2.0**-20 / 1e-3
    assert half.logprob_tolerance(10.0, 0.5) == 4 * 2.0**-4 / 0.5
    assert TieRule(torch.bfloat16, 0).logprob_tolerance(10.0, 0.5) == 1e-4
