"""README, CONTRIBUTING and ``docs/``: code runs, commands parse, links resolve, names exist."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest
import typer.main
import yaml

from integration import reference_pages
from mtp_plugin import __version__, cli
from mtp_plugin.config import load_config
from mtp_plugin.hosts.vllm.options import VllmOptions, read_settings
from mtp_plugin.hosts.vllm.versions import versions_tested
from mtp_plugin.speculative.rows.request_options import read_request
from mtp_plugin.tools.launch_line import read_line

ROOT = Path(__file__).parent.parent
CHECKPOINT = "integration/tiny_model/checkpoint"
ALL_PAGES = sorted(
    [*ROOT.glob("*.md")]
    + [
        page
        for folder in ("configs", "docs", "integration", "mtp_plugin", "tests")
        for page in (ROOT / folder).rglob("*.md")
    ]
)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GUIDE = ROOT / "mtp_plugin" / "README.md"
README = PAGES[0].read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a page in this language; "": those without one."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    return [dedent(block) for name, block in found if name == language]


def inline_code(page: Path) -> set[str]:
    """Return what is between back-quotes in the text of a page."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.M)
    return set(re.findall(r"`([^`\n]+)`", text))


def test_readme_is_short_and_names_the_tested_versions() -> None:
    assert len(README.splitlines()) <= 175
    assert f"(tested: {versions_tested()})" in README
    assert f"Version {__version__}, " in README
    loop = (ROOT / "integration/examples/own_loop.py").read_text(encoding="utf-8")
    assert f"[a loop of {len(loop.splitlines())} lines]" in README
    times = re.findall(r"make test +# (.*?):", README)
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"`make test` \|.*\| (.*) \|", page)
    assert times == [row.replace("minutes,", "minutes on two idle cores,")]
    declared = (ROOT / "pyproject.toml").read_text().split("\ndependencies = [")[1].split("\n]")[0]
    names = re.findall(r'^ +"([\w-]+)', declared, re.MULTILINE)
    (line,) = re.findall(r"\(`pip install --no-deps \.`, if (.*)\)", README)
    # torch depends on triton where it exists
    assert [name for name in names if name not in line.lower()] == ["triton"]


