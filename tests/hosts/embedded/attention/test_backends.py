"""Every backend against the example: the same rows written, the same rows attended."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import ConfigError, MetadataError, TensorContractError
from mtp_plugin.hosts.embedded.attention import PagedAttentionMetadata, find_backend
from mtp_plugin.hosts.embedded.attention import triton as launch
from mtp_plugin.hosts.embedded.kv_cache import PagedKVPools
from mtp_plugin.speculative.drafting.attention_loop import draft_loop
from tests.hosts.embedded.attention import example as example_of
from tests.hosts.embedded.attention.case import LAYER, Case, Heads, random_case
from tests.ops.on_device import DEVICE, forbid_launches
from tests.ops.top_k.launches import poisoned_outputs

BACKENDS = ["sdpa", "triton"]
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Of values of unit variance, absolute: rounding of weights and results in the type."""


@pytest.fixture(autouse=True)
def _small_tiles() -> Iterator[None]:
    """Tiles of 16 keys and splits of one tile, so that tiny contexts take every turn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "KEY_TILE_BYTES", 512)
        patch.setattr(launch, "SPLIT_KEYS", 16)
        yield


def assert_matches_example(case: Case, name: str, scaling: float | None = None) -> None:
    """Output rows that live, and every pool row outside the sentinel block."""
    with poisoned_outputs(launch):
        output, pools = case.attend(find_backend(name), scaling)
    assert output.shape == case.query.shape
    assert output.dtype == case.dtype
    assert torch.isfinite(output).all()
    alive = case.alive()
    expected = example_of.attend(case, scaling)[alive]
    torch.testing.assert_close(output[alive].double(), expected, rtol=0, atol=TOLERANCE[case.dtype])
    for pool, expected in zip(pools.written(LAYER), example_of.write(case), strict=True):
        held = slice(0, -case.block_size)
        torch.testing.assert_close(pool[held], expected[held], rtol=0, atol=0, equal_nan=True)
    if name == "triton":
        assert (output[~alive] == 0).all()


@pytest.mark.parametrize("name", BACKENDS)
@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_random_steps(name: str, seed: int) -> None:
    assert_matches_example(random_case(seed), name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@given(st.integers(0, 2**32 - 1))
@settings(max_examples=8)
def test_random_steps_in_half_precision(dtype: torch.dtype, seed: int) -> None:
    assert_matches_example(random_case(seed, dtype=dtype), "triton")


@pytest.mark.parametrize("width", [1, 80, 256])
def test_widths(width: int) -> None:
    mixed = Case([6, 2], [6, 19], [6, 19], num_contexts=1, heads=Heads(2, 1, width))
    # scores of unit variance grow with the width where nothing scales them
    assert_matches_example(mixed, "triton")


@pytest.mark.parametrize("name", BACKENDS)
def test_a_scaling_of_the_models_own(name: str) -> None:
    assert_matches_example(Case([4, 1], [9, 6], [9, 6], num_contexts=1), name, scaling=0.7)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_tile_never_mixes_sequences(name: str) -> None:
    """More rows than a tile, and many contexts shorter than one."""
    lens = [50, 1, 1, 2, 47, 3, 3]
    case = Case(lens, lens, lens, num_contexts=5, heads=Heads(5, 1, 8))
    assert_matches_example(case, name)


def test_more_rows_of_a_generation_than_a_tile() -> None:
    lens = [30, 61]
    assert_matches_example(Case([17, 17], lens, lens, heads=Heads(16, 1, 8)), "triton")


@pytest.mark.parametrize("name", BACKENDS)
def test_every_row_may_be_dead(name: str) -> None:
    """A padding row: a request of one token that may touch no KV row, and rows before position
    0."""
    assert_matches_example(Case([4, 4], [5, 1], [0, 1]), name)
    assert_matches_example(Case([4], [5], [0]), name)


def test_splits_beyond_a_sequences_keys_are_empty() -> None:
    """The table is wide, the sequences are short: most splits have nothing to read."""
    case = Case([2, 2], [3, 20], [3, 20], spare_blocks=40)
    assert launch.splits_for(2, len(case.tables[0]) * case.block_size) > 2
    assert_matches_example(case, "triton")


def test_one_split_needs_no_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SPLIT_PROGRAMS", 1)
    monkeypatch.setattr(launch, "paged_merge_kernel", None)
    assert_matches_example(Case([2, 2], [3, 30], [3, 30]), "triton")


def test_a_step_without_rows_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_launches(monkeypatch, launch)
    output, _ = Case([], [], []).attend(find_backend("triton"))
    assert output.shape == (0, 2, 16)


@given(st.integers(1, 2000), st.integers(1, 2**20))
@example(1, 1)
def test_splits_follow_shapes(programs: int, max_keys: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "SPLIT_KEYS", 128)
        splits = launch.splits_for(programs, max_keys)
    assert 1 <= splits <= launch.MAX_SPLITS
    assert splits == 1 or (splits - 1) * 128 < max_keys
    assert splits <= launch.FEW_SPLITS or splits * launch.LONG_SPLIT <= max_keys
    assert splits == 1 or (splits - 1) * programs < launch.SPLIT_PROGRAMS


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("width", [64, 80, 128, 192, 256])
def test_tiles_fit_their_multiprocessor(
    width: int, itemsize: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "KEY_TILE_BYTES", 16384)
    all_rows = (1, 4, 16, 17, 64, 65, 5000)
    tiles = [(rows, launch.ragged_tile(rows, width, itemsize)) for rows in all_rows]
    tiles += [
        (rows, launch.uniform_tile(rows, width, itemsize, sequences))
        for rows in all_rows
        for sequences in (1, 64, 5000)
    ]
    for rows, tile in tiles:
        assert width <= tile.width < 2 * width
        sizes = (tile.rows, tile.keys, tile.width)
        assert all(size >= 16 and size & (size - 1) == 0 for size in sizes)
        # keys and values of every stage, and the query
        held = 2 * tile.num_stages * tile.keys * tile.width + tile.rows * tile.width
        assert held * itemsize <= 200 * 1024
        if rows <= 64 and itemsize == 2:
            assert tile.rows >= rows
            assert tile.rows < 2 * rows or tile.rows == 16


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("splits", [1, 64])
def test_nan_stays_with_its_request(
    name: str, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that computes NaN is noticed, and its neighbours go on."""
    monkeypatch.setattr(launch, "SPLIT_PROGRAMS", splits)
    case = Case([5, 3, 3, 3], [5, 9, 30, 40], [5, 9, 30, 40], num_contexts=1)
    expected = example_of.attend(case)
    case.key[2] = torch.nan  # the third row of the context
    case.value[9] = torch.nan  # the second row of the second generation
    output, _ = case.attend(find_backend(name))
    assert output[[2, 3, 4, 9, 10]].isnan().all()
    others = [5, 6, 7, 11, 12, 13]
    torch.testing.assert_close(
        output[others].double(), expected[others], rtol=0, atol=TOLERANCE[torch.float32]
    )


