"""`prepare_next_forward_pass` matches the example."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.hosts.megatron import next_forward_triton
from mtp_plugin.hosts.megatron.next_forward import prepare_next_forward_pass
from mtp_plugin.ops.backend import Backend
from tests.hosts.megatron import example
from tests.hosts.megatron.batches import flat_tokens, random_decodes
from tests.hosts.megatron.example import Decode, NextInputs
from tests.op_arguments import check_arguments
from tests.ops.letters import ids
from tests.ops.on_device import (
    INDEX_DTYPES,
    POISON,
    forbid_launches,
    poisoned,
    replay_in_graph,
    vector,
)

both = pytest.mark.parametrize("backend", Backend)


@dataclass
class Call:
    """A verified step and poisoned buffers, `spare` rows longer than the batch."""

    decodes: list[Decode]
    prefills: list[int]
    rows: list[int]
    num_drafts: int
    dtype: torch.dtype = torch.int64
    spare: int = 2

    def __post_init__(self) -> None:
        self.inputs, self.outputs = flat_tokens(self.decodes, self.prefills, [], self.dtype)
        last, mask = example.verify(self.decodes, len(self.prefills))
        self.last, self.mask = vector(last), vector(mask, torch.bool)
        requests = len(last) + self.spare
        self.sampled = poisoned(requests, dtype=self.dtype)
        self.sequence = poisoned(requests)
        # one column more than drafts, so that rows do not follow each other in memory
        self.drafts = poisoned(len(self.decodes) + self.spare, self.num_drafts + 1)[:, 1:]
        self.counts = poisoned(len(self.decodes) + self.spare, dtype=self.dtype)

    def run(self, backend: Backend) -> None:
        prepare_next_forward_pass(**self.arguments(), backend=backend)

    def arguments(self) -> dict:
        return {
            "num_decode_requests": len(self.decodes),
            "output_tokens": self.outputs,
            "required_logit_indices": vector(self.rows, self.dtype),
            "last_one_indices": self.last,
            "accepted_tokens_mask": self.mask,
            "input_tokens": self.inputs,
            "sampled_tokens_buf": self.sampled,
            "last_accepted_seq_buf": self.sequence,
            "accepted_tokens_per_request": self.drafts,
            "accepted_token_counts": self.counts,
            "num_speculative_tokens": self.num_drafts,
        }

    def assert_inputs(self, inputs: list[NextInputs]) -> None:
        spare = [POISON] * self.spare
        decodes = [request for request in inputs if request.drafts is not None]
        self._assert_is(self.sampled, [request.sampled for request in inputs] + spare)
        self._assert_is(self.sequence, [request.row for request in inputs] + spare)
        self._assert_is(self.counts, [request.count for request in decodes] + spare)
        drafts = [request.drafts for request in decodes] + [[POISON] * self.num_drafts] * self.spare
        expected = vector(drafts).view(len(drafts), self.num_drafts)
        assert torch.equal(self.drafts, expected)

    @staticmethod
    def _assert_is(tensor: torch.Tensor, values: list) -> None:
        assert torch.equal(tensor, vector(values, tensor.dtype))


@both
def test_letters(backend: Backend) -> None:
    """`a b c d` with outputs `b c x y`: sampled `x`, drafts `b c .`; a prompt `p` just goes on."""
    decode = Decode(ids("abcd"), ids("bcxy"))
    call = Call([decode], ids("p"), rows=[10, 11, 12, 13, 20], num_drafts=3)
    x, q = ids("xq")
    inputs = [NextInputs(x, 12, ids("bc."), 2), NextInputs(q, 20, None, None)]
    assert example.next_inputs([decode], [q], call.rows) == inputs
    call.run(backend)
    call.assert_inputs(inputs)


@both
@settings(max_examples=20)
@given(
    num_decodes=st.integers(0, 5) | st.just(35),
    num_prefills=st.integers(0, 4) | st.just(33),
    num_drafts=st.sampled_from([0, 1, 3, 4]),
    dtype=st.sampled_from(INDEX_DTYPES),
    spare=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
def test_any_batch(
    backend: Backend,
    num_decodes: int,
    num_prefills: int,
    num_drafts: int,
    dtype: torch.dtype,
    spare: int,
    seed: int,
) -> None:
    rng = random.Random(seed)
    decodes = random_decodes(rng, num_decodes, num_drafts)
    prefills = [rng.randrange(3) for _ in range(num_prefills)]
    rows = [rng.randrange(1000) for _ in range(num_decodes * (num_drafts + 1) + num_prefills)]
    call = Call(decodes, prefills, rows, num_drafts, dtype, spare)
    call.run(backend)
    call.assert_inputs(example.next_inputs(decodes, [token + 1 for token in prefills], rows))


@both
def test_the_mask_decides_about_each_draft(backend: Backend) -> None:
    """A mask of the caller's own need not be a prefix."""
    call = Call([Decode(ids("abcd"), ids("xxxx"))], [], rows=[0, 1, 2, 3], num_drafts=3)
    call.mask = vector([1, 0, 1, 1], torch.bool)
    call.run(backend)
    assert torch.equal(call.drafts[0], vector(ids(".cd")))
    assert torch.equal(call.counts, vector([2, POISON, POISON]))


