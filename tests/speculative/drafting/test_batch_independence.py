"""R02 on the kernels: a request's step is the same alone and in any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtp_plugin.ops.backend import Backend
from tests.speculative.drafting.test_kernels import DEVICE, Case, MixingLayer


class PickingLayer(MixingLayer):
    """Its head picks ready rows of logits, so that no projection depends on its batch."""

    def __init__(self, embedding: torch.Tensor, table: torch.Tensor) -> None:
        super().__init__(embedding, embedding, returns_input=False)
        self.table = table  # [choices, V]

    def __call__(self, *, input_ids, **inputs: Any) -> torch.Tensor:
        return super().__call__(input_ids=input_ids % len(self.embedding), **inputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> PickingLayer:
        return self

    def shared_head(self, hidden, _lm_head, attn_metadata, return_all=False) -> torch.Tensor:
        if not return_all:
            ends = attn_metadata.seq_lens_cuda[: attn_metadata.num_seqs].long().cumsum(0) - 1
            hidden = hidden[ends]
        return self.table[(hidden[:, 0].float() * 64).round().long() % len(self.table)]


MIXED = [(0, 5, True), (3, 9, True), (2, 7, False)]


@pytest.mark.parametrize(
    ("batch", "hidden", "vocab", "dtype"),
    [
        pytest.param(5, 24, 4999, torch.float32, id="batch5"),
        pytest.param(
            64, 7168, 129280, torch.bfloat16, id="batch64-7168x129280", marks=pytest.mark.gpu
        ),
    ],
)
@pytest.mark.parametrize("prompts", [[], MIXED], ids=["generations", "mixed"])
@pytest.mark.parametrize("vanilla", [False, True], ids=["eagle", "vanilla"])
def test_r02_a_request_does_not_depend_on_its_batch(
    batch, hidden, vocab, dtype, prompts, vanilla
) -> None:
    """R02: K = 3, mixed lengths: what a request accepts and drafts is what it does alone."""
    rng = torch.Generator().manual_seed(7)
    case = Case(
        k=3,
        chunks=prompts,
        num_generations=batch,
        vocab=vocab,
        hidden=hidden,
        seed=5,
        vanilla=vanilla,
        draft_lens=True,
        dtype=dtype,
        ready_heads=True,
    )
    embedding = torch.randn(997, hidden, generator=rng).to(DEVICE, dtype)
    tables = [torch.randn(97, vocab, generator=rng).to(DEVICE) for _ in range(3)]
    case.layers = [PickingLayer(embedding, table) for table in tables]
    together, pools = case.run(Backend.TRITON)
    ours = ("new_tokens", "new_tokens_lens", "next_draft_tokens", "next_new_tokens", "status")
    requests = len(prompts) + batch
    for request in range(requests):
        alone, own_pools = case.alone(request).run(Backend.TRITON)
        for key in ours:
            assert torch.equal(together[key][request], alone[key][0]), (key, request)
        for pool, own in zip(pools, own_pools, strict=True):
            assert torch.equal(pool[case.slots[request]], own[case.slots[request]])
    matched = int((together["new_tokens_lens"] - 1).clamp_min(0).sum())
    assert matched > batch // 2
    assert len(together["next_draft_tokens"].unique()) > requests // 2
