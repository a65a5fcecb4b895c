"""The table of verification methods: a new method needs an entry and a mode."""

from __future__ import annotations

import json

from mtp_plugin.ops.sampling import DraftedBy, VerifiedBy
from mtp_plugin.requests.options import OPTIONS
from mtp_plugin.speculative.verification import BUILT
from mtp_plugin.verifications import METHODS, codes
from tests.fresh import run_code


def test_every_name_has_a_mode() -> None:
    assert sorted(BUILT) == sorted(METHODS)


def test_requests_and_slots_know_the_names_of_the_table() -> None:
    assert OPTIONS["verification"].values.words == (
        f"one of {', '.join(codes())}, or the name of a registered method"
    )
    assert {method.name.lower(): int(method) for method in VerifiedBy}.items() <= codes().items()
    assert len(set(codes().values())) == len(codes())


def test_kinds_of_drafts_of_the_table_exist() -> None:
    kinds = {method.name.lower() for method in DraftedBy}
    assert all(set(method.drafts) <= kinds and method.drafts for method in METHODS.values())


def test_entry_and_mode_are_enough_for_config_admission_and_slots() -> None:
    """The table has the entry before other modules read it."""
    module = "tests.speculative.verification.toy_mode"
    ended = run_code(
        f"import runpy; runpy.run_module({module!r}, run_name='__main__')", unloaded=["tests"]
    )
    assert ended.returncode == 0, ended.stderr
    output = json.loads(ended.stdout)
    slot = {"verification": 3, "draft_sampling": DraftedBy.GREEDY}
    of_drafts = (
        "draft_sampling='coupled' cannot be verified by 'toy', expected one of greedy, plain"
    )
    for name in ("one", "listed"):
        assert output[name] == {
            "modes": ["strict", "toy"],
            "drafts": "greedy",
            "refusals": [],
            "of drafts": [of_drafts],
            "slot": slot,
        }
    assert output["requested"].items() >= {"verification": "toy", "draft_sampling": "plain"}.items()
    assert output["name"] == (
        "MTPPluginOptions: verification.1: "
        "expected one of 'coupled', 'rejection', 'block', 'toy', got 'unknown'"
    )
    assert output["drafts"] == (
        "MTPPluginOptions: draft_sampling: 'coupled' cannot be verified by 'toy' verification; "
        "expected one of greedy, plain"
    )
    assert "toy: leaves the rules; or the name" in output["description"]
