from __future__ import annotations

import pytest
import torch

from mtp_plugin.infer import Role
from mtp_plugin.infer.noise import gumbel, philox, uniform
from mtp_plugin.requests.seeds import seed_words
from tests.ops.sampling import example

WORD = 2**32 - 1
RANDOM123 = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), RANDOM123)
def test_words_are_those_of_random123(counter, key, words) -> None:
    columns = [torch.tensor([word, 1]) for word in counter]
    found = philox((columns[0], columns[1], columns[2], columns[3]), key)
    assert tuple(int(word[0]) for word in found) == words


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize(("seed", "index"), [(0, 1), (-1, 77), (2**63 + 5, 2**32 + 3)])
def test_noise_in_plain_numbers(role: Role, seed: int, index: int) -> None:
    words = [example.word(seed % 2**64, token, index, role) for token in range(37)]
    found = uniform(seed_words(seed, 0), index, 37, role)
    assert found.tolist() == [example.uniform(word) for word in words]
    noise = gumbel(seed_words(seed, 0), index, 37, role)
    expected = torch.tensor([example.gumbel(word) for word in words], dtype=torch.float64)
    torch.testing.assert_close(noise, expected, rtol=1e-12, atol=1e-12)
