"""What the results of a step do to SGLang's requests."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch

from mtp_plugin.hosts.sglang.results import end_failed, has_ordered_ends, keep_status, one_by_one


@pytest.mark.parametrize(("end", "shown"), [(None, [3, 4, 5]), (2, [3, 4]), (5, [3])])
def test_tokens_of_a_step_are_seen_one_after_the_other(end: int | None, shown: list[int]) -> None:
    """A request that ends at the token ``end``; 5: it is aborted before."""
    reason = "abort" if end == 5 else None
    seen: list[tuple[int, bool]] = []
    req = SimpleNamespace(output_ids=array("q", [9, 9, 1, 2, 3]), grammar="grammar")
    req.finished = lambda: bool(seen) and (reason is not None or req.output_ids[-1] == end)
    for _ in one_by_one(req, 3):
        seen.append((len(req.output_ids), req.grammar is None))
    assert [length for length, _ in seen] == shown
    assert [length for length, is_hidden in seen if not is_hidden] == [n for n in shown if n == 5]
    assert list(req.output_ids) == [9, 9, 1, 2, 3]
    assert req.grammar == "grammar"


def test_a_status_is_read_when_the_copies_of_sglang_are_there() -> None:
    output = SimpleNamespace()
    keep_status(output, torch.zeros(1, dtype=torch.int32))
    waited: list[bool] = []
    copies = SimpleNamespace(synchronize=lambda: waited.append(True))
    end_failed(SimpleNamespace(reqs=[]), SimpleNamespace(logits_output=output, copy_done=copies))
    assert waited == [True]


@pytest.mark.parametrize(
    ("changes", "is_ordered"),
    [
        ({}, False),
        ({"stop_strs": ["a"]}, True),
        ({"stop_regex_strs": ["a+"]}, True),
        ({"max_new_tokens": 3}, True),
        ({"max_new_tokens": 4}, False),
    ],
)
def test_the_order_of_ends_matters_if_more_than_tokens_may_end_a_request(
    changes: dict[str, object], is_ordered: bool
) -> None:
    limits = {"stop_strs": [], "stop_regex_strs": [], "max_new_tokens": 9, **changes}
    req = SimpleNamespace(sampling_params=SimpleNamespace(**limits), output_ids=[1, 2, 3])
    for grammar in (None, "grammar"):
        req.grammar = grammar
        assert has_ordered_ends(req) == (is_ordered or grammar is not None)
