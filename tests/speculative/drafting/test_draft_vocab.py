"""A cut draft vocabulary through the workers: the step of a whole head with other ids masked."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.backend import Backend
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker
from tests.ops.draft import example
from tests.ops.on_device import DEVICE, vector
from tests.speculative.drafting.test_kernels import Case, MixingLayer

WORKERS = [pytest.param(MTPEagleWorker, id="eagle"), pytest.param(MTPWorker, id="vanilla")]


class CutLayer(MixingLayer):
    """The head is one over the rows that the step's ``lm_head`` names, and over no other."""

    def shared_head(self, hidden, lm_head, attn_metadata, return_all=False) -> torch.Tensor:
        return super().shared_head(hidden, None, attn_metadata, return_all)[:, lm_head.long()]


class MaskedLayer(MixingLayer):
    """The whole head, in which only the ids that ``lm_head`` names have a value."""

    def shared_head(self, hidden, lm_head, attn_metadata, return_all=False) -> torch.Tensor:
        logits = super().shared_head(hidden, None, attn_metadata, return_all)
        masked = torch.full_like(logits, -torch.inf)
        return masked.index_copy(1, lm_head.long(), logits[:, lm_head.long()])


def run(
    case: Case, kind: type[MixingLayer], backend: Backend, ids: torch.Tensor
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """The step on its own copy of all state: outputs, and pools afterwards."""
    case = copy.deepcopy(case)
    worker_class = MTPWorker if case.vanilla else MTPEagleWorker
    given_ids = ids if kind is CutLayer else None
    worker = worker_class(case.config, device=DEVICE, draft_vocab_ids=given_ids)
    worker.backend = backend
    outputs = worker(
        **case.inputs,
        lm_head=ids,
        embed_tokens=None,
        attn_metadata=case.attention,
        spec_metadata=case.spec,
        mtp_layers=[kind(*vars(layer).values()) for layer in case.layers],
    )
    manager = case.manager
    return outputs, [manager.mtp_past_tokens_pool, manager.mtp_past_hidden_states_pool]


chunk = st.tuples(st.integers(0, 6), st.integers(1, 9), st.booleans())


@settings(max_examples=8)
@given(
    k=st.integers(1, 4),
    chunks=st.lists(chunk, max_size=2),
    num_generations=st.integers(1, 4),
    vocab=st.sampled_from([7, 130, 1500]),
    share=st.floats(0, 1),
    seed=st.integers(0, 10**6),
    vanilla=st.booleans(),
    chain=st.sampled_from(["output", "target_shift", "none"]),
    returns_input=st.booleans(),
)
def test_the_step_of_a_masked_head(vocab: int, share: float, seed: int, **options: Any) -> None:
    case = Case(vocab=vocab, hidden=8, seed=seed, **options)
    count = max(1, round(share * vocab))
    ids = vector(sorted(random.Random(seed).sample(range(vocab), count)), torch.int32)
    reduced, reduced_pools = run(case, MaskedLayer, Backend.TORCH, ids)
    assert torch.isin(reduced["next_draft_tokens"], ids).all()
    for ops in (Backend.TORCH, Backend.TRITON):
        outputs, pools = run(case, CutLayer, ops, ids)
        for key, value in reduced.items():
            assert torch.equal(outputs[key], value), key
            assert outputs[key].dtype == value.dtype
        for pool, value in zip(pools, reduced_pools, strict=True):
            assert torch.equal(pool, value)


@pytest.mark.parametrize("vanilla", [False, True], ids=["eagle", "vanilla"])
def test_a_cut_makes_a_difference_to_drafts_alone(vanilla: bool) -> None:
    case = Case(
        k=3, chunks=[(0, 4, True)], num_generations=4, vocab=130, hidden=8, seed=1, vanilla=vanilla
    )
    few, all_ids = vector([3, 50, 90], torch.int32), vector(range(130), torch.int32)
    cut, whole = (run(case, CutLayer, Backend.TRITON, ids)[0] for ids in (few, all_ids))
    plain = case.run(Backend.TRITON)[0]
    for key, value in plain.items():
        assert torch.equal(whole[key], value), key
        assert torch.equal(cut[key], value) is ("draft" not in key and "next" not in key), key


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("kind", WORKERS)
def test_the_public_step_gives_ids(kind: type, backend: Backend) -> None:
    ids = [2, 3, 7, 11]
    worker = kind(MTPDecodingConfig(max_draft_len=2), draft_vocab_ids=vector(ids, torch.int32))
    worker.backend = backend
    rows = [[0.0, 1.0, 1.0, -1.0], [0.0, 0.0, 0.0, 5.0]]
    logits = torch.full((2, 12), 9.0)
    logits[:, ids] = torch.tensor(rows)
    drafts = worker.draft_sampler(torch.tensor(rows, device=DEVICE))
    assert drafts.dtype == torch.int32
    assert (
        drafts.tolist() == [example.proposal_among(ids, row) for row in logits.tolist()] == [3, 11]
    )
    with pytest.raises(TensorContractError, match=r"logits: expected \[R, 4\], .* got \[2, 12\]"):
        worker.draft_sampler(logits.to(DEVICE))


@pytest.mark.parametrize("vanilla", [False, True], ids=["eagle", "vanilla"])
@pytest.mark.parametrize("backend", Backend)
def test_a_whole_head_with_draft_vocab_is_refused(vanilla: bool, backend: Backend) -> None:
    case = Case(k=2, chunks=[], num_generations=2, vocab=30, hidden=8, seed=1, vanilla=vanilla)
    kind = MTPWorker if vanilla else MTPEagleWorker
    worker = kind(case.config, device=DEVICE, draft_vocab_ids=vector(range(9), torch.int32))
    worker.backend = backend
    with pytest.raises(TensorContractError, match=r"expected \[R, 9\], .* got \[2, 30\]"):
        worker(
            **case.inputs,
            attn_metadata=case.attention,
            spec_metadata=case.spec,
            mtp_layers=case.layers,
        )


@pytest.mark.parametrize("kind", WORKERS)
def test_what_a_worker_is_made_with(kind: type) -> None:
    options = MTPDecodingConfig(max_draft_len=2, mtp={"draft_vocab": 9})
    worker = kind(options, draft_vocab_ids=torch.arange(9, dtype=torch.int32), device=DEVICE)
    assert worker.draft_vocab_ids.tolist() == list(range(9))
    assert worker.draft_vocab_ids.device.type == DEVICE.type
    assert "draft_vocab_ids" not in worker.state_dict()
    assert kind(SimpleNamespace(max_draft_len=2)).draft_vocab_ids is None
