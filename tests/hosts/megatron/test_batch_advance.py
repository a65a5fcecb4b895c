"""`advance_decode_batch` matches the example, and the three functions one after the other."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.hosts.megatron import batch_advance_triton
from mtp_plugin.hosts.megatron.batch_advance import advance_decode_batch
from mtp_plugin.hosts.megatron.kv_rewind import rewind_kv_cache
from mtp_plugin.hosts.megatron.next_forward import prepare_next_forward_pass
from mtp_plugin.hosts.megatron.token_verify import verify_speculative_tokens
from mtp_plugin.hosts.megatron.types import AdvancedBatch, KVBlockState, NextForwardBuffers
from mtp_plugin.ops.backend import Backend
from tests.hosts.megatron import example
from tests.hosts.megatron.batches import Tables, flat_tokens, random_decodes, random_requests
from tests.hosts.megatron.example import Decode, Request
from tests.op_arguments import check_strided_arguments
from tests.ops.letters import ids
from tests.ops.on_device import (
    INDEX_DTYPES,
    POISON,
    poisoned,
    replay_in_graph,
    vector,
)

both = pytest.mark.parametrize("backend", Backend)


def random_batch(seed: int, num_decodes: int, **options: Any) -> Batch:
    rng = random.Random(seed)
    num_drafts = options.get("num_drafts", 3)
    block_size = options.get("block_size", 4)
    num_prefills = options.get("num_prefills", 0)
    kinds = [True] * num_decodes + [False] * num_prefills
    return Batch(
        decodes=random_decodes(rng, num_decodes, num_drafts),
        prefills=[rng.randrange(3) for _ in range(num_prefills)],
        requests=random_requests(rng, kinds, num_drafts, block_size),
        num_drafts=num_drafts,
        block_size=block_size,
        num_padding=options.get("num_padding", 0),
        dtype=options.get("dtype", torch.int64),
        max_blocks=options.get("max_blocks", 16),
    )


@dataclass
class Batch:
    """One step of a host engine: tokens, KV of the same requests, and poisoned results."""

    decodes: list[Decode]
    prefills: list[int]
    requests: list[Request]
    num_drafts: int
    block_size: int
    num_padding: int = 0
    dtype: torch.dtype = torch.int64
    max_blocks: int = 16

    def __post_init__(self) -> None:
        for request, decode in zip(self.requests, self.decodes, strict=False):
            request.accepted = decode.num_accepted() - 1
        padding = [1] * self.num_padding
        self.inputs, self.outputs = flat_tokens(self.decodes, self.prefills, padding, self.dtype)
        self.rows = [7 * entry + 3 for entry in range(self.outputs.shape[0])]
        n, d = len(self.requests), len(self.decodes)
        self.buffers = NextForwardBuffers(
            sampled_tokens_buf=poisoned(n + 1, dtype=self.dtype),
            last_accepted_seq_buf=poisoned(n + 1),
            accepted_tokens_per_request=poisoned(d + 1, self.num_drafts + 1)[:, 1:],
            accepted_token_counts=poisoned(d + 1),
        )
        self.tables = Tables.of(self.requests, self.max_blocks, self.dtype)
        columns = max(-(-self.num_drafts // self.block_size), 1)
        shape = (n, columns) if columns > 1 else (n,)
        self.out = AdvancedBatch(
            poisoned(n),
            poisoned(self.inputs.shape[0], dtype=torch.bool),
            poisoned(*shape, dtype=self.dtype),
            poisoned(*shape, dtype=torch.bool),
        )
        self.indices = vector(self.rows, self.dtype)

    def arguments(self, num_active: int | torch.Tensor | None = None) -> dict[str, Any]:
        return {
            "input_tokens": self.inputs,
            "output_tokens": self.outputs,
            "required_logit_indices": self.indices,
            "buffers": self.buffers,
            "kv": KVBlockState(*self.tables.tensors()),
            "num_decode_requests": len(self.decodes),
            "num_prefill_requests": len(self.prefills),
            "num_speculative_tokens": self.num_drafts,
            "block_size_tokens": self.block_size,
            "num_active_requests": num_active,
            "out": self.out,
        }

    def assert_matches_example(self, num_active: int) -> None:
        """Results, buffers and tables match the example."""
        last, mask = example.verify(self.decodes, len(self.prefills), self.num_padding)
        assert torch.equal(self.out.last_one_indices, vector(last))
        assert torch.equal(self.out.accepted_tokens_mask, vector(mask, torch.bool))

        outputs = [token + 1 for token in self.prefills]
        inputs = example.next_inputs(self.decodes, outputs, self.rows)
        sampled = [request.sampled for request in inputs] + [POISON]
        assert torch.equal(self.buffers.sampled_tokens_buf, vector(sampled, self.dtype))
        rows = [request.row for request in inputs] + [POISON]
        assert torch.equal(self.buffers.last_accepted_seq_buf, vector(rows))
        of_decodes = inputs[: len(self.decodes)]
        counts = [request.count for request in of_decodes] + [POISON]
        assert torch.equal(self.buffers.accepted_token_counts, vector(counts))
        drafts = [request.drafts for request in of_decodes] + [[POISON] * self.num_drafts]
        expected = vector(drafts).view(len(drafts), self.num_drafts)
        assert torch.equal(self.buffers.accepted_tokens_per_request, expected)

        after = copy.deepcopy(self.requests)
        released, marks = example.rewind(after, self.num_drafts, self.block_size, num_active)
        self.tables.assert_equal(Tables.of(after, self.max_blocks, self.dtype))
        shape = self.out.remove_mask.shape
        blocks = vector(released, self.dtype).view(shape)
        assert torch.equal(self.out.blocks_to_release, blocks)
        assert torch.equal(self.out.remove_mask, vector(marks, torch.bool).view(shape))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a step reads and writes, by name."""
        named = {"inputs": self.inputs, "outputs": self.outputs, "indices": self.indices}
        named |= {field.name: getattr(self.buffers, field.name) for field in fields(self.buffers)}
        named |= {field.name: getattr(self.tables, field.name) for field in fields(self.tables)}
        return named | self.out._asdict()


