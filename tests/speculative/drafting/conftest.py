"""Every test of the worker contract runs for every draft length of its worker."""

from __future__ import annotations

import pytest

from tests.speculative.drafting.contract import WorkerSteps


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.cls is not None and issubclass(metafunc.cls, WorkerSteps):
        metafunc.parametrize("k", metafunc.cls.draft_lens)
