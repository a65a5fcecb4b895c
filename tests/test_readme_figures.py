"""Figures of the pages are those of the result files, which compared what they measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from integration.figures import (
    ASKED,
    BLOCKS,
    E2E_BATCHES,
    PAGES,
    PLOT,
    RESULTS,
    STEPS,
    WAYS_FILE,
    asked,
    named_blocks,
    of_ways,
    plot,
    plotted,
    rendered,
    result,
)

ROOT = Path(__file__).parent.parent
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
DOCUMENTS = sorted(RESULTS.glob("*.json"))
OURS = [path for path in DOCUMENTS if result(path.stem)["kind"] != "beside"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_says_what_the_files_say(page: Path) -> None:
    """``python -m integration.figures`` writes the pages anew."""
    assert TEXTS[page].splitlines() == rendered(TEXTS[page]).splitlines()


def test_every_block_stands_once() -> None:
    assert sorted(name for text in TEXTS.values() for name in named_blocks(text)) == sorted(BLOCKS)
    marks = sum(text.count("<!-- figures") + text.count("<!-- end") for text in TEXTS.values())
    assert marks == 2 * len(BLOCKS)


def test_a_changed_figure_is_seen() -> None:
    text = TEXTS[PAGES[0]].replace("| MTP off | 2", "| MTP off | 3")
    assert text != TEXTS[PAGES[0]]
    assert rendered(text) == TEXTS[PAGES[0]]


def test_the_plot_is_that_of_the_table() -> None:
    assert PLOT.read_text(encoding="utf-8") == plot()
    table = BLOCKS["speed"]()
    for row, values in plotted().items():
        assert f"| {row} |" in table
        assert f"| {' / '.join(f'{value:.2f}' for value in values)} |\n" in table
        assert all(f">{value:.2f}</text>" in plot() for value in values)
    assert f"({PLOT.relative_to(ROOT)})" in TEXTS[PAGES[0]]


def test_every_file_is_told_of() -> None:
    page = TEXTS[RESULTS / "README.md"]
    assert [path.stem for path in DOCUMENTS if path.stem not in page + "".join(told_of())] == []


def told_of() -> list[str]:
    """Files that the page has only figures of."""
    return [*(name for name, _ in STEPS.values()), "flashinfer-0.7"]


# --- what is said of how they were measured ---


def test_shares_of_synthetic_acceptance() -> None:
    told = result("e2e-8gb")["synthetic_acceptance"]["rates"]
    first, second, third = (f"{share * 100:g} %" for share in told)
    text = f"{first}, {second} and {third} of steps accept draft 1, 1..2 and 1..3"
    assert text in TEXTS[RESULTS / "README.md"]


def test_the_shape_beside_vllm_is_that_of_the_steps() -> None:
    shape, model = result("vllm-0.24")["shape"], result("e2e-8gb")["model"]
    assert {name: model[name] for name in shape if name in model} == {
        name: value for name, value in shape.items() if name != "intermediate_size"
    }


def test_the_cut_vocabulary_is_that_of_its_rows() -> None:
    assert result("e2e-8gb-draft-vocab")["draft_vocab"] == 32768
    assert result("e2e-8gb")["draft_vocab"] is None
    assert result("e2e-8gb-long")["draft_vocab"] == 32768


@pytest.mark.parametrize("ask", ASKED.values())
def test_what_is_asked_for_was_compared(ask: str) -> None:
    for batch in E2E_BATCHES[1:] if ask == "one-sampled" else E2E_BATCHES:
        assert asked("e2e-8gb-asked", f"eagle-k3/b{batch}", ask)["matched"]


def test_how_the_ways_were_compared() -> None:
    told = result(WAYS_FILE)
    assert all(each["acceptance"] in (None, "real") for each in told["cases"])
    every = [*of_ways("0.6"), *of_ways("1.0")]
    assert len(every) == 16
    for each in every:
        assert each["matched"]
        keeps_text = each["ask"].startswith(("coupled", "greedy"))
        told_of = "the run without MTP of the same seeds" if keeps_text else "the entropy of"
        assert each["match"]["compared_with"].startswith(told_of)
        assert each["match"]["ties"] == 0


@pytest.mark.parametrize("name", ["soak-tiny_model", "soak-tiny_model-15min"])
def test_a_soak_holds(name: str) -> None:
    soak = result(name)
    assert soak["holds"] is True
    assert soak["ties"] == 0
    assert soak["model"]["dtype"] == "float32"
    assert all(check["holds"] for check in soak["checks"])


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_every_result_was_compared(path: Path) -> None:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert document.get("matched", document.get("holds")) is True
    assert document["machine"]["package_tree"]


@pytest.mark.parametrize("path", sorted(set(DOCUMENTS) - set(OURS)), ids=lambda path: path.stem)
def test_figures_of_others_say_where_they_are_from(path: Path) -> None:
    told = result(path.stem)
    assert told["source"]
    assert told["timed"]
