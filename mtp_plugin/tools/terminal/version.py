"""The package's version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """The installed version; a source tree that was never installed has none."""
    try:
        return version("mtp-plugin")
    except PackageNotFoundError:
        return "not installed"
