"""Code that imports the package anew, in this process."""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from collections.abc import Collection, Iterator
from typing import NamedTuple


class Ended(NamedTuple):
    """What code printed, and the exit code."""

    returncode: int
    stdout: str
    stderr: str
    loaded: frozenset[str]
    """Top-level modules."""


@contextlib.contextmanager
def fresh_imports(hidden: Collection[str] = (), unloaded: Collection[str] = ()) -> Iterator[None]:
    """Within, neither the package nor `unloaded` ones are imported yet, and `hidden` ones cannot
    be."""
    before, argv, path = dict(sys.modules), sys.argv[:], sys.path[:]
    for name in before:
        if name.partition(".")[0] in {"mtp_plugin", *unloaded}:
            del sys.modules[name]
    sys.modules.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        for name in sys.modules.keys() - before.keys():
            del sys.modules[name]
        sys.modules.update(before)
        sys.argv[:], sys.path[:] = argv, path


def run_code(code: str, *, hidden: Collection[str] = (), unloaded: Collection[str] = ()) -> Ended:
    """Run code as a program of its own would."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with (
        fresh_imports(hidden, unloaded),
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
        loaded = frozenset(name.partition(".")[0] for name, each in sys.modules.items() if each)
    return Ended(status, out.getvalue(), err.getvalue(), loaded)


def run_command(*arguments: str, unloaded: Collection[str] = ()) -> Ended:
    """Run the command ``mtp-plugin``."""
    code = (
        f"import sys; sys.argv[1:] = {list(arguments)!r}\n"
        "from mtp_plugin.__main__ import main; main()"
    )
    return run_code(code, unloaded=unloaded)
