"""The extras: packages that the plugin inside a host engine does not need.

Code that needs them calls `require` first, so that a missing package gives one line with the
command that installs it instead of a failed import.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

from mtp_plugin.errors import MissingExtraError

INSTALL = "pip install '.[executor]' in a clone of the repository"
"""The package is on no index."""

MODEL_PACKAGES = ("transformers", "tokenizers", "safetensors")
"""Needed by models and tokenizers."""
DISPLAY_PACKAGES = ("typer", "rich")
"""Needed to parse arguments and show results."""
COMMAND_LINE_PACKAGES = (*MODEL_PACKAGES, *DISPLAY_PACKAGES)
"""Needed by the command line."""
SERVE_PACKAGES = ("fastapi", "h11", "uvicorn", "prometheus_client")
"""Needed by the server, in the extra ``serve``."""

TRANSFORMERS_RANGE = ((5, 17), (5, 25))
"""Supported transformers versions (major, minor): from, below. Host engines may pin older ones."""


def require(user: str, *packages: str, extra: str = "executor") -> None:
    """Check that packages of an extra are installed.

    Args:
        user: name of what needs them, for the message.
        extra: name of the extra.

    Raises:
        MissingExtraError: a package is missing, or transformers has an unsupported version.
    """
    _require_installed(user, packages, extra)
    if "transformers" in packages:
        least, below = TRANSFORMERS_RANGE
        installed = version_of("transformers")
        numbers = re.match(r"(\d+)\.(\d+)", installed)
        if numbers and not least <= tuple(map(int, numbers.groups())) < below:
            raise MissingExtraError(
                f"{user} needs the package transformers from version {least[0]}.{least[1]} and "
                f"below {below[0]}.{below[1]}, {installed} is installed: {INSTALL}"
            )


def require_or_exit(user: str, *packages: str) -> None:
    """Like `require` for a command: write one line to standard error and exit with code 2.

    Versions are not checked here, because that would double the time of ``--help``.
    """
    try:
        _require_installed(user, packages)
    except MissingExtraError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


def _require_installed(user: str, packages: Sequence[str], extra: str = "executor") -> None:
    missing = [package for package in packages if not _is_installed(package)]
    if missing:
        what = "the package" if len(missing) == 1 else "the packages"
        which = "which is" if len(missing) == 1 else "which are"
        raise MissingExtraError(
            f"{user} needs {what} {', '.join(missing)}, {which} not installed: "
            f"{INSTALL.replace('executor', extra)}"
        )


def _is_installed(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return find_spec(package) is not None


@cache
def version_of(package: str) -> str:
    """Return the version, or an empty string for one that is not installed, as a source tree."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""
