"""A verification method that is added as CONTRIBUTING.md says works in every host."""

from __future__ import annotations

import functools
import json
from typing import Any

from tests.fresh import run_code


@functools.cache
def run_program(code: str) -> dict[str, Any]:
    module = "tests.speculative.verification.recipe_program"
    ended = run_code(
        f"import runpy, sys; sys.argv[1:] = [{code!r}]\n"
        f"runpy.run_module({module!r}, run_name='__main__')",
        unloaded=["tests"],
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def check_single(ids: list[int], histogram: list[int]) -> None:
    """The text is that of the coupled method, with at most one draft of a step."""
    ((coupled_ids, coupled_histogram),) = run_program("3")["coupled"]
    assert sum(coupled_histogram[3:]) > 0  # else the methods do not differ
    assert ids == coupled_ids
    assert sum(histogram[3:]) == 0 < histogram[2]


def test_method_of_the_recipe_decides_about_its_requests_alone() -> None:
    found = run_program("3")
    first, second, single = found["both"]
    assert first == second == found["coupled"][0]
    check_single(*single)
    for coupled, mixed in found["in vLLM"]:
        assert mixed[1::2] == coupled[1::2]
        assert mixed[::2] == [tokens[:2] for tokens in coupled[::2]]
        assert max(map(len, coupled[::2])) == 4


def test_method_without_a_code_decides_about_all_requests() -> None:
    found = run_program("none")
    check_single(*found["single"][0])
    (problem,) = found["in vLLM"]
    assert problem.startswith("name: expected one of coupled, rejection, block, got 'single'")
