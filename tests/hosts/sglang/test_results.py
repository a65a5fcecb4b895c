"""What the results of a step do to SGLang's requests."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest

from mtp_plugin.hosts.sglang.results import one_by_one


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
