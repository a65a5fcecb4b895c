"""Concatenated weights: one storage, and the modules go on with views of it."""

from __future__ import annotations

import torch
from torch import nn

from mtp_plugin.hosts.embedded.layers.packing import Packer


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape), requires_grad=False)


def test_parts_become_views_of_the_whole() -> None:
    parts = [parameter(2, 3, 4), parameter(5, 4), parameter(1, 4)]
    before = [part.clone() for part in parts]
    packed = Packer().pack(parts)
    assert torch.equal(packed, torch.cat([part.reshape(-1, 4) for part in before]))
    storage = packed.untyped_storage().data_ptr()
    for part, old in zip(parts, before, strict=True):
        assert torch.equal(part, old)
        assert part.untyped_storage().data_ptr() == storage
        assert part.is_contiguous()
    packed[6, 1] = 9.0
    assert parts[1][0, 1] == 9.0


def test_vectors() -> None:
    parts = [parameter(3), parameter(2)]
    expected = torch.cat([part.clone() for part in parts])
    packed = Packer().pack(parts)
    assert torch.equal(packed, expected)
    assert torch.equal(parts[1], expected[3:])


def test_equal_parts_are_packed_once() -> None:
    packer, parts = Packer(), [parameter(2, 4), parameter(3, 4)]
    first = packer.pack(parts)
    assert packer.pack(list(parts)) is first
    assert packer.pack(parts[::-1]) is not first
