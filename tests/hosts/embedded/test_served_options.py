"""What the page of options says is given is what an executor of that config gives."""

from __future__ import annotations

from typing import Any

import pytest

from mtp_plugin.requests.options import DRAFTS_OF_VERIFICATION, OPTIONS
from tests.hosts.embedded.test_relaxed import RELAXED
from tests.test_readme_options import NO_DRAFTS, SYNTHETIC, served
from tests.test_readme_options import RELAXED as RELAXED_WAY

CONFIGS: dict[str, dict[str, Any]] = {
    **{
        name: {"mtp": {"verification": name, "draft_sampling": drafts[0]}}
        for name, drafts in DRAFTS_OF_VERIFICATION.items()
    },
    RELAXED_WAY: {"speculative": RELAXED},
    SYNTHETIC: {"mtp": {"verification": SYNTHETIC, "synthetic_acceptance": 0.5}},
    NO_DRAFTS: {"k": 0},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_page_is_of_executors(harness, name: str) -> None:
    with harness.llm(**CONFIGS[name]) as llm:
        given = llm.pieces.served_options & set(OPTIONS)
    listed = served()[name] & set(OPTIONS)
    assert given | {"thinking_token_budget"} == listed
    # where the end of thinking is known
    assert ("thinking_token_budget" in given) == (name == RELAXED_WAY)


def test_every_way_of_the_page_is_tried() -> None:
    assert set(CONFIGS) == set(served())
