"""The table of ways to judge drafts: what a row of it is enough for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from mtp_plugin.requests.options import OPTIONS
from mtp_plugin.speculative.ops.sampling import DraftedBy, VerifiedBy
from mtp_plugin.speculative.verification import BUILT
from mtp_plugin.verifications import WAYS, codes

ROOT = Path(__file__).parents[3]


def test_every_name_has_a_mode() -> None:
    assert sorted(BUILT) == sorted(WAYS)


def test_requests_and_slots_know_the_names_of_the_table() -> None:
    assert OPTIONS["verification"].values.words == f"one of {', '.join(codes())}"
    assert {way.name.lower(): int(way) for way in VerifiedBy}.items() <= codes().items()
    assert len(set(codes().values())) == len(codes())


def test_drafts_can_be_drawn_as_the_table_says() -> None:
    drawn = {way.name.lower() for way in DraftedBy}
    assert all(set(way.drafts) <= drawn and way.drafts for way in WAYS.values())


def test_a_row_is_enough_for_config_admission_and_slots() -> None:
    """In a process of its own, in which the row stands before anybody reads the table."""
    program = [sys.executable, "-m", "tests.speculative.verification.toy_mode"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    slot = {"verification": 3, "draft_sampling": DraftedBy.GREEDY}
    of_drafts = (
        "draft_sampling='coupled' cannot be verified by 'dice', expected one of greedy, plain"
    )
    for name in ("one", "listed"):
        assert told[name] == {
            "modes": ["strict", "dice"],
            "drafts": "greedy",
            "refusals": [],
            "of drafts": [of_drafts],
            "slot": slot,
        }
    assert told["asked"].items() >= {"verification": "dice", "draft_sampling": "plain"}.items()
    assert told["name"] == (
        "MTPPluginOptions: verification.1: "
        "expected one of 'coupled', 'rejection', 'block', 'dice', got 'bones'"
    )
    assert told["drafts"] == (
        "MTPPluginOptions: draft_sampling: 'coupled' cannot be verified by 'dice' verification; "
        "expected one of greedy, plain"
    )
    assert "output of a seed; dice: by dice; a list" in told["description"]
