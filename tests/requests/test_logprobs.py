"""Log-probabilities of tokens are created when they are read."""

from __future__ import annotations

import pytest
import torch

from mtp_plugin.requests.logprobs import (
    ENTRY_WIDTH,
    RANK_INDEX,
    TOKEN_INDEX,
    TOP_IDS_INDEX,
    TOP_VALUES_INDEX,
    VALUE_INDEX,
    HostLogprobs,
    Logprob,
    Logprobs,
)


class Copy:
    """One to the host, which is waited for as often as it says."""

    def __init__(self) -> None:
        self.num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1


@pytest.fixture
def entries() -> torch.Tensor:
    """Of the tokens 7 and 8; 7 is the most likely."""
    found = torch.full((2, ENTRY_WIDTH), -1, dtype=torch.int32)
    values = found.view(torch.float32)
    for row, (token, value) in enumerate([(7, -0.5), (8, -1.5)]):
        found[row, TOKEN_INDEX], found[row, RANK_INDEX] = token, row + 1
        values[row, VALUE_INDEX] = value
        found[row, TOP_IDS_INDEX] = 7
        values[row, TOP_VALUES_INDEX] = -0.5
    return found


def test_nothing_is_waited_for_or_made_before_it_is_read(
    entries: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[int]] = []
    honest = HostLogprobs._mapping

    def mapping(self, numbers, values):
        made.append(numbers)
        return honest(self, numbers, values)

    monkeypatch.setattr(HostLogprobs, "_mapping", mapping)
    copy = Copy()
    text = Logprobs()
    for _ in range(3):
        text.append(HostLogprobs(entries, 1, copy))
    kept = text.first(3)
    text.extend(kept)
    assert (len(text), len(kept), copy.num_waits, made) == (9, 3, 0, [])
    first, second = {7: Logprob(-0.5, 1)}, {8: Logprob(-1.5, 2), 7: Logprob(-0.5, 1)}
    assert list(kept) == [first, second, first]
    assert (len(made), copy.num_waits > 0) == (3, True)
    assert list(kept) == [first, second, first]
    assert len(made) == 3  # once
