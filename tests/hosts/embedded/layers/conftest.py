"""Fused models and the same models without fused layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from mtp_plugin.hosts.embedded.models import FusedModel, LoadedModel, fuse, load_model

# the fixtures of models, whose layers these are
from tests.hosts.embedded.models.conftest import (  # noqa: F401
    _no_grad,
    checkpoint,
    edited,
    plain_attention,
)


class Twins(NamedTuple):
    plain: LoadedModel
    fused: FusedModel


@pytest.fixture(scope="session")
def twins(checkpoint: Callable[..., Path]) -> Callable[..., Twins]:  # noqa: F811
    """A checkpoint as transformers runs it, and fused; one pair per set of arguments."""
    made: dict[str, Twins] = {}

    def make(family: str, kernels: str = "triton", **options: object) -> Twins:
        key = f"{family} {kernels} {sorted(options.items())}"
        if key not in made:
            path = checkpoint(family, **options)
            fused = fuse(load_model(path), kernels=kernels)
            made[key] = Twins(load_model(path), fused)
        return made[key]

    return make
