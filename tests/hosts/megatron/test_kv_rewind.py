"""`rewind_kv_cache` matches the example."""

from __future__ import annotations

import copy
import random
from inspect import signature

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.hosts.megatron import kv_rewind_triton
from mtp_plugin.hosts.megatron.kv_rewind import rewind_kv_cache
from mtp_plugin.hosts.megatron.types import RewoundBlocks
from mtp_plugin.ops.backend import Backend
from tests.hosts.megatron import example
from tests.hosts.megatron.batches import Tables, random_requests
from tests.hosts.megatron.example import Request
from tests.op_arguments import check_arguments
from tests.ops.on_device import (
    DEVICE,
    INDEX_DTYPES,
    forbid_launches,
    poisoned,
    replay_in_graph,
    vector,
)

both = pytest.mark.parametrize("backend", Backend)


def rewind(
    backend: Backend,
    tables: Tables,
    requests: list[Request],
    num_drafts: int,
    block_size: int,
    **options: object,
) -> RewoundBlocks:
    return rewind_kv_cache(
        vector(request.accepted for request in requests),
        vector((0 if request.is_decode else 1 for request in requests), torch.int32),
        *tables.tensors(),
        num_drafts,
        block_size,
        **options,
        backend=backend,
    )


def rows(values: list[list], dtype: torch.dtype) -> torch.Tensor:
    """[N, W], or [N] where W is 1."""
    tensor = vector(values, dtype)
    return tensor.squeeze(1) if tensor.dim() == 2 and tensor.shape[1] == 1 else tensor


@both
@pytest.mark.parametrize(
    ("num_drafts", "block_size", "offset", "accepted", "kept", "new_offset", "released", "marks"),
    [
        (3, 4, 1, 0, [7], 2, [9], [True]),
        (4, 4, 0, 0, [7], 0, [9], [True]),
        (5, 2, 0, 0, [3], 1, [9, 7, 5], [True, True, True]),
        (5, 2, 1, 4, [3, 5, 7, 9], 0, [9, 0, 0], [False, False, False]),
    ],
    ids=[
        "crosses",
        "a_whole_block",
        "three_blocks",
        "none_of_three",
    ],
)
def test_one_request(
    backend: Backend,
    num_drafts: int,
    block_size: int,
    offset: int,
    accepted: int,
    kept: list[int],
    new_offset: int,
    released: list[int],
    marks: list[bool],
) -> None:
    blocks = [7, 9] if len(released) == 1 else [3, 5, 7, 9]
    request = Request(True, blocks, offset, length=100, accepted=accepted)
    tables = Tables.of([request], width=5, dtype=torch.int32)
    after = Request(True, kept, new_offset, 100 - (num_drafts - accepted), accepted)
    result = rewind(backend, tables, [request], num_drafts, block_size)
    tables.assert_equal(Tables.of([after], width=5, dtype=torch.int32))
    assert torch.equal(result.blocks_to_release, rows([released], torch.int32))
    assert torch.equal(result.remove_mask, rows([marks], torch.bool))
    assert example.rewind([request], num_drafts, block_size, 1) == ([released], [marks])
    assert request == after