# --- what a draft loop does ---


def after(case: Case, seq_lens: list[int], kv_lens: list[int], limits: list[int]) -> Case:
    """The step with other lengths, over the same tables and rows of its own."""
    changed = dataclasses.replace(case, seq_lens=seq_lens, kv_lens=kv_lens, limits=limits)
    changed.tables, changed.num_blocks = case.tables, case.num_blocks
    return changed


@pytest.mark.parametrize("name", BACKENDS)
def test_lengths_that_a_draft_loop_changes(name: str) -> None:
    """One metadata object through a whole eagle loop: first pass, then single rows."""
    seed = 0
    rng = random.Random(seed)
    k, contexts = 3, [5, 2]
    generations = [k + 1] * 3
    kv_lens = [9, 2, *(rng.randint(4, 20) for _ in generations)]
    capacity = [length + k for length in kv_lens]
    lens = contexts + generations
    whole = Case(lens, kv_lens, capacity, num_contexts=2, seed=seed, heads=Heads(4, 2, 16))
    pools = PagedKVPools(whole.num_blocks, whole.block_size, fill=float("nan"))
    for pool, held in zip(
        pools.layer(LAYER, whole.key, whole.value),
        (whole.key_pool, whole.value_pool),
        strict=True,
    ):
        pool.copy_(held)
    metadata = whole.metadata(find_backend(name), pools)
    accepted = [1, 1, *(rng.randint(1, k + 1) for _ in generations)]

    def one_pass(seq_lens: list[int], kv_lens: list[int]) -> None:
        case = after(whole, seq_lens, kv_lens, capacity)
        case.projected = torch.randn(sum(seq_lens), whole.projected.shape[1], device=DEVICE)
        case.key_pool, case.value_pool = (pool.clone() for pool in pools.written(LAYER))
        output = metadata.attend(LAYER, case.query, case.key, case.value)
        expected = example_of.attend(case)
        assert torch.isfinite(output).all()
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=TOLERANCE[torch.float32])

    with draft_loop(metadata) as loop:
        one_pass(lens, kv_lens)
        counts = torch.tensor(accepted, dtype=torch.int32, device=DEVICE)
        loop.feed_single_rows(counts, k)
        past = [
            length + 1 if row < 2 else length - (k - count)
            for row, (length, count) in enumerate(zip(kv_lens, accepted, strict=True))
        ]
        one_pass([1] * 5, past)
        loop.advance()
        one_pass([1] * 5, [length + 1 for length in past])
    one_pass(lens, kv_lens)


