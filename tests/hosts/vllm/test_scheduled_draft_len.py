"""The number of drafts of a step, as the plugin sets it in vLLM's scheduler."""

from __future__ import annotations

import pytest

from mtp_plugin.hosts.vllm.scheduled_draft_len import schedule_of


@pytest.mark.parametrize(
    ("lengths", "most", "expected"),
    [
        ((0, 1, 2, 3), 8, [(1, 5, 0), (6, 6, 1), (7, 7, 2), (8, 8, 3)]),
        ((3, 7), 2, [(1, 1, 3), (2, 2, 7)]),
        ((2,), 1, [(1, 1, 2)]),
    ],
)
def test_every_length_has_graphs_for_almost_all_batch_sizes(lengths, most, expected) -> None:
    assert schedule_of(lengths, most) == expected
