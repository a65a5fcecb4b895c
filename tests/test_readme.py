"""The README and the pages it links to: code runs, links resolve, names exist."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from integration.examples import own_loop
from mtp_plugin import MTPSpecMetadata, SamplingParams
from mtp_plugin.hosts.embedded.models import load_model
from mtp_plugin.plugin import PlainAttentionMetadata, PlainBatch, PlainRequest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(
    [*ROOT.glob("*.md")]
    + [
        page
        for folder in ("configs", "integration", "mtp_plugin", "tests")
        for page in (ROOT / folder).rglob("*.md")
    ]
)
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
CHECKPOINT = ROOT / "integration" / "tiny_model" / "checkpoint"


def test_readme_is_one_page() -> None:
    assert len(README.splitlines()) <= 150
    assert len(BLOCKS) == 2
    assert len([line for line in BLOCKS[0].splitlines() if line]) <= 6
    assert len(re.findall(r"^!\[", README, re.MULTILINE)) == 1


def test_fast_tests_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (paths,) = re.findall(r"^FAST = (.*)$", makefile, re.MULTILINE)
    assert [path for path in paths.split() if not (ROOT / path).exists()] == []


def test_the_six_lines_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    exec(BLOCKS[0], {})
    *_, finish_reason, acceptance_length = capsys.readouterr().out.split()
    assert finish_reason in {"stop", "stop_words", "length"}
    assert float(acceptance_length) > 1.5


def test_the_loop_is_that_of_the_example_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(own_loop.__file__).read_text(encoding="utf-8")
    indented = indent(BLOCKS[1], "    ")
    assert indented in source
    loop = own_loop.OwnLoop(load_model(CHECKPOINT), 3, vanilla=False, max_batch_size=1)
    prompt, params = [[523, 574, 301]], SamplingParams(max_tokens=8)
    (original,) = loop.generate(prompt, params)
    names: dict[str, Any] = dict(vars(own_loop))
    exec("from __future__ import annotations\n" + BLOCKS[1], names)
    monkeypatch.setattr(own_loop.OwnLoop, "step", names["step"])
    (excerpt,) = loop.generate(prompt, params)
    assert excerpt.output_token_ids == original.output_token_ids
    assert len(excerpt.output_token_ids) == 8


def set_in_every_step() -> dict[str, list[str]]:
    """Fields of the table by owner."""
    page = (ROOT / "integration" / "examples" / "README.md").read_text(encoding="utf-8")
    table = page.split("What a host sets in every step:\n\n")[1].split("\n\n")[0]
    owner, found = "", dict[str, list[str]]()
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        owner = cells[0] or owner
        found.setdefault(owner, []).extend(re.findall(r"`(\w+)`", cells[1]))
    return found


def test_what_a_host_sets_is_what_the_loop_sets() -> None:
    named = set_in_every_step()
    assert named["the metadata"] == re.findall(r"spec\.(\w+) =", BLOCKS[1])
    call = BLOCKS[1].split("self.components.worker(")[1].split("\n    )\n")[0]
    arguments = re.findall(r"^ +(\w+)=", call, re.MULTILINE)
    assert [*named["the worker"], "attn_metadata", "spec_metadata"] == arguments
    request = PlainRequest(0, [3], SamplingParams(), max_seq_len=8)
    holders = {
        "each new request": request,
        "each request": request,
        "the metadata": MTPSpecMetadata(max_num_requests=1, max_draft_len=1),
        "attention": PlainAttentionMetadata(PlainBatch([request], []), "cpu"),
    }
    assert {
        (owner, name)
        for owner, holder in holders.items()
        for name in named[owner]
        if not hasattr(holder, name)
    } == set()


def test_dependencies_of_no_deps_are_named() -> None:
    declared = (ROOT / "pyproject.toml").read_text().split("\ndependencies = [")[1].split("\n]")[0]
    names = re.findall(r'^ +"([\w-]+)', declared, re.MULTILINE)
    line = next(line for line in README.lower().splitlines() if "--no-deps" in line)
    # torch depends on triton where it exists
    assert [name for name in names if name not in line] == ["triton"]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if "://" in link:
            continue
        place, _, anchor = link.partition("#")
        target = page.parent / place if place else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_every_page_is_found_from_the_readme() -> None:
    seen, left = set[Path](), [ROOT / "README.md"]
    while left:
        page = left.pop()
        seen.add(page)
        for link in re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            if target.suffix == ".md" and target.exists() and target not in seen:
                left.append(target)
    assert [page for page in PAGES if page not in seen] == []
