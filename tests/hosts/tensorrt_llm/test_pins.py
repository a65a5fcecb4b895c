"""The dependencies are compatible with the pins of each API version of TensorRT-LLM."""

from __future__ import annotations

import re
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.contract_host.line_rules import LINES
from tests.contract_host.recorded import load_line

LATE = "9999"


def base_requirements() -> dict[str, SpecifierSet]:
    requirements = [Requirement(each) for each in requires("mtp-plugin") or ()]
    return {each.name: each.specifier for each in requirements if "extra" not in str(each.marker)}


def candidates(*specifiers: SpecifierSet) -> list[Version]:
    """The versions that specifiers name, and one past all of them."""
    named = [each.version.removesuffix(".*") for every in specifiers for each in every]
    return [Version(name) for name in [*named, LATE]]


def can_be_met(ours: SpecifierSet, theirs: SpecifierSet) -> bool:
    return any(
        ours.contains(version, prereleases=True) and theirs.contains(version, prereleases=True)
        for version in candidates(ours, theirs)
    )


@pytest.mark.parametrize("line", LINES)
def test_both_can_be_met(line: str) -> None:
    pins = load_line(line).pins
    assert pins, "the signature file of an API version lists its pins"
    ours = base_requirements()
    assert "torch" in ours
    unmet = {
        name: (str(ours[name]), pin)
        for name, pin in pins.items()
        if name in ours and not can_be_met(ours[name], SpecifierSet(pin))
    }
    assert unmet == {}


def test_a_pin_that_cannot_be_met_is_seen() -> None:
    assert not can_be_met(SpecifierSet(">=2.9"), SpecifierSet("==2.8.0"))
    assert can_be_met(SpecifierSet(">=2.9"), SpecifierSet(">=2.9.0a0,<=2.9.0"))


def test_the_extra_names_the_lines() -> None:
    extra = re.search(
        r"^tensorrt-llm = \[\"tensorrt-llm(.*)\"\]$",
        (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert extra is not None
    allowed = SpecifierSet(extra[1])
    assert [allowed.contains(version) for version in ("1.1.0", "1.2.1", "1.3.0", "1.4.0")] == [
        False,
        True,
        True,
        False,
    ]
