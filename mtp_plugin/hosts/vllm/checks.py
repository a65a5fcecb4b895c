"""Check whether the plugin supports the installed vLLM; starts no engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from typing import TextIO

from mtp_plugin.checkpoint.vllm_command import vllm_command
from mtp_plugin.errors import HostError, one_line
from mtp_plugin.hosts.vllm.options import DRAFTERS
from mtp_plugin.hosts.vllm.versions import (
    NAMES,
    OLDEST,
    SIGNATURES,
    differences,
    mismatch,
    refusal,
    release,
    untested,
    where_tested,
)
from mtp_plugin.hosts.vllm.wrapping import START, WORKER
from mtp_plugin.speculative.host.signatures import INSTALLED, missing_names

OK, PROBLEM = 0, 1
PLUGIN_GROUP, PLUGIN_NAME = "vllm.general_plugins", "mtp_plugin"
PLUGINS = "VLLM_PLUGINS"


@dataclass(frozen=True)
class Method:
    """A method of vLLM that the plugin wraps or uses."""

    target: str
    problem: str | None  # None: as expected

    @property
    def kind(self) -> str:
        """What the plugin does with it."""
        return "wrapped" if self.target in START or self.target in WORKER else "used"


@dataclass
class Examination:
    """What was found of vLLM."""

    version: str | None = None
    tested_on: str | None = None
    methods: list[Method] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 if the plugin can be turned on, else 1."""
        return PROBLEM if self.problems else OK


def examine(environment: Mapping[str, str] = os.environ) -> Examination:
    """Look for the methods of the version that is installed.

    Args:
        environment: variables that vLLM reads.
    """
    try:
        version = str(import_module("vllm").__version__)
        release()
    except (ImportError, AttributeError) as error:
        return Examination(problems=[f"vllm cannot be imported: {error}"])
    except HostError as error:
        return Examination(problems=str(error).splitlines())
    problems = differences()
    if problems and release() < OLDEST:
        return Examination(problems=[refusal(problems)])
    seen = Examination(version, where_tested())
    methods = [Method(target, mismatch(target, known)) for target, known in SIGNATURES.items()]
    methods += [Method(target, missing_names(target, known)) for target, known in NAMES.items()]
    seen.methods = sorted(methods, key=lambda method: method.kind != "wrapped")
    if problems:
        seen.problems.append(refusal(problems))
    elif seen.tested_on is None:
        seen.notes.append(f"warning: {untested(version)}")
    _examine_environment(seen, environment)
    return seen


def _examine_environment(seen: Examination, environment: Mapping[str, str]) -> None:
    if not entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME):
        seen.problems.append(
            f"the entry point {PLUGIN_NAME} of the group {PLUGIN_GROUP} is missing: in "
            "the environment of vLLM and a clone of the repository, type pip install --no-deps ."
        )
    seen.problems += plugins_problem(environment)
    if not _has_triton():
        seen.problems.append(
            "vLLM has switched Triton off here (vllm.triton_utils.HAS_TRITON is false), which its "
            "V2 model runner needs: run this where the GPU of the engine is, with triton installed"
        )


def plugins_problem(environment: Mapping[str, str]) -> list[str]:
    """Return whether the variable that names plugins leaves out this one, in one line or none."""
    plugins = environment.get(PLUGINS)
    if plugins is None or PLUGIN_NAME in plugins.split(","):
        return []
    return [f"{PLUGINS}={plugins} leaves out {PLUGIN_NAME}: add it, or unset it"]


def _has_triton() -> bool:
    try:
        return bool(import_module("vllm.triton_utils").HAS_TRITON)
    except (ImportError, AttributeError):  # a version without this name uses Triton
        return True


def show(seen: Examination, out: TextIO) -> None:
    """Write what was found, and the problems."""
    is_different = any(method.problem for method in seen.methods)
    if seen.version is not None:
        fits = "does not fit" if is_different else "fits"
        tested = "not tested" if seen.tested_on is None else f"tested on {seen.tested_on}"
        out.write(f"vllm {seen.version}, {tested}: {fits}\n")
    kinds = [method.kind for method in seen.methods]
    if kinds and not is_different:
        wrapped = kinds.count("wrapped")
        out.write(f"methods: {wrapped} wrapped, {len(kinds) - wrapped} used, all as expected\n")
    for method in seen.methods if is_different else ():
        verdict = "NO" if method.problem else "yes"
        name = method.target.replace(":", ".")
        out.write(f"  {verdict:3}  {method.kind:7}  {name}{_shown(method)}\n")
    for note in seen.notes:
        out.write(f"{one_line(note)}\n")
    for problem in seen.problems:
        out.write(f"problem: {one_line(problem)}\n")


def _shown(method: Method) -> str:
    names = NAMES.get(method.target)
    if names is not None:
        return f"  has {', '.join(names)}" if method.problem is None else f"  {method.problem}"
    found = INSTALLED.parameters(method.target)
    return "  missing" if found is None else f"  ({', '.join(found)})"


def main() -> int:
    """Print the examination and the command to type next, and return the exit code."""
    seen = examine()
    show(seen, sys.stdout)
    if not seen.problems:
        sys.stdout.write(f"drafters: {', '.join(DRAFTERS)}\n")
    again = "mtp-plugin doctor --host vllm  # with this corrected"
    sys.stdout.write(f"next: {one_line(again if seen.problems else vllm_command('MODEL'))}\n")
    return seen.exit_code
