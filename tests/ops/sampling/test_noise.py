"""Noise: Philox as in Random123, and pinned Gumbel numbers."""

# ruff: noqa: N803 (constants of kernels are in capitals)

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from mtp_plugin.ops.sampling import sample_reference as reference
from mtp_plugin.ops.sampling.row_triton import gumbel, gumbel_bound, philox, uniform
from tests.ops.on_device import DEVICE
from tests.ops.sampling import example

VECTORS = [
    ((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
"""Counter, key and words, as in Random123's kat_vectors."""

PINNED = [
    (0x0, 1.1641532182693481e-10, 22.87385695841999),
    (0x1, 3.4924596548080444e-10, 21.775244669635462),
    (0x2, 5.820766091346741e-10, 21.264419045753055),
    (0x3, 8.149072527885437e-10, 20.927946809015427),
    (0xFF, 5.948822945356369e-08, 16.637487338530374),
    (0xFFFF, 1.5258672647178173e-05, 11.09035488899793),
    (0x100007, 0.0002441423712298274, 8.317636930582303),
    (0xFFFFFF, 0.00390625, 5.543221133094242),
    (0x1000001, 0.00390625, 5.543221133094242),
    (0x7FFFFFF, 0.03125, 3.4499035524498507),
    (0x8000000, 0.03125, 3.4499035524498507),
    (0x40000000, 0.25, 1.2458993237072382),
    (0x80000000, 0.5, 0.36651292058166435),
    (0xC0000000, 0.75, -0.32663425997828094),
    (0xFFFFFE00, 0.9999998807907104, -2.7689812953474853),
    (0xFFFFFFFF, 0.9999999403953552, -2.8115409097662813),
]
"""Word, uniform number, noise."""


@triton.jit
def philox_kernel(counter_ptr, key_ptr, word_ptr, COUNT: tl.constexpr):
    rows = tl.arange(0, COUNT)
    c0 = tl.load(counter_ptr + rows * 4).to(tl.uint32)
    c1 = tl.load(counter_ptr + rows * 4 + 1).to(tl.uint32)
    c2 = tl.load(counter_ptr + rows * 4 + 2).to(tl.uint32)
    c3 = tl.load(counter_ptr + rows * 4 + 3).to(tl.uint32)
    k0 = tl.load(key_ptr + rows * 2).to(tl.uint32)
    k1 = tl.load(key_ptr + rows * 2 + 1).to(tl.uint32)
    w0, w1, w2, w3 = philox(c0, c1, c2, c3, k0, k1)
    tl.store(word_ptr + rows * 4, w0.to(tl.int64))
    tl.store(word_ptr + rows * 4 + 1, w1.to(tl.int64))
    tl.store(word_ptr + rows * 4 + 2, w2.to(tl.int64))
    tl.store(word_ptr + rows * 4 + 3, w3.to(tl.int64))


@triton.jit
def gumbel_kernel(word_ptr, unit_ptr, noise_ptr, bound_ptr, COUNT: tl.constexpr):
    rows = tl.arange(0, COUNT)
    words = tl.load(word_ptr + rows).to(tl.uint32)
    tl.store(unit_ptr + rows, uniform(words))
    tl.store(noise_ptr + rows, gumbel(words))
    tl.store(bound_ptr + rows, gumbel_bound(words))


def on_device(words: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uniform numbers, noise, and bounds of the noise in log2, as the kernels have them."""
    unit, noise, bound = torch.full((3, len(words)), torch.nan, device=DEVICE)
    gumbel_kernel[(1,)](torch.tensor(words, device=DEVICE), unit, noise, bound, COUNT=len(words))
    return unit, noise, bound


def test_philox_is_that_of_random123() -> None:
    padded = [*VECTORS, VECTORS[0]]
    counters = torch.tensor([counter for counter, _, _ in padded], device=DEVICE)
    keys = torch.tensor([key for _, key, _ in padded], device=DEVICE)
    words = torch.zeros_like(counters)
    philox_kernel[(1,)](counters, keys, words, COUNT=4)
    by_torch = torch.stack(reference.philox(counters.unbind(1), keys.unbind(1)), dim=1)
    for row, (counter, key, result) in enumerate(padded):
        expected = [int(word, 16) for word in result.split()]
        assert list(example.philox(counter, key)) == expected
        assert by_torch[row].tolist() == expected
        assert words[row].tolist() == expected


def test_noise_of_pinned_words() -> None:
    words = [word for word, _, _ in PINNED]
    unit, noise, _ = on_device(words)
    by_torch = reference.gumbel_of(torch.tensor(words))
    for i, (word, number, expected) in enumerate(PINNED):
        assert example.uniform(word) == float(unit[i]) == number
        assert example.gumbel(word) == pytest.approx(expected, abs=1e-12)
        assert float(by_torch[i]) == pytest.approx(expected, abs=4e-6)
        assert float(noise[i]) == pytest.approx(expected, abs=4e-6)


def test_bounds_are_above_the_noise_and_close_where_it_is_high() -> None:
    rng = torch.Generator().manual_seed(5)
    words = [2**i + j for i in range(1, 32) for j in (-1, 0, 1)] + [0, 2**32 - 1, 2**32 - 2**7]
    words += torch.randint(0, 2**32, (512 - len(words),), generator=rng).tolist()
    _, noise, bound = on_device(words)
    above = bound.double() - noise.double() / math.log(2)
    assert float(above.min()) > -1e-4  # the finish allows for ten times as much
    high = noise > 5
    assert int(high.sum()) > 60
    # of 4 billion words a dozen have a bound that no noise comes near
    lowest = torch.tensor(words, device=high.device) < 12
    assert float(above[high & ~lowest].max()) < 0.15
    assert float(above[lowest].max()) < 127


def test_the_best_noise_of_a_row_has_the_mean_of_gumbel() -> None:
    """Over many words: Euler's constant, and a variance of pi squared over 6."""
    rng = torch.Generator().manual_seed(5)
    noise = reference.gumbel_of(torch.randint(0, 2**32, (400_000,), generator=rng)).double()
    assert abs(float(noise.mean()) - 0.5772156649) < 4 * 1.2825 / math.sqrt(len(noise))
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03