@pytest.mark.parametrize("name", BACKENDS)
def test_lengths_changed_in_place(name: str) -> None:
    """Persistent buffers, as in a CUDA graph: whatever was derived from them is gone."""
    case = Case([3, 3], [8, 5], [8, 5], least_blocks=9, least_width=5)
    metadata = case.metadata(find_backend(name), check=False)
    metadata.is_cuda_graph = True
    metadata.attend(LAYER, case.query, case.key, case.value)
    other = Case([3, 3], [5, 11], [5, 10], seed=1, least_blocks=9, least_width=5)
    other.load(metadata.pools, metadata)
    output = metadata.attend(LAYER, other.query, other.key, other.value)
    alive = other.alive()
    expected = example_of.attend(other)[alive]
    torch.testing.assert_close(
        output[alive].double(), expected, rtol=0, atol=TOLERANCE[torch.float32]
    )


# --- what is refused ---


def small() -> tuple[Case, PagedAttentionMetadata]:
    case = Case([3, 3], [8, 5], [8, 5])
    return case, case.metadata(find_backend("triton"))


@pytest.mark.parametrize("name", BACKENDS)
def test_check_mode_finds_other_rows_on_the_device(name: str) -> None:
    case = Case([3, 3], [8, 5], [8, 5])
    metadata = case.metadata(find_backend(name))
    metadata.seq_lens_cuda[0] = 2
    with pytest.raises(MetadataError, match="seq_lens differ between host and device"):
        metadata.attend(LAYER, case.query, case.key, case.value)


@pytest.mark.parametrize(
    ("held", "stale"),
    [
        ("kv_lens_cuda", "positions"),
        ("kv_write_limit", "write_rows"),
        ("block_table", "write_rows"),
    ],
)
def test_check_mode_finds_stale_indices(held: str, stale: str) -> None:
    case = Case([3, 3], [8, 5], [8, 5])
    metadata = case.metadata(find_backend("sdpa"))
    metadata.attend(LAYER, case.query, case.key, case.value)
    getattr(metadata, held)[0] -= 1
    with pytest.raises(MetadataError, match=f"{stale} is stale for these lengths"):
        metadata.attend(LAYER, case.query, case.key, case.value)
    metadata.on_update_kv_lens()
    metadata.attend(LAYER, case.query, case.key, case.value)


def test_lengths_that_no_kernel_wrote_give_indices_in_range() -> None:
    """A dry run of a step launches no kernel, and must not trip a check on the device."""
    case = Case([3, 3], [8, 5], [8, 5])
    metadata = case.metadata(find_backend("sdpa"))
    metadata.check = False
    metadata._seq_lens_cuda.zero_()
    metadata.on_update_kv_lens()
    layout = metadata.layout()
    assert layout.positions.shape == (6,)
    rows = layout.write_rows
    assert 0 <= int(rows.min()) <= int(rows.max()) < metadata._pools.num_rows


@pytest.mark.parametrize("name", BACKENDS)
def test_attending_before_any_write(name: str) -> None:
    case = Case([3, 3], [8, 5], [8, 5])
    metadata = case.metadata(find_backend(name))
    with pytest.raises(MetadataError, match="layer 7 was read before it wrote any row"):
        find_backend(name).attend(7, case.query, metadata)


def test_rows_that_do_not_fit() -> None:
    case, metadata = small()
    query, key, value = case.query, case.key, case.value
    with pytest.raises(TensorContractError, match=r"key: expected \[T = 6, heads, width\]"):
        metadata.attend(LAYER, query, key[:4], value)
    with pytest.raises(TensorContractError, match=r"with contiguous widths, got shape \[6, 2, 16"):
        metadata.attend(LAYER, query.transpose(1, 2).contiguous().transpose(1, 2), key, value)
    with pytest.raises(TensorContractError, match=r"in torch\.float32, got .* in torch\.float16"):
        metadata.attend(LAYER, query.half(), key, value)
    with pytest.raises(TensorContractError, match=r"value of layer 3: .* in torch\.float16"):
        metadata.attend(LAYER, query, key, value.half())
    with pytest.raises(TensorContractError, match="layer 3: expected more than 0, got -1"):
        metadata.attend(LAYER, query, key, value, -1)
    with pytest.raises(ConfigError, match="latent attention runs with attn_backend: sdpa"):
        metadata.attend(LAYER, query, key, value[..., :8])


def test_tables_and_lengths_may_be_slices_of_wider_ones() -> None:
    case = Case([3, 3], [8, 5], [8, 5])
    metadata = case.metadata(find_backend("triton"))
    width = metadata.block_table.shape[1]
    wide = torch.full((4, width + 7), -1, dtype=torch.int32, device=DEVICE)
    wide[:2, 3 : 3 + width] = metadata.block_table
    metadata.block_table = wide[:2, 3 : 3 + width]
    metadata.kv_lens_cuda = torch.cat([metadata.kv_lens_cuda, wide[0, :2]])
    output = metadata.attend(LAYER, case.query, case.key, case.value)
    expected = example_of.attend(case)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=TOLERANCE[torch.float32])