@both
def test_empty_batch_launches_nothing(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_launches(monkeypatch, next_forward_triton)
    call = Call([], [], rows=[], num_drafts=2)
    call.run(backend)
    call.assert_inputs([])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_decode_requests": 3}, r"num_decode_requests: expected an integer in 0\.\.2, got 3"),
        ({"num_decode_requests": -1}, "num_decode_requests: expected an integer .*got -1"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens: expected .* >= 0, got -1"),
        ({"output_tokens": poisoned(4)}, r"output_tokens: expected .*\[>= 5\]"),
        ({"sampled_tokens_buf": poisoned(1)}, r"sampled_tokens_buf: expected .*\[>= 2\]"),
        ({"accepted_tokens_per_request": poisoned(1, 2)}, r"accepted_tokens_per_request: .*, 3\]"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused(change: dict, message: str) -> None:
    call = Call([Decode(ids("abcd"), ids("bcxy"))], ids("p"), rows=[0] * 5, num_drafts=3)
    with pytest.raises(TensorContractError, match=message):
        prepare_next_forward_pass(**(call.arguments() | change), backend=Backend.TORCH)


@both
def test_arguments(backend: Backend) -> None:
    """Nothing is copied: tensors that are not contiguous are refused by name, like wrong ones."""
    decodes = random_decodes(random.Random(6), 2, 3)
    call = Call(decodes, ids("p"), rows=list(range(9)), num_drafts=3)
    call.drafts = call.drafts.contiguous()
    arguments = call.arguments()
    tensors = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    refused = {name: f"{name}: expected contiguous" for name in tensors}
    refused["accepted_tokens_per_request"] = "row-contiguous"
    buffers = ("sampled_tokens_buf", "last_accepted_seq_buf", "accepted_token_counts")
    free = {f"{name}: shorter" for name in (*buffers, "last_one_indices")}
    free.add("accepted_tokens_per_request: shorter")
    check_arguments(
        prepare_next_forward_pass, arguments, refused=refused, free=free, backend=backend
    )


@pytest.mark.gpu
def test_graph_replays_with_changed_tokens() -> None:
    num_decodes, num_drafts = 256, 3
    rng = random.Random(num_decodes)

    def new_call() -> Call:
        decodes = random_decodes(rng, num_decodes, num_drafts)
        rows = list(range(num_decodes * (num_drafts + 1) + 4))
        return Call(decodes, ids("pqrs"), rows, num_drafts)

    arguments, changed = new_call().arguments(), new_call().arguments()

    def change() -> None:
        for name, tensor in arguments.items():
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(changed[name])

    replay_in_graph(lambda: prepare_next_forward_pass(**arguments, backend=Backend.TRITON), change)
    prepare_next_forward_pass(**changed, backend=Backend.TORCH)
    for name, tensor in arguments.items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, changed[name]), name
