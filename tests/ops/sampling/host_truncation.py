"""Whether a host's own truncation keeps the tokens that ours keeps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mtp_plugin.ops.sampling.sample_reference import truncate
from mtp_plugin.requests.columns import TopPMass
from tests.ops.sampling.margins import RARE, cut

ROWS, VOCAB = 10_000, 384
Truncation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def check_same_tokens(truncation: Truncation, mass: TopPMass) -> None:
    """Compare random rows, with every pair of cuts.

    Args:
        truncation: the host's, of scores [N, V], top-k [N], top-p [N] and min-p [N], each of which
            cuts; returns [N, V] whether tokens are kept.
        mass: what the adapter of the host gives its requests.
    """
    noise = torch.Generator().manual_seed(3)
    spread = torch.rand(ROWS, 1, generator=noise) * 4 + 0.2
    scores = (torch.randn(ROWS, VOCAB, generator=noise) * spread).log_softmax(dim=1)
    scores -= scores.amax(dim=1, keepdim=True)
    top_k = torch.randint(1, VOCAB // 4, (ROWS,), generator=noise)
    top_k[::3] = VOCAB
    top_p = torch.rand(ROWS, generator=noise) * 0.9 + 0.05
    top_p[1::3] = 1.0
    min_p = torch.rand(ROWS, generator=noise) * 0.2 + 1e-3
    min_p[2::6] = 0.0
    ours = truncate(scores, top_k, top_p, min_p, torch.full((ROWS,), mass)) > -torch.inf
    kept = truncation(scores, top_k, top_p, min_p)
    _, close = cut(
        scores.double(), top_k, top_p.double(), min_p.double(), torch.full((ROWS,), mass)
    )
    differs = ours != kept
    assert not (differs & ~close).any()
    assert differs.any(dim=1).sum() <= RARE * ROWS
