"""A verification method that is added as CONTRIBUTING.md says works in every host."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.test_contributing import ROOT


def run_program(code: str) -> dict[str, Any]:
    module = "tests.speculative.verification.recipe_program"
    program = [sys.executable, "-m", module, code]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("code", ["none", "3"])
def test_method_of_the_recipe_decides_about_its_requests_alone(code: str) -> None:
    found = run_program(code)
    ((ids, histogram),) = found["coupled"]
    assert sum(histogram[3:]) > 0  # else the methods do not differ
    ((single_ids, single_histogram),) = found["single"]
    assert single_ids == ids  # lossless too
    assert sum(single_histogram[3:]) == 0 < single_histogram[2]
    if code == "none":
        (problem,) = found["in vLLM"]
        assert problem.startswith("name: expected one of coupled, rejection, block, got 'single'")
        return
    assert found["both"][0] == found["both"][1] == found["coupled"][0]
    assert found["both"][2] == found["single"][0]
    for coupled, mixed in found["in vLLM"]:
        assert mixed[1::2] == coupled[1::2]
        assert mixed[::2] == [tokens[:2] for tokens in coupled[::2]]
        assert max(map(len, coupled[::2])) == 4
