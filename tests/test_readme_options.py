"""The README's table of options is the one that admission goes by."""

from __future__ import annotations

from pathlib import Path

from mtp_plugin.requests.options import OPTIONS, Option
from mtp_plugin.speculative.ops.logits import EDITED_OPTIONS
from mtp_plugin.speculative.ops.sampling import DRAWN_OPTIONS
from mtp_plugin.speculative.sampler import OWN_OPTIONS

README = Path(__file__).parent.parent / "README.md"


def row(option: Option, served: frozenset[str]) -> str:
    host = ", ".join(f"`{name.removeprefix('config.')}`" for name in option.host)
    given = "yes" if option.name in served else "refused"
    return f"| `{option.name}` | {option.about} | {option.values.words} | {host} | {given} |"


def test_options_of_the_readme() -> None:
    served = OWN_OPTIONS | EDITED_OPTIONS | DRAWN_OPTIONS
    told = [
        line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| `")
    ]
    rows = [row(option, served) for option in OPTIONS.values()]
    assert [line for line in told if line in rows] == rows
