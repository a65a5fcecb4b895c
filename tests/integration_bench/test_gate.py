"""What counts as the reference's result."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from integration.bench.case import Case, InputSets, Trial, poison
from integration.bench.shapes import Shape
from tests.integration_bench.toys import RIGHT, Toy


def results(sets: InputSets, kernels: SimpleNamespace = RIGHT) -> list[dict[str, torch.Tensor]]:
    return [trial.run(kernels) for trial in sets.trials]


def test_state_counts_as_a_result() -> None:
    sets = InputSets(Toy().case(), 3, RIGHT)
    results(sets)
    assert sets.mismatches(results(sets)) == ["calls"]
    sets.restore()
    assert sets.mismatches(results(sets)) == []


def test_one_wrong_set_is_enough() -> None:
    sets = InputSets(Toy().case(), 3, RIGHT)
    found = results(sets)
    found[2]["out"][3] += 1
    assert sets.mismatches(found) == ["out"]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda out: out.to(torch.int32), id="dtype"),
        pytest.param(lambda out: out.unsqueeze(0), id="shape"),
        pytest.param(lambda out: out + 1, id="value"),
    ],
)
def test_type_shape_and_value_count(change) -> None:
    sets = InputSets(Toy().case(), 1, RIGHT)
    found = results(sets)
    found[0]["out"] = change(found[0]["out"])
    assert sets.mismatches(found) == ["out"]


def test_names_count() -> None:
    sets = InputSets(Toy().case(), 1, RIGHT)
    found = results(sets)
    found[0]["more"] = found[0].pop("out")
    assert sets.mismatches(found) == ["more", "out"]


def test_poison_reaches_every_result() -> None:
    sets = InputSets(Toy().case(), 2, RIGHT)
    found = results(sets)
    poison(found)
    assert sets.mismatches(found) == ["out"]
    floats = torch.ones(2)
    poison([{"x": floats}])
    assert floats.isnan().all()


@pytest.mark.parametrize(("error", "wrong"), [(1e-5, []), (1e-2, ["p"])])
def test_only_named_results_have_a_tolerance(error: float, wrong: list[str]) -> None:
    def prepare(_: int) -> Trial:
        def run(kernels: SimpleNamespace) -> dict[str, torch.Tensor]:
            return {"p": torch.ones(2) * kernels.p, "q": torch.ones(2)}

        return Trial(run, approximate=frozenset({"p"}))

    sets = InputSets(Case("p", Shape(batch=1), 1, 1, prepare), 1, SimpleNamespace(p=1.0))
    found = results(sets, SimpleNamespace(p=1.0 + error))
    assert sets.mismatches(found) == wrong
    found[0]["q"] += 1e-6
    assert sets.mismatches(found) == [*wrong, "q"]
