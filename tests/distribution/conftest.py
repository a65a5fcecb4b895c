"""What all languages share."""

from __future__ import annotations

import pytest

from mtp_plugin.ops import logits_processor_state
from mtp_plugin.speculative.state import logits_processor_allocator


@pytest.fixture(autouse=True)
def few_words(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools have room for 8 bad words of 4 ids: torch compares all ids of a row to each other.

    Kernels are made for the real size.
    """
    if request.node.get_closest_marker("gpu"):
        return
    for module in (logits_processor_state, logits_processor_allocator):
        monkeypatch.setattr(module, "MAX_BAD_WORDS", 8)
        monkeypatch.setattr(module, "MAX_BAD_WORD_LEN", 4)
