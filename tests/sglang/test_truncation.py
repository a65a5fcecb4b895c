"""Truncation: the plugin keeps the tokens that SGLang without drafts keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtp_plugin.requests.columns import TopPMass
from tests.ops.sampling.host_truncation import check_same_tokens


def test_kept_tokens_are_those_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    def kept(scores: torch.Tensor, *cuts: torch.Tensor) -> torch.Tensor:
        given: list[torch.Tensor] = []

        def first(probs: torch.Tensor, **_: Any) -> torch.Tensor:
            given.append(probs)
            return torch.zeros(len(probs), 1, dtype=torch.int64)

        monkeypatch.setattr(torch, "multinomial", first)
        probs = scores.softmax(dim=1)
        order = probs.sort(dim=1, descending=True).indices
        top_k_top_p_min_p_sampling_from_probs_torch(
            probs, *cuts, need_min_p_sampling=True, sampling_seed=None, positions=order
        )
        return torch.zeros_like(probs, dtype=torch.bool).scatter_(1, order, given[0] > 0)

    check_same_tokens(kept, TopPMass.ALL)
