"""Recurrent states of a host move on by what was accepted, in steps that have generations."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.hosts.tensorrt_llm.worker import _recurrent_states, worker_class

ACCEPTED = torch.tensor([1, 3])
INDICES = torch.tensor([5, 4, 9])


class Cache:
    """As 1.3a's."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def update_mamba_states(self, attn_metadata: Any, num_accepted_tokens: Any) -> None:
        self.calls.append({"metadata": attn_metadata, "accepted": num_accepted_tokens})


class IndexedCache(Cache):
    """As 1.3b's."""

    def update_mamba_states(  # type: ignore[override]
        self, attn_metadata: Any, num_accepted_tokens: Any, state_indices: Any
    ) -> None:
        super().update_mamba_states(attn_metadata, num_accepted_tokens)
        self.calls[-1]["indices"] = state_indices


def step(cache: Any, generations: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        kv_cache_manager=cache,
        num_generations=generations,
        num_contexts=1,
        mamba_metadata=SimpleNamespace(state_indices=INDICES),
    )


def test_a_cache_of_states() -> None:
    for cache in (Cache(), IndexedCache()):
        metadata = step(cache)
        after = _recurrent_states(SimpleNamespace(), metadata)
        assert after is not None
        assert cache.calls == []
        after(ACCEPTED)
        (call,) = cache.calls
        assert call["metadata"] is metadata
        assert call["accepted"] is ACCEPTED
        assert call.get("indices", INDICES) is INDICES
        assert ("indices" in call) is isinstance(cache, IndexedCache)


def test_states_outside_the_cache() -> None:
    committed: list[Any] = []
    worker = SimpleNamespace(
        _auxiliary_state_handlers=[object()],
        commit_auxiliary_speculative_states=lambda *arguments: committed.append(arguments),
    )
    after = _recurrent_states(worker, step(None))
    assert after is not None
    after(ACCEPTED)
    ((accepted, indices, contexts),) = committed
    assert accepted is ACCEPTED
    assert indices.tolist() == [5, 4]
    assert contexts == 1


def test_steps_without_any() -> None:
    assert _recurrent_states(SimpleNamespace(), step(Cache(), generations=0)) is None
    assert _recurrent_states(SimpleNamespace(_auxiliary_state_handlers=[]), step(object())) is None


@pytest.mark.parametrize("fails", [False, True])
def test_the_hosts_metadata_is_as_before_after_a_step(fails: bool) -> None:
    seen: list[Any] = []

    def forward(**inputs: Any) -> dict[str, torch.Tensor]:
        seen.append(inputs["attn_metadata"].after_acceptance)
        if fails:
            raise RuntimeError("broken")
        return {}

    worker: Any = worker_class(object, "forward")()
    worker.mtp_plugin_make = lambda: SimpleNamespace(forward=forward, draft_cache=None)
    metadata = step(Cache())
    before = dict(vars(metadata))
    names = ("input_ids", "position_ids", "hidden_states", "logits", "spec_metadata", "draft_model")
    with pytest.raises(RuntimeError) if fails else nullcontext():
        worker.forward(**dict.fromkeys(names), attn_metadata=metadata)
    assert callable(seen[0])
    assert vars(metadata) == before