@both
@settings(max_examples=20)
@given(
    kinds=st.lists(st.booleans(), min_size=1, max_size=6) | st.just([True, False, True] * 12),
    num_padding=st.integers(0, 3),
    sizes=st.sampled_from([(0, 4), (1, 1), (1, 16), (3, 4), (4, 4), (5, 2), (5, 4)]),
    dtype=st.sampled_from(INDEX_DTYPES),
    on_device=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_batch(
    backend: Backend,
    kinds: list[bool],
    num_padding: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    on_device: bool,
    seed: int,
) -> None:
    """Decode and prefill requests in any order, then padding, which must not change."""
    num_drafts, block_size = sizes
    rng = random.Random(seed)
    requests = random_requests(rng, kinds + [True] * num_padding, num_drafts, block_size)
    width = max(len(request.blocks) for request in requests)
    tables = Tables.of(requests, width, dtype)
    columns = max(-(-num_drafts // block_size), 1)
    shape = (len(requests), columns) if columns > 1 else (len(requests),)
    out = poisoned(*shape, dtype=dtype), poisoned(*shape, dtype=torch.bool)
    active = len(kinds)
    num_active = vector([active], torch.int32) if on_device else active
    after = copy.deepcopy(requests)
    released, marks = example.rewind(after, num_drafts, block_size, active)

    result = rewind(
        backend, tables, requests, num_drafts, block_size, num_active_requests=num_active, out=out
    )
    tables.assert_equal(Tables.of(after, width, dtype))
    assert torch.equal(result.blocks_to_release, rows(released, dtype))
    assert torch.equal(result.remove_mask, rows(marks, torch.bool))
    assert result.blocks_to_release is out[0]
    assert result.remove_mask is out[1]


@settings(max_examples=20)
@given(
    num_drafts=st.sampled_from([1, 5]),
    block_size=st.sampled_from([2, 4]),
    max_blocks=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_any_values(num_drafts: int, block_size: int, max_blocks: int, seed: int) -> None:
    """Stale rows of a padded batch: the kernel stays inside the table and with the reference."""
    rng = random.Random(seed)
    n = 5
    guard = 2

    def numbers(low: int, high: int) -> torch.Tensor:
        return vector([rng.randint(low, high) for _ in range(n)])

    ids = vector([rng.randrange(50) for _ in range((n + 2 * guard) * max_blocks)])
    whole = ids.view(n + 2 * guard, max_blocks)
    first = Tables(
        offset=numbers(-2 * block_size, 3 * block_size),
        length=numbers(-3, 3),
        count=numbers(-2, max_blocks + 3),
        last=numbers(-1, 50),
        ids=whole,
    )
    second = first.clone()
    accepted, status = numbers(-2, num_drafts + 2), numbers(-1, 1)
    results = []
    for backend, tables in ((Backend.TORCH, first), (Backend.TRITON, second)):
        state = [*tables.tensors()[:-1], tables.ids[guard : n + guard]]
        sizes = num_drafts, block_size
        results.append(rewind_kv_cache(accepted, status, *state, *sizes, backend=backend))
    first.assert_equal(second)
    assert torch.equal(results[0].blocks_to_release, results[1].blocks_to_release)
    assert torch.equal(results[0].remove_mask, results[1].remove_mask)
    outside = [*range(guard), *range(n + guard, n + 2 * guard)]
    assert torch.equal(second.ids[outside], ids.view_as(whole)[outside])


@both
def test_a_bool_status(backend: Backend) -> None:
    tables = Tables.of([Request(True, [7, 9], 0, 10, 0)] * 2, width=2, dtype=torch.int64)
    status = vector([0, 1], torch.bool)
    result = rewind_kv_cache(vector([0, 0]), status, *tables.tensors(), 1, 4, backend=backend)
    assert torch.equal(result.remove_mask, vector([1, 0], torch.bool))
    assert torch.equal(tables.count[:2], vector([1, 2]))


@both
def test_types_may_differ(backend: Backend) -> None:
    """int64 counts from the device's sampler, int32 tables of the host."""
    tables = Tables.of([Request(True, [7, 9], 0, 10, 0)], width=2, dtype=torch.int32)
    tables.ids = tables.ids.to(torch.int64)
    state = tables.tensors()
    result = rewind_kv_cache(vector([0]), vector([0]), *state, 1, 4, backend=backend)
    assert result.blocks_to_release.dtype == torch.int32
    assert torch.equal(tables.ids[0], vector([7, -1]))


@both
def test_empty_batch_launches_nothing(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_launches(monkeypatch, kv_rewind_triton)
    tables = Tables.of([], width=4, dtype=torch.int32)
    before = tables.clone()
    assert rewind(backend, tables, [], 3, 4).remove_mask.shape == (0,)
    assert rewind(backend, tables, [], 9, 4).blocks_to_release.shape == (0, 3)
    tables.assert_equal(before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_block_counts": poisoned(0)}, "kv_block_counts: expected"),
        ({"kv_block_ids": poisoned(1, 4)}, r"kv_block_ids: .*\[>= 2, >= 1\].*\[1, 4\]"),
        ({"kv_block_ids": poisoned(2, 0)}, r"kv_block_ids: .*>= 1\].*\[2, 0\]"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens: expected .* >= 0, got -1"),
        ({"block_size_tokens": 0}, "block_size_tokens: expected .* >= 1, got 0"),
        ({"num_active_requests": poisoned(2)}, "num_active_requests: expected one integer"),
        ({"out": (poisoned(2), poisoned(2))}, "out, remove_mask: .*torch.bool"),
        ({"out": (poisoned(3), poisoned(2))}, r"out, blocks_to_release: .*\[2\]"),
        ({"out": (poisoned(2), poisoned(4, dtype=torch.bool)[::2])}, "out, remove_mask: .*cont"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused(change: dict, message: str) -> None:
    requests = [Request(True, [7, 9], 0, 10, 0)] * 2
    tables = Tables.of(requests, width=4, dtype=torch.int64)
    values = [vector([0, 0]), vector([0, 0]), *tables.tensors(), 3, 4, None, None, Backend.TORCH]
    arguments = dict(zip(signature(rewind_kv_cache).parameters, values, strict=True)) | change
    with pytest.raises(TensorContractError, match=message):
        rewind_kv_cache(**arguments)


@both
def test_arguments(backend: Backend) -> None:
    """Nothing is copied: tensors that are not contiguous are refused by name, like wrong ones."""
    requests = random_requests(random.Random(5), [True, False, True], 3, 2)
    arguments: dict[str, object] = {
        "accepted_counts": vector(request.accepted for request in requests),
        "prefill_status": vector([0, 1, 0]),
    }
    names = ["last_kv_block_offset", "kv_length_offsets", "kv_block_counts", "last_kv_block_id"]
    *columns, table = Tables.of(requests, 6, torch.int64).tensors()
    arguments |= dict(zip(names, columns, strict=True))
    refused = {name: f"{name}: expected contiguous" for name in arguments}
    refused["kv_block_ids"] = "row-contiguous"
    arguments |= {"kv_block_ids": table.contiguous(), "num_active_requests": vector([2])}
    arguments |= {"num_speculative_tokens": 3, "block_size_tokens": 2}
    # more rows than requests may be given, and the one integer in any shape
    free = {f"{name}: shorter" for name in arguments} | {"num_active_requests: dimensions"}
    check_arguments(rewind_kv_cache, arguments, refused=refused, free=free, backend=backend)


@pytest.mark.gpu
def test_graph_replays_with_changed_counts_and_batch() -> None:
    """256 rows; between replays the counts, the tables and the number of requests change."""
    num_drafts, block_size = 9, 4
    rng = random.Random(num_drafts)

    def new_tables() -> tuple[Tables, list[Request]]:
        requests = random_requests(rng, [True] * 256, num_drafts, block_size)
        return Tables.of(requests, 64, torch.int32), requests

    tables, requests = new_tables()
    changed, others = new_tables()
    accepted = vector(request.accepted for request in requests)
    status = torch.zeros(256, dtype=torch.int32, device=DEVICE)
    active = vector([256], torch.int32)
    columns = max(-(-num_drafts // block_size), 1)
    shape = (256, columns) if columns > 1 else (256,)
    out = poisoned(*shape, dtype=torch.int32), poisoned(*shape, dtype=torch.bool)

    def step() -> None:
        rewind_kv_cache(
            accepted,
            status,
            *tables.tensors(),
            num_drafts,
            block_size,
            active,
            out=out,
            backend=Backend.TRITON,
        )

    def change() -> None:
        for old, new in zip(tables.tensors(), changed.tensors(), strict=True):
            old.copy_(new)
        accepted.copy_(vector(request.accepted for request in others))
        active.fill_(201)

    replay_in_graph(step, change)
    state = changed.tensors()
    expected = rewind_kv_cache(
        accepted, status, *state, num_drafts, block_size, 201, backend=Backend.TORCH
    )
    tables.assert_equal(changed)
    assert torch.equal(out[0], expected.blocks_to_release)
    assert torch.equal(out[1], expected.remove_mask)
