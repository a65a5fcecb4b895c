"""Which vLLM versions the plugin fits, read from wheels that are not installed.

python -m integration.vllm.signatures 0.33.0                # downloads the wheel with pip
python -m integration.vllm.signatures DIR/vllm-0.33.0-*.whl # or a folder with the files of one
python -m integration.vllm.signatures latest                # the newest one of the index
python -m integration.vllm.signatures --store 0.33.0        # and adds it to signatures.json
python -m integration.vllm.signatures                       # the stored versions

Prints whether the plugin fits, or every difference, and what optional parts lack; the exit status
is 1 if one of the versions does not fit or cannot be read.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtp_plugin.hosts.vllm.versions import NAMES, PARTS, SIGNATURES, differences, part_problems
from mtp_plugin.speculative.host.signatures import Reader

STORED = Path(__file__).with_name("signatures.json")


class Wheel:
    """Reads the source files of a wheel, or of a folder with its files."""

    def __init__(self, path: Path) -> None:
        self._root: Any = path if path.is_dir() else zipfile.Path(path)
        self._modules: dict[str, ast.Module | None] = {}

    def parameters(self, target: str) -> tuple[str, ...] | None:
        """See `Reader.parameters`."""
        found = self._node(target)
        if found is None:
            return None
        module, node = found
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return tuple(_parameters(node.args))["." in target.partition(":")[2] :]
        constructor = self._member(module, node, "__init__")
        if constructor is not None:
            return tuple(_parameters(constructor[1].args))[1:]
        fields = [line for line in node.body if isinstance(line, ast.AnnAssign)]
        return tuple(_shown(line.target, line.value) for line in fields)

    def names(self, target: str) -> frozenset[str] | None:
        """See `Reader.names`."""
        module, _, path = target.partition(":")
        if not path:
            tree = self._module(module)
            return None if tree is None else frozenset(_assigned(tree.body))
        found = self._find(module, path)
        if found is None:
            return None
        names: set[str] = set()
        for _, node in self._with_bases(*found):
            names.update(_assigned(node.body))
            names.update(
                inner.attr
                for inner in ast.walk(node)
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
            )
        return frozenset(names)

    def _node(self, target: str) -> tuple[str, Any] | None:
        """Return the module that defines a target, and its node."""
        module, _, path = target.partition(":")
        owner, _, method = path.partition(".")
        found = self._find(module, owner)
        return self._member(*found, method) if method and found is not None else found

    def _module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            path = name.replace(".", "/")
            files = [self._root / f"{path}.py", self._root / f"{path}/__init__.py"]
            text = next(
                (file.read_text(encoding="utf-8") for file in files if file.is_file()), None
            )
            self._modules[name] = None if text is None else ast.parse(text)
        return self._modules[name]

    def _find(self, module: str, name: str) -> tuple[str, Any] | None:
        """Return the module that defines a function or class, and its node."""
        tree = self._module(module)
        for node in () if tree is None else ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._find(node.module, alias.name)
        return None

    def _member(self, module: str, owner: Any, name: str) -> tuple[str, Any] | None:
        for inner_module, node in self._with_bases(module, owner):
            for line in node.body:
                if isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef) and line.name == name:
                    return inner_module, line
        return None

    def _with_bases(self, module: str, node: Any) -> Iterator[tuple[str, Any]]:
        yield module, node
        for base in getattr(node, "bases", ()):
            found = self._find(module, base.id) if isinstance(base, ast.Name) else None
            if found is not None and isinstance(found[1], ast.ClassDef):
                yield from self._with_bases(*found)


class Stored:
    """Reads one version of ``signatures.json``."""

    def __init__(self, version: Mapping[str, Any]) -> None:
        self._version = version

    def parameters(self, target: str) -> tuple[str, ...] | None:
        """See `Reader.parameters`."""
        text = self._version["parameters"][target]
        return None if text is None else tuple(filter(None, text.split(", ")))

    def names(self, target: str) -> frozenset[str] | None:
        """See `Reader.names`."""
        text = self._version["names"][target]
        return None if text is None else frozenset(text.split(", "))


def to_store(reader: Reader) -> dict[str, Any]:
    """Return what `Stored` needs of a version: the targets and names that an engine needs."""
    tables = [SIGNATURES, *(wrapped for wrapped, _ in PARTS.values())]
    targets = sorted({target for table in tables for target in table})
    wanted: dict[str, set[str]] = {}
    for table in (NAMES, *(names for _, names in PARTS.values())):
        for target, names in table.items():
            wanted.setdefault(target, set()).update(names)
    found = {target: reader.parameters(target) for target in targets}
    present = {target: reader.names(target) for target in sorted(wanted)}
    return {
        "parameters": {t: None if p is None else ", ".join(p) for t, p in found.items()},
        "names": {
            t: None if n is None else ", ".join(sorted(n & wanted[t])) for t, n in present.items()
        },
    }


def stored() -> dict[str, Stored]:
    """Return the stored versions."""
    versions = json.loads(STORED.read_text(encoding="utf-8"))
    return {name: Stored(version) for name, version in versions.items()}


def report(version: str, reader: Reader) -> list[str]:
    """Return whether a version fits, and the differences, else those of `PARTS`."""
    problems = differences(reader)
    first = f"vllm {version}: does not fit:" if problems else f"vllm {version}: fits"
    if not problems:
        problems = [f"{part}: {p}" for part in PARTS for p in part_problems(part, reader)]
    return [first, *(f"  {p}" for p in problems)]


def main(arguments: list[str] | None = None) -> int:
    """Print a report of each version; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION|WHEEL|FOLDER|latest")
    parser.add_argument("--store", action="store_true", help=f"add the versions to {STORED.name}")
    options = parser.parse_args(arguments)
    do_fit = True
    with tempfile.TemporaryDirectory() as folder:
        for version, found in _readers(options.versions, folder):
            is_read = not isinstance(found, str)
            lines = report(version, found) if is_read else [f"{version}: cannot be read: {found}"]
            do_fit = do_fit and is_read and len(lines) == 1
            sys.stdout.write("".join(f"{line}\n" for line in lines))
            sys.stdout.flush()
            if is_read and options.store:
                _store({version: found})
    return int(not do_fit)