@both
def test_letters(backend: Backend) -> None:
    """`a b c d`, outputs `b x y z`, two tokens in block 9: `x` comes next, two tokens go back."""
    batch = Batch([Decode(ids("abcd"), ids("bxyz"))], [], [Request(True, [7, 9], 1, 50, 0)], 3, 4)
    advance_decode_batch(**batch.arguments(), backend=backend)
    assert torch.equal(batch.out.last_one_indices, vector([1]))
    assert torch.equal(batch.buffers.sampled_tokens_buf[:1], vector(ids("x")))
    assert torch.equal(batch.buffers.accepted_tokens_per_request[0], vector(ids("b..")))
    assert torch.equal(batch.tables.length[:1], vector([48]))
    assert torch.equal(batch.tables.offset[:1], vector([3]))
    assert torch.equal(batch.tables.ids[0, :2], vector([7, -1]))
    assert torch.equal(batch.tables.last[:1], vector([7]))
    assert torch.equal(batch.out.blocks_to_release, vector([9]))
    assert torch.equal(batch.out.remove_mask, vector([1], torch.bool))


@both
@given(
    num_decodes=st.integers(0, 5) | st.just(35),
    num_prefills=st.integers(0, 3) | st.just(33),
    num_padding=st.integers(0, 3),
    num_inactive=st.integers(0, 3) | st.none(),
    sizes=st.sampled_from([(0, 4), (1, 1), (1, 16), (3, 4), (4, 4), (5, 2), (5, 4)]),
    dtype=st.sampled_from(INDEX_DTYPES),
    on_device=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_batch(
    backend: Backend,
    num_decodes: int,
    num_prefills: int,
    num_padding: int,
    num_inactive: int | None,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    on_device: bool,
    seed: int,
) -> None:
    num_drafts, block_size = sizes
    batch = random_batch(
        seed,
        num_decodes,
        num_prefills=num_prefills,
        num_padding=num_padding,
        num_drafts=num_drafts,
        block_size=block_size,
        dtype=dtype,
    )
    if num_decodes + num_prefills == 0:
        batch.out = None if num_inactive is None else batch.out
        result = advance_decode_batch(**batch.arguments(), backend=backend)
        assert not result.accepted_tokens_mask.any()
        return
    num_active = max(num_decodes + num_prefills - (num_inactive or 0), 0)
    given_active = vector([num_active], torch.int32) if on_device else num_active
    given_active = None if num_inactive is None else given_active
    result = advance_decode_batch(**batch.arguments(given_active), backend=backend)
    batch.assert_matches_example(num_active)
    for written, given_out in zip(result, batch.out, strict=True):
        assert written is given_out


@both
def test_the_same_as_three_calls(backend: Backend) -> None:
    batch, apart = (random_batch(9, 40, num_prefills=5, num_padding=2) for _ in range(2))
    advance_decode_batch(**batch.arguments(num_active=42), backend=backend)

    last, mask, tokens = verify_speculative_tokens(
        apart.inputs, apart.outputs, 40, 5, 3, out=apart.out[:2], backend=backend
    )
    buffers = apart.buffers
    step = apart.outputs, apart.indices, last, mask, tokens
    prepare_next_forward_pass(40, *step, *vars(buffers).values(), 3, backend=backend)
    counts = torch.cat([buffers.accepted_token_counts[:40], poisoned(5)])
    status = vector([0] * 40 + [1] * 5, torch.int32)
    tables = apart.tables.tensors()
    rewind_kv_cache(counts, status, *tables, 3, 4, 42, out=apart.out[2:], backend=backend)
    expected = apart.tensors()
    for name, tensor in batch.tensors().items():
        assert torch.equal(tensor, expected[name]), name


@both
def test_results_are_allocated_without_out(backend: Backend) -> None:
    batch = random_batch(3, 4, num_drafts=5, block_size=2, dtype=torch.int32)
    batch.out = advance_decode_batch(**batch.arguments() | {"out": None}, backend=backend)
    batch.assert_matches_example(4)


@both
def test_empty_batch_launches_nothing(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_advance_triton, "_launches", None)
    batch = random_batch(0, 0, num_padding=2)
    before = {name: tensor.clone() for name, tensor in batch.tensors().items()}
    before["accepted_tokens_mask"] = vector([0, 0], torch.bool)
    advance_decode_batch(**batch.arguments(), backend=backend)
    for name, tensor in batch.tensors().items():
        assert torch.equal(tensor, before[name]), name


@both
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_tokens": poisoned(1, 8)}, r"input_tokens: .*got .*\[1, 8\]"),
        ({"output_tokens": poisoned(4)}, r"output_tokens: expected .*\[>= 5\]"),
        ({"required_logit_indices": poisoned(10)[::2]}, "required_logit_indices: .*contiguous"),
        ({"num_decode_requests": -1}, "num_decode_requests: expected .* >= 0, got -1"),
        ({"block_size_tokens": 0}, "block_size_tokens: expected .* >= 1, got 0"),
        ({"num_active_requests": poisoned(1, dtype=torch.bool)}, "num_active_requests: expected"),
        ({"sampled_tokens_buf": poisoned(1)}, r"sampled_tokens_buf: expected .*\[>= 2\]"),
        ({"last_accepted_seq_buf": poisoned(0)}, "last_accepted_seq_buf: expected"),
        ({"accepted_token_counts": poisoned(0)}, r"accepted_token_counts: expected .*\[>= 1\]"),
        ({"accepted_tokens_per_request": poisoned(2, 4)}, r"accepted_tokens_per_request: .*2, 4\]"),
        ({"last_kv_block_offset": torch.zeros(2, device="meta")}, "last_kv_block_offset: .*meta"),
        ({"kv_length_offsets": poisoned(2, dtype=torch.float32)}, "kv_length_offsets: .*float32"),
        ({"kv_block_counts": poisoned(1)}, "kv_block_counts: expected"),
        ({"last_kv_block_id": poisoned(1)}, "last_kv_block_id: expected"),
        ({"kv_block_ids": poisoned(4, 2).T}, "kv_block_ids: expected row-contiguous"),
        ({"last_one_indices": poisoned(3)}, r"out, last_one_indices: .*torch.int64 tensor \[2\]"),
        ({"accepted_tokens_mask": poisoned(5)}, "out, accepted_tokens_mask: .*torch.bool"),
        ({"blocks_to_release": poisoned(2, dtype=torch.int32)}, "out, blocks_to_release: .*int64"),
        ({"remove_mask": poisoned(2, 1, dtype=torch.bool)}, r"out, remove_mask: .*\[2, 1\]"),
        ({"last_one_indices": poisoned(4)[::2]}, "out, last_one_indices: expected contiguous"),
        ({"accepted_tokens_mask": poisoned(10, dtype=torch.bool)[::2]}, "out, accepted_tokens_m"),
        ({"blocks_to_release": poisoned(4)[::2]}, "out, blocks_to_release: expected contiguous"),
        ({"remove_mask": poisoned(4, dtype=torch.bool)[::2]}, "out, remove_mask: .*contiguous"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused(
    backend: Backend, change: dict[str, Any], message: str
) -> None:
    arguments = random_batch(1, 1, num_prefills=1).arguments()
    for group in ("buffers", "kv"):
        named = vars(arguments[group])
        changed = {name: change.get(name, tensor) for name, tensor in named.items()}
        arguments[group] = type(arguments[group])(**changed)
    out = {name: value for name, value in change.items() if name in AdvancedBatch._fields}
    arguments["out"] = arguments["out"]._replace(**out)
    arguments |= {name: value for name, value in change.items() if name in arguments}
    with pytest.raises(TensorContractError, match=message):
        advance_decode_batch(**arguments, backend=backend)


@both
def test_strided_arguments(backend: Backend) -> None:
    """Nothing is copied: tensors that are not contiguous are refused by name."""
    batch = random_batch(4, 3, num_prefills=2)
    drafts = batch.buffers.accepted_tokens_per_request.contiguous()
    batch.buffers = replace(batch.buffers, accepted_tokens_per_request=drafts)
    batch.tables.ids = batch.tables.ids.contiguous()
    arguments = batch.arguments(vector([4])) | {"out": None}
    vectors = "input_tokens output_tokens required_logit_indices"
    records = {
        "buffers": "sampled_tokens_buf last_accepted_seq_buf accepted_token_counts",
        "kv": "last_kv_block_offset kv_length_offsets kv_block_counts last_kv_block_id",
    }
    refused = {name: f"{name}: expected contiguous" for name in vectors.split()}
    for record, names in records.items():
        refused |= {f"{record}.{name}": f"{name}: expected contiguous" for name in names.split()}
    refused |= {
        f"{record}.{name}": f"{name}: expected row-contiguous"
        for record, name in (("buffers", "accepted_tokens_per_request"), ("kv", "kv_block_ids"))
    }
    check_strided_arguments(advance_decode_batch, arguments, refused=refused, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize("num_decodes", [1, 8, 64, 256, 1024])
@pytest.mark.parametrize(("num_drafts", "block_size"), [(1, 64), (3, 256), (9, 4)])
def test_graph_replays_with_changed_batch(
    num_decodes: int, num_drafts: int, block_size: int
) -> None:
    """Tokens, tables and the number of active requests change between replays."""
    options = {
        "num_drafts": num_drafts,
        "block_size": block_size,
        "num_prefills": 3,
        "num_padding": 5,
        "dtype": torch.int32,
        "max_blocks": 64,
    }
    batch = random_batch(1, num_decodes, **options)
    other = random_batch(2, num_decodes, **options)
    changed = {name: tensor.clone() for name, tensor in other.tensors().items()}
    active = vector([num_decodes + 3], torch.int32)
    arguments = batch.arguments(active)

    def change() -> None:
        for name, tensor in batch.tensors().items():
            tensor.copy_(changed[name])
        active.fill_(num_decodes)

    replay_in_graph(lambda: advance_decode_batch(**arguments, backend=Backend.TRITON), change)
    advance_decode_batch(**other.arguments(num_decodes), backend=Backend.TORCH)
    other.assert_matches_example(num_decodes)
    expected = other.tensors()
    for name, tensor in batch.tensors().items():
        assert torch.equal(tensor, expected[name]), name
