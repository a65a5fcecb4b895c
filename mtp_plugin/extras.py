"""The extra ``executor``: packages that a host of the plugin does without.

What needs them asks here first, so that a missing one is one line with the command that installs
it, not a failed import somewhere inside.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

from mtp_plugin.errors import MissingExtraError

INSTALL = "pip install 'mtp-plugin[executor]'"

MODEL_PACKAGES = ("transformers", "tokenizers", "safetensors")
"""What models and their tokenizers need."""
DISPLAY_PACKAGES = ("typer", "rich")
"""What reading arguments and showing results needs."""
COMMAND_LINE_PACKAGES = (*MODEL_PACKAGES, *DISPLAY_PACKAGES)
"""What the command line needs."""

TRANSFORMERS_RANGE = ((5, 17), (6, 0))
"""From which (major, minor) transformers is used, and below which; engines often pin older ones."""


def require(user: str, *packages: str) -> None:
    """Check that packages of the extra are there.

    Args:
        user: what needs them, as the message names it.

    Raises:
        MissingExtraError: some are not, or transformers is of another version than is used.
    """
    _require_installed(user, packages)
    if "transformers" in packages:
        least, below = TRANSFORMERS_RANGE
        installed = _transformers_version()
        numbers = re.match(r"(\d+)\.(\d+)", installed)
        if numbers and not least <= tuple(map(int, numbers.groups())) < below:
            raise MissingExtraError(
                f"{user} needs the package transformers from version {least[0]}.{least[1]} and "
                f"below {below[0]}, {installed} is installed: {INSTALL}"
            )


def require_or_exit(user: str, *packages: str) -> None:
    """As `require`, for a command: one line on standard error, and exit code 2.

    Versions are not looked up, which takes as long as all else that ``--help`` does: what uses a
    package asks for its version.
    """
    try:
        _require_installed(user, packages)
    except MissingExtraError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


def _require_installed(user: str, packages: Sequence[str]) -> None:
    missing = [package for package in packages if not _is_installed(package)]
    if missing:
        what = "the package" if len(missing) == 1 else "the packages"
        which = "which is" if len(missing) == 1 else "which are"
        raise MissingExtraError(
            f"{user} needs {what} {', '.join(missing)}, {which} not installed: {INSTALL}"
        )


def _is_installed(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return find_spec(package) is not None


@cache
def _transformers_version() -> str:
    """Empty for a source tree that was never installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("transformers")
    except PackageNotFoundError:
        return ""