def _readers(versions: Sequence[str], folder: str) -> Iterator[tuple[str, Reader | str]]:
    """Yield each version with its reader, or why there is none."""
    if not versions:
        yield from stored().items()
    for given in versions:
        try:
            path = _path(given, folder)
            found = _version(path), Wheel(path)
        except subprocess.CalledProcessError as error:
            lines = error.stderr.strip().splitlines() or [str(error)]
            yield given, lines[-1].removeprefix("ERROR: ")
        except (OSError, zipfile.BadZipFile) as error:
            yield given, str(error)
        else:
            yield found


def _path(given: str, folder: str) -> Path:
    path = Path(given)
    if path.exists():
        return path
    wanted = "vllm" if given == "latest" else f"vllm=={given}"
    target = Path(folder) / given
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "-d", str(target), wanted]
    subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True)
    return next(target.glob("*.whl"))


def _version(path: Path) -> str:
    found = re.search(r"\d+\.\d+[.\w]*", path.name)
    return path.name if found is None else found[0]


def _store(readers: Mapping[str, Reader]) -> None:
    versions = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    versions.update((version, to_store(reader)) for version, reader in readers.items())
    ordered = sorted(versions, key=lambda version: [int(n) for n in re.findall(r"\d+", version)])
    text = json.dumps({version: versions[version] for version in ordered}, indent=1)
    STORED.write_text(f"{text}\n", encoding="utf-8")


def _parameters(given: ast.arguments) -> Iterator[str]:
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + [*given.defaults]
    for argument, default in zip(positional, defaults, strict=True):
        yield _shown(argument, default)
    if given.vararg:
        yield f"*{given.vararg.arg}"
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield _shown(argument, default)
    if given.kwarg:
        yield f"**{given.kwarg.arg}"


def _shown(named: Any, default: ast.expr | None) -> str:
    name = named.id if isinstance(named, ast.Name) else named.arg
    if default is None:
        return str(name)
    return f"{name}={ast.unparse(default) if isinstance(default, ast.Constant) else '...'}"


def _assigned(body: list[ast.stmt]) -> Iterator[str]:
    for line in body:
        if isinstance(line, ast.FunctionDef | ast.ClassDef):
            yield line.name
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


if __name__ == "__main__":
    sys.exit(main())