# --- Python and YAML ---


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem != "CONTRIBUTING"], ids=name_of
)
def test_python_blocks_run(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tests/test_contributing.py runs those of CONTRIBUTING."""
    monkeypatch.chdir(ROOT)
    for block in blocks(page, "python"):
        exec(block, {})
    if page.stem == "README":
        *_, finish_reason, acceptance_length = capsys.readouterr().out.split()
        assert finish_reason in {"stop", "length"}
        assert float(acceptance_length) > 1.5


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_yaml_blocks_load(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "yaml"):
        file = tmp_path / "file.yaml"
        file.write_text(block)
        load_config(file, model=str(ROOT / CHECKPOINT))


# --- commands ---

FILES = {"DIR": CHECKPOINT, "CHECKPOINT": CHECKPOINT, "MODEL_FOLDER": CHECKPOINT}
RUN = {
    "mtp-plugin doctor --model DIR": (),
    "mtp-plugin generate DIR": ("-n", "8", "--no-compare"),
}
"""Commands that run here, with further options; the others are parsed only: they take longer, need
another engine, or serve until they are stopped."""
OTHERS = {"curl", "export", "git", "py-spy"}
"""Commands of the shell and of other projects, without a check."""


COMMAND = re.compile(
    r"(mtp-plugin|make|vllm serve|pip install|python -m|\.venv/bin/python -m|py-spy) "
)


def commands(page: Path) -> Iterator[str]:
    """Yield the commands of blocks without a language, and those within the text."""
    for block in blocks(page, ""):
        for line in block.replace("\\\n", " ").splitlines():
            command = line.split(" #")[0].strip()
            if command and not command.startswith("#"):
                yield command
    yield from (code for code in sorted(inline_code(page)) if COMMAND.match(code))


def check(words: list[str], is_short: bool) -> None:
    """Raise unless a command exists and takes these arguments."""
    while re.match(r"^\w+=", words[0]):
        words = words[1:]
    name, *arguments = words
    if name == "mtp-plugin":
        if arguments[:2] == ["doctor", "--"]:
            read_line(arguments[2:])
            return
        command, *options = [FILES.get(word, word) for word in arguments]
        group = typer.main.get_command(cli.app)
        # within the text, a command without any option is only named
        is_name = is_short and not options
        context = group.commands[command].make_context(command, options, resilient_parsing=is_name)
        if command == "tune" and not is_name:  # it checks by itself
            assert context.params["model"] or context.params["config"], "no --model"
    elif name == "make":
        targets = re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(arguments) <= set(targets)
    elif name == "pip":
        extras = re.findall(r"\.\[([\w-]+)\]", " ".join(arguments))
        declared = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
        assert arguments[0] == "install"
        assert set(extras) <= set(declared)
    elif name.endswith("python"):
        assert arguments[0] in ("-m", "-c")
        assert arguments[0] == "-c" or find_spec(arguments[1])
    elif name == "vllm":
        given = dict(pairwise(arguments))
        speculative = json.loads(given.get("--speculative-config", '{"method": "mtp"}'))
        plugin = json.loads(given.get("--additional-config", '{"mtp_plugin": {}}'))
        assert speculative["method"] == "mtp"
        VllmOptions.model_validate(plugin["mtp_plugin"])
    elif name == "trtllm-serve":
        yaml.safe_load((ROOT / arguments[arguments.index("--config") + 1]).read_text())
    elif "/" in name:
        assert (ROOT / name).exists()
    else:
        assert name in OTHERS


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_are_valid(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for command in commands(page):
        try:
            check(shlex.split(command), command in inline_code(page))
        except (Exception, SystemExit) as error:
            pytest.fail(f"{command}: {error!r}")


@pytest.mark.parametrize("command", RUN)
def test_command_runs(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(command in commands(page) for page in PAGES)
    monkeypatch.chdir(ROOT)
    words = [FILES.get(word, word) for word in command.split()]
    monkeypatch.setattr(sys, "argv", [*words, *RUN[command]])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code


def test_vllm_serves_the_request_of_its_page_with_the_command_before_it() -> None:
    page = ROOT / "mtp_plugin" / "hosts" / "vllm" / "README.md"
    (command,) = [each for each in commands(page) if "draft_sample_method" in each]
    given = dict(pairwise(shlex.split(command)))
    speculative = SimpleNamespace(**json.loads(given["--speculative-config"]))
    extra = json.loads(given["--additional-config"])
    settings = read_settings(
        SimpleNamespace(speculative_config=speculative, additional_config=extra)
    )
    (block,) = [each for each in blocks(page, "python") if "vllm_xargs" in each]
    (extra_args,) = re.findall(r"\"vllm_xargs\": ({.*?})", block)
    assert settings is not None
    assert read_request(json.loads(extra_args), settings).verification == "block"


def test_fast_tests_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (paths,) = re.findall(r"^FAST = (.*)$", makefile, re.MULTILINE)
    assert [path for path in paths.split() if not (ROOT / path).exists()] == []


# --- names ---

EXAMPLES = {
    "DIR",
    "FILE",
    "MODEL",
    "MyPlugin",
    "SingleVerification",
    "area",
    "imperative",
    "logit_cap",
}
"""Placeholders, and names of the examples of CONTRIBUTING."""
SUFFIXES = {".py", ".toml", ".yaml", ".yml", ".json", ".txt", ""}


@pytest.fixture(scope="module")
def vocabulary() -> set[str]:
    """Every word of the code, also with dashes."""
    folders = [ROOT / name for name in ("mtp_plugin", "integration", "configs", "tests", ".github")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in SUFFIXES]
    files += [path for path in ROOT.iterdir() if path.suffix in SUFFIXES]
    words = set[str]()
    for path in files:
        if path.is_file() and path.stat().st_size < 500_000:
            text = path.read_text(encoding="utf-8")
            words.update(re.findall(r"[A-Za-z_]\w*", text), re.findall(r"[A-Za-z][\w-]+", text))
    return words


def exists(path: str) -> bool:
    roots = (ROOT, ROOT / "docs", ROOT / "mtp_plugin", ROOT / "mtp_plugin" / "speculative")
    return any(next(root.glob(path), None) for root in roots) or (
        "/" not in path and any((ROOT / "mtp_plugin").rglob(path))
    )


@pytest.mark.parametrize("page", [*PAGES, GUIDE], ids=name_of)
def test_names_exist(page: Path, vocabulary: set[str]) -> None:
    missing = []
    for code in sorted(inline_code(page)):
        if re.fullmatch(r"[\w./*-]+/([\w.*-]+)?|[\w/-]+\.(py|md|yaml|toml)", code):
            if not re.search("NAME|single", code) and not exists(code):
                missing.append(code)
            continue
        if COMMAND.match(code):
            continue
        words = re.findall(r"[A-Za-z_][\w-]{2,}", re.sub(r"\"[^\"]*\"|'[^']*'", "", code))
        known = vocabulary | EXAMPLES
        missing += [
            f"{code}: {word}" for word in words if not {word, word.replace("-", "_")} & known
        ]
    assert not missing


def test_every_package_is_in_the_architecture_guide() -> None:
    packages = {path.parent.name for path in (ROOT / "mtp_plugin").glob("*/__init__.py")}
    assert packages <= set(re.findall(r"`(\w+)/`", GUIDE.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", reference_pages.PAGES, ids=name_of)
def test_generated_tables_match_the_code(page: Path) -> None:
    """``python -m integration.reference_pages`` rewrites the pages."""
    text = page.read_text(encoding="utf-8")
    assert text.splitlines() == reference_pages.rendered(text).splitlines()


def test_every_generated_table_appears_once() -> None:
    assert sorted(reference_pages.named_blocks()) == sorted(reference_pages.BLOCKS)


# --- links ---


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_links_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", page.read_text(encoding="utf-8"))
    for link in (first or second for first, second in links):
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
    assert [page for page in ALL_PAGES if page not in seen] == []
