"""SGLang's own classes on the CPU, in an environment of their own: `make test-sglang`."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("sglang") else ["test_*.py"]

if find_spec("sglang"):
    from tests.sglang.stubs import install

    install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore"))
