"""Steps whose states a host gives away: the same results, with fewer copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.ops.backend import Backend
from mtp_plugin.speculative.drafting import MTPWorker
from tests.speculative.drafting.test_kernels import Case, MixingLayer


@pytest.mark.parametrize("backend", Backend)
@settings(max_examples=6)
@given(
    k=st.integers(1, 4),
    starts=st.sampled_from([[0], [0, 0], [0, 3], []]),
    num_generations=st.integers(0, 3),
    vanilla=st.booleans(),
    seed=st.integers(0, 10**6),
    window=st.sampled_from(["exact", "exact", "trtllm"]),
    chain=st.sampled_from(["output", "target_shift", "none"]),
    returns_input=st.booleans(),
)
def test_states_that_may_be_overwritten(backend, starts, num_generations, **options: Any) -> None:
    """The same step whether a host reads its states again or not."""
    case = Case(
        chunks=[(start, 4 + i, True) for i, start in enumerate(starts)],
        num_generations=max(num_generations, 0 if starts else 1),
        vocab=130,
        hidden=24,
        **options,
    )
    outputs, pools = case.run(backend, may_overwrite_states=True)
    expected, expected_pools = case.run(backend)
    for key, value in expected.items():
        assert torch.equal(outputs[key], value), key
    for pool, value in zip(pools, expected_pools, strict=True):
        assert torch.equal(pool, value)


@pytest.mark.parametrize(
    ("options", "allowed", "stays"),
    [
        pytest.param({}, True, True, id="mixed"),
        pytest.param({}, False, False, id="mixed-forbidden"),
        pytest.param({"num_generations": 0}, False, True, id="prompts"),
        pytest.param({"chunks": []}, True, False, id="generations"),
        pytest.param({"chunks": [(0, 5, True), (2, 3, True)]}, True, False, id="history"),
        pytest.param({"window": "trtllm"}, True, False, id="trtllm-window"),
        pytest.param({"chain": "target_shift"}, True, False, id="target-shift"),
    ],
)
def test_states_stay_where_their_rows_do(
    options: dict[str, Any], allowed: bool, stays: bool
) -> None:
    """The first depth reads the step's own tensor, where that saves copying prompts."""
    shape = {"chunks": [(0, 5, True)], "num_generations": 2, **options}
    case = Case(k=3, vocab=64, hidden=16, seed=3, **shape)
    before, read = case.inputs["hidden_states"].clone(), []

    class Watched(MixingLayer):
        def __call__(self, *, hidden_states, **inputs: Any) -> torch.Tensor:
            read.append(hidden_states.data_ptr())
            return super().__call__(hidden_states=hidden_states, **inputs)

    layer, worker = case.layers[0], MTPWorker(case.config)
    case.layers[0] = Watched(layer.embedding, layer.head, returns_input=False)
    worker.backend, worker.may_overwrite_states = Backend.TRITON, allowed
    worker(
        **case.inputs,
        attn_metadata=case.attention,
        spec_metadata=case.spec,
        mtp_layers=case.layers,
    )
    states = case.inputs["hidden_states"]
    assert (read == [states.data_ptr()]) == stays
    assert torch.equal(states, before) != (stays and shape["num_generations"] > 0)
