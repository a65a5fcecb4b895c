"""Which SGLang versions the plugin fits, read from wheels that are not installed.

python -m integration.sglang.signatures 0.5.17                 # downloads the wheel with pip
python -m integration.sglang.signatures DIR/sglang-0.5.17-*.whl # or a folder with its files
python -m integration.sglang.signatures --store 0.5.23         # and adds it to signatures.json
python -m integration.sglang.signatures                        # the stored versions

Prints every difference and every function whose code changed; the exit status is 1 if one of the
versions is not served or does not fit.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from integration.vllm.signatures import Stored, Wheel
from mtp_plugin.hosts.sglang.versions import (
    BODIES,
    NAMES,
    SERVED,
    SIGNATURES,
    changed_bodies,
    problems_of,
)
from mtp_plugin.speculative.host.signatures import body_hash

STORED = Path(__file__).with_name("signatures.json")
_ARGUMENTS, _FIELDS = "sglang.srt.server_args:ServerArgs", "sglang.srt.arg_groups.fields."


class SglangWheel(Wheel):
    """Reads the fields of ``ServerArgs`` from the classes that 0.5.23 makes it of, too."""

    def body(self, target: str) -> str:
        """Return `body_hash` of a function; empty if it is missing."""
        found = self._node(target)
        return "" if found is None else body_hash(found[1])

    def names(self, target: str) -> frozenset[str] | None:
        """See `Reader.names`."""
        found = super().names(target)
        tree = self._module(target.partition(":")[0])
        if target != _ARGUMENTS or found is None or tree is None:
            return found
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_FIELDS):
                for alias in node.names:
                    found |= super().names(f"{node.module}:{alias.name}") or set()
        return found


def to_store(reader: Wheel) -> dict[str, Any]:
    """Return what `Stored` needs of a version."""
    parameters = {target: reader.parameters(target) for target in SIGNATURES}
    present = {target: reader.names(target) for target in NAMES}
    return {
        "parameters": {t: None if p is None else ", ".join(p) for t, p in parameters.items()},
        "names": {
            t: None if n is None else ", ".join(sorted(n.intersection(NAMES[t])))
            for t, n in present.items()
        },
    }


def stored() -> dict[str, Stored]:
    """Return the stored versions."""
    versions = json.loads(STORED.read_text(encoding="utf-8"))
    return {name: Stored(version) for name, version in versions.items()}


def main(arguments: list[str] | None = None) -> int:
    """Print a report of each version; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION|WHEEL|FOLDER")
    parser.add_argument("--store", action="store_true", help=f"add the versions to {STORED.name}")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        wheels = {_version(path): SglangWheel(path) for path in _paths(options.versions, folder)}
        readers: Mapping[str, Any] = wheels if options.versions else stored()
        reports = {version: problems_of(version, reader) for version, reader in readers.items()}
        if options.store:
            _store(wheels)
        changes = {version: _changes(version, wheel) for version, wheel in wheels.items()}
    for version, problems in reports.items():
        lines = [f"sglang {version}: {'differs' if problems else 'fits'}", *problems]
        lines += changes.get(version, [])
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    return int(any(reports.values()))


def _paths(versions: list[str], folder: str) -> list[Path]:
    paths = []
    for given in versions:
        path = Path(given)
        if not path.exists():
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
            command += ["--only-binary=:all:", "-d", folder, f"sglang=={given}"]
            subprocess.run(command, check=True)
            path = next(Path(folder).glob(f"sglang-{given}-*.whl"))
        paths.append(path)
    return paths


def _version(path: Path) -> str:
    found = re.search(r"\d+\.\d+\.\d+[.\w]*", path.name)
    return path.name if found is None else found[0]


def _changes(version: str, wheel: SglangWheel) -> list[str]:
    """Return the functions to look at in a version, by the nearest served one."""
    nearest = version if version in SERVED else list(SERVED)[-1]
    return [
        f"changed since {nearest}, look: {target}" for target in changed_bodies(nearest, wheel.body)
    ]


def _store(wheels: Mapping[str, SglangWheel]) -> None:
    versions = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    bodies = json.loads(BODIES.read_text(encoding="utf-8")) if BODIES.exists() else {}
    for version, wheel in wheels.items():
        versions[version] = to_store(wheel)
        bodies[version] = " ".join(map(wheel.body, SIGNATURES))
    for path, stored in ((STORED, versions), (BODIES, bodies)):
        text = json.dumps(dict(sorted(stored.items())), indent=1)
        path.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
