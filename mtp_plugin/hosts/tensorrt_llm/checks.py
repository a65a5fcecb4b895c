"""Check whether the plugin supports the installed TensorRT-LLM; installs nothing."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TextIO

from mtp_plugin.errors import MTPPluginError, one_line, shell_quote
from mtp_plugin.hosts.tensorrt_llm import SITECUSTOMIZE
from mtp_plugin.hosts.tensorrt_llm.lines import LINES, line_among, looked_for
from mtp_plugin.hosts.tensorrt_llm.seams import PACKAGE, UTILS, Found, Need, look, named

OK, PROBLEM = 0, 1


@dataclass
class Examination:
    """Result of looking for the names that each API version needs."""

    line: str | None
    version: str | None
    seams: dict[str, list[Found]]
    problems: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 if the plugin can be installed, else 1."""
        return PROBLEM if self.problems else OK

    def sections(self) -> dict[str, list[Found]]:
        """The needs of the detected API version, else of all of them."""
        return self.seams if self.line is None else {self.line: self.seams[self.line]}


def examine() -> Examination:
    """Look for the names of every API version and build the classes of the detected one."""
    package = look(Need(PACKAGE, "__name__"))
    if not package.holds:
        return Examination(None, None, {}, [f"{PACKAGE} cannot be imported: {package.found}"])
    seams = looked_for()
    line = line_among(seams)
    seen = Examination(None if line is None else line.line, named(PACKAGE, "__version__"), seams)
    if named(UTILS, "__name__") is None:
        seen.problems.append(f"{UTILS} cannot be imported")
    if line is None:
        seen.problems.append(f"none of the API versions {', '.join(seams)}")
        return seen
    try:
        line()
    except MTPPluginError as error:
        seen.problems += str(error).splitlines()
    return seen


def show(seen: Examination, out: TextIO) -> None:
    """Write the needed names and the problems."""
    sections = seen.sections()
    if sections:
        out.write(f"{PACKAGE} {seen.version or '(no version)'}\n")
    releases = {line.line: line.releases for line in LINES}
    width = max((len(str(found.need)) for every in sections.values() for found in every), default=0)
    for name, every in sections.items():
        verdict = "supported" if all(found.holds for found in every) else "not this one"
        out.write(f"API version {name}, {releases[name]}: {verdict}\n")
        for found in every:
            holds = "yes" if found.holds else "NO"
            out.write(f"  {holds:3}  {found.need!s:{width}}  {found.found}\n")
    for problem in seen.problems:
        out.write(f"problem: {one_line(problem)}\n")


def serve_command(
    seen: Examination | None = None,
    model: str = "CHECKPOINT",
    num_mtp_layers: int = 1,
    *,
    config: str | None = None,
) -> str:
    """Return the command that serves a checkpoint, with a file or that of the API version."""
    hook = f"TRTLLM_MTP_PLUGIN=1 PYTHONPATH={shell_quote(SITECUSTOMIZE)}"
    if config is None and seen is not None:
        mode = "vanilla" if num_mtp_layers > 1 else "eagle"
        config = f"configs/trtllm/{seen.line}_{mode}.yaml"
    return f"{hook} trtllm-serve {shell_quote(model)} --config {shell_quote(config)}"


def main() -> int:
    """Print the examination and the command to type next, and return the exit code."""
    seen = examine()
    show(seen, sys.stdout)
    command = "mtp-plugin doctor --host tensorrt_llm  # with this corrected"
    if not seen.problems:
        command = serve_command(seen)
    sys.stdout.write(f"next: {one_line(command)}\n")
    return seen.exit_code
