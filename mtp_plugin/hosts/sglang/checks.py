"""Check whether the plugin supports the installed SGLang; starts no engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from typing import TextIO

from mtp_plugin.errors import ConfigError, HostError, one_line
from mtp_plugin.hosts.sglang import VARIABLE
from mtp_plugin.hosts.sglang.model_check import COMMAND
from mtp_plugin.hosts.sglang.options import read_options
from mtp_plugin.hosts.sglang.versions import (
    SIGNATURES,
    names_of,
    problems_of,
    refusal,
    release,
)

PLUGIN_GROUP, PLUGIN_NAME, PLUGINS = "sglang.srt.plugins", "mtp_plugin", "SGLANG_PLUGINS"


@dataclass
class Examination:
    """What was found of SGLang."""

    version: str | None = None
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def examine(environment: Mapping[str, str] = os.environ) -> Examination:
    """Compare the installed SGLang with what the plugin needs of it.

    Args:
        environment: variables that SGLang and the plugin read.
    """
    try:
        import_module("sglang.srt.plugins")
        seen = Examination(release())
    except (ImportError, HostError) as error:
        return Examination(problems=[f"sglang cannot be imported: {error}"])
    found = str(seen.version)
    differences = problems_of(found)
    if differences:
        seen.problems.append(refusal(found, differences))
    else:
        seen.notes.append(
            f"sglang {found}, tested on: GPU and CPU; functions: {len(SIGNATURES)}, "
            f"classes and modules: {len(names_of(found))}, all as expected"
        )
    if not entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME):
        seen.problems.append(
            f"the entry point {PLUGIN_NAME} of the group {PLUGIN_GROUP} is missing: in the "
            "environment of SGLang and a clone of the repository, type pip install --no-deps ."
        )
    seen.problems += plugins_problem(environment)
    if environment.get(VARIABLE, "").strip():
        try:
            read_options(environment)
            seen.notes.append(f"{VARIABLE}={environment[VARIABLE]}: the plugin is on")
        except ConfigError as error:
            seen.problems += str(error).splitlines()
    else:
        seen.notes.append(f"{VARIABLE} is not set: the plugin is off; '{{}}' turns it on")
    return seen


def plugins_problem(environment: Mapping[str, str]) -> list[str]:
    """Return whether the variable that names plugins leaves out this one, in one line or none."""
    plugins = environment.get(PLUGINS)
    if not plugins or PLUGIN_NAME in [name.strip() for name in plugins.split(",")]:
        return []
    return [f"{PLUGINS}={plugins} leaves out {PLUGIN_NAME}: add it, or unset it"]


def show(seen: Examination, out: TextIO) -> None:
    """Write what was found, and the problems."""
    for note in seen.notes:
        out.write(f"{one_line(note)}\n")
    for problem in seen.problems:
        out.write(f"problem: {one_line(problem)}\n")


def main() -> int:
    """Print the examination and the command to type next, and return the exit code."""
    seen = examine()
    show(seen, sys.stdout)
    again = "mtp-plugin doctor --host sglang  # with this corrected"
    sys.stdout.write(f"next: {one_line(again if seen.problems else COMMAND)}\n")
    return 1 if seen.problems else 0
