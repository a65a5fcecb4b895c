"""Code that imports the package anew, in this process."""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from collections.abc import Collection, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NamedTuple


class Ended(NamedTuple):
    """What code printed, and the exit code."""

    returncode: int
    stdout: str
    stderr: str


class Refused(MetaPathFinder, Loader):
    """Finds modules, but does not import them: torch and numpy cannot be imported twice."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in self.names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        raise ImportError(f"{spec.name} is imported")


@contextlib.contextmanager
def fresh_imports(
    hidden: Collection[str] = (), unloaded: Collection[str] = (), refused: Collection[str] = ()
) -> Iterator[None]:
    """Within, neither the package nor `unloaded` ones are imported yet, `hidden` ones are not
    installed, and an import of `refused` ones fails."""
    before, argv, path = dict(sys.modules), sys.argv[:], sys.path[:]
    for name in before:
        if name.partition(".")[0] in {"mtp_plugin", *unloaded, *refused}:
            del sys.modules[name]
    sys.modules.update(dict.fromkeys(hidden))
    finder = Refused(refused)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in sys.modules.keys() - before.keys():
            del sys.modules[name]
        sys.modules.update(before)
        sys.argv[:], sys.path[:] = argv, path


def run_code(
    code: str,
    *,
    hidden: Collection[str] = (),
    unloaded: Collection[str] = (),
    refused: Collection[str] = (),
) -> Ended:
    """Run code as a program of its own would."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with (
        fresh_imports(hidden, unloaded, refused),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            exec(code, {"__name__": "__main__"})
        except SystemExit as ended:
            status = int(ended.code or 0)
        except Exception:
            traceback.print_exc()
            status = 1
    return Ended(status, out.getvalue(), err.getvalue())


def run_command(*arguments: str, refused: Collection[str] = ()) -> Ended:
    """Run the command ``mtp-plugin``."""
    code = (
        f"import sys; sys.argv[1:] = {list(arguments)!r}\n"
        "from mtp_plugin.__main__ import main; main()"
    )
    return run_code(code, refused=refused)
