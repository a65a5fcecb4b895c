"""Fewer of the random requests: a tenth, but all where a small cache must pause some."""

from __future__ import annotations

import pytest

from tests.hosts.embedded.test_random_requests import *  # noqa: F403
from tests.hosts.embedded.test_random_requests import is_tight


@pytest.fixture
def one_of(way) -> int:
    return 1 if is_tight(way) else 10
