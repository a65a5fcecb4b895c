"""Seeds of requests: what anyone with Philox gets from the engine's seed and a request's number."""

from __future__ import annotations

import pytest

from mtp_plugin.requests.seeds import philox, seed_words
from tests.infer.test_noise import RANDOM123


@pytest.mark.parametrize(("counter", "key", "words"), RANDOM123)
def test_words_are_those_of_random123(counter, key, words) -> None:
    assert philox(counter, key) == words


@pytest.mark.parametrize(
    ("engine_seed", "number", "words"),
    [
        (0, 0, (0x6627E8D5, 0xE169C58D)),
        (0, 1, (0xF8E4CCA4, 0x5CB200DB)),
        (5, 7, (0xA323FC06, 0x981333EE)),
        (2**64 - 1, 1000, (0xE1B10477, 0xB5C698DA)),
    ],
)
def test_a_request_without_a_seed_has_philox_of_its_number(engine_seed, number, words) -> None:
    """The first two words after the counter (number, 0, 0, 0) and the engine's seed as the key."""
    found = seed_words(None, number, engine_seed)
    assert tuple(word % 2**32 for word in found) == words
    assert all(-(2**31) <= word < 2**31 for word in found)


def test_a_seed_is_its_own_words() -> None:
    assert seed_words(2**63 + 2**32 * 3 + 7, 5, 9) == (7, 3 - 2**31)
    assert seed_words(-1, 0) == (-1, -1)
