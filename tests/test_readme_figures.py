"""Numbers of the pages come from the result files, whose outputs were compared."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from integration.demo_recording import svg
from integration.figures import (
    BLOCKS,
    CHARTS,
    E2E_BATCHES,
    KINDS,
    METHODS_FILE,
    PAGES,
    RESULTS,
    STEPS,
    coupled_over,
    named_blocks,
    of_kind,
    of_methods,
    rendered,
    result,
)

ROOT = Path(__file__).parent.parent
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
DOCUMENTS = sorted(RESULTS.glob("*.json"))
OURS = [path for path in DOCUMENTS if result(path.stem)["kind"] != "comparison"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_match_result_files(page: Path) -> None:
    """``python -m integration.figures`` rewrites the pages."""
    assert TEXTS[page].splitlines() == rendered(TEXTS[page]).splitlines()


def test_every_block_appears_once() -> None:
    assert sorted(name for text in TEXTS.values() for name in named_blocks(text)) == sorted(BLOCKS)
    marks = sum(text.count("<!-- figures") for text in TEXTS.values())
    assert marks == len(BLOCKS)


def test_a_changed_number_is_detected() -> None:
    page = TEXTS[RESULTS / "README.md"]
    text = page.replace("| 394 |", "| 395 |")
    assert text != page
    assert rendered(text) == page


@pytest.mark.parametrize("path", CHARTS, ids=lambda path: path.name)
def test_charts_match_result_files(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == CHARTS[path]()


def test_every_file_is_named() -> None:
    page = TEXTS[RESULTS / "README.md"]
    assert [
        path.stem for path in DOCUMENTS if path.stem not in page + "".join(files_of_tables())
    ] == []


def files_of_tables() -> list[str]:
    """Files that appear only as numbers of a table."""
    return [name for name, _ in STEPS.values()]


# --- statements about the measurements ---


def test_shares_of_synthetic_acceptance() -> None:
    rates = result("e2e-8gb")["synthetic_acceptance"]["rates"]
    first, second, third = (f"{share * 100:g} %" for share in rates)
    text = f"{first}, {second} and {third} of steps accept draft 1, 1..2 and 1..3"
    assert text in TEXTS[RESULTS / "README.md"]


def test_shape_of_the_vllm_run_is_that_of_the_steps() -> None:
    shape, model = result("vllm-0.24")["shape"], result("e2e-8gb")["model"]
    assert {name: model[name] for name in shape if name in model} == {
        name: value for name, value in shape.items() if name != "intermediate_size"
    }


def test_the_cut_vocabulary_is_that_of_its_rows() -> None:
    assert result("e2e-8gb-draft-vocab")["draft_vocab"] == 32768
    assert result("e2e-8gb")["draft_vocab"] is None
    assert result("e2e-8gb-long")["draft_vocab"] == 32768


@pytest.mark.parametrize("kind", KINDS.values())
def test_every_kind_of_requests_was_compared(kind: str) -> None:
    for batch in E2E_BATCHES[1:] if kind == "one-sampled" else E2E_BATCHES:
        assert of_kind("e2e-8gb-request-kinds", f"eagle-k3/b{batch}", kind)["matched"]


def test_limit_of_coupled_is_that_of_its_file() -> None:
    page = " ".join(TEXTS[ROOT / "mtp_plugin" / "hosts" / "vllm" / "README.md"].split())
    whole, with_top_p = coupled_over("vllm_probabilistic")
    assert f"{whole:.3f} of the acceptance length" in page
    assert f"at T = 0.8, and {with_top_p:.2f} with top-p 0.95" in page


def test_how_verification_methods_were_compared() -> None:
    cases = result(METHODS_FILE)["cases"]
    assert all(each["acceptance"] in (None, "real") for each in cases)
    every = [*of_methods("0.6"), *of_methods("1.0")]
    assert len(every) == 16
    for each in every:
        assert each["matched"]
        assert each["match"]["ties"] == 0


@pytest.mark.parametrize("name", ["soak-tiny_model", "soak-tiny_model-15min"])
def test_a_soak_holds(name: str) -> None:
    soak = result(name)
    assert soak["ties"] == 0
    assert soak["model"]["dtype"] == "float32"
    assert all(check["holds"] for check in soak.get("results") or soak["checks"])


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_every_result_was_compared(path: Path) -> None:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert any(document.get(name) is True for name in ("matched", "holds", "identical"))
    assert document["machine"]["package_tree"]


@pytest.mark.parametrize("path", sorted(set(DOCUMENTS) - set(OURS)), ids=lambda path: path.stem)
def test_comparisons_name_their_source(path: Path) -> None:
    document = result(path.stem)
    assert document["source"]
    assert document["timed"]


def test_plots_are_shown_on_a_page() -> None:
    names = [path.name for path in RESULTS.iterdir() if path.suffix == ".svg"]
    assert [name for name in names if not any(name in text for text in TEXTS.values())] == []


def test_demo_recording_ends_with_identical_output() -> None:
    recording = (RESULTS / "demo.svg").read_text(encoding="utf-8")
    assert len(recording) < 150_000
    assert re.search(r"\d\.\dx tokens per second, identical output", recording)


def test_a_recording_has_colors_positions_and_wrapped_lines() -> None:
    recording = svg([(0.0, f"\x1b[1;32m{'a' * 70}\x1b[0m"), (0.1, "<" * 20 + "\r\nend\r\n")])
    shown = re.findall(
        r'<text class="(.*?)" x="(.*?)" y="(\d+)" textLength.*?>(.*?)</text>', recording
    )
    assert shown[1:] == [
        ("green b", "14", "60", "a" * 70),
        ("plain", "560", "60", "&lt;" * 8),
        ("plain", "14", "77", "&lt;" * 12),
        ("plain", "14", "94", "end"),
    ]
