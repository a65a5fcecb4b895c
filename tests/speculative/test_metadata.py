"""Speculative metadata of a step, and what the draft loop does to a host's attention metadata."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.config import MTPDecodingConfig, SpeculativeDecodingMode
from mtp_plugin.errors import ConfigError, MetadataError
from mtp_plugin.requests.slots import SlotManager
from mtp_plugin.requests.states import CUDA_GRAPH_DUMMY_REQUEST_ID
from mtp_plugin.speculative.drafting import MTPWorker
from mtp_plugin.speculative.drafting.attention_loop import DraftLoop, draft_loop
from mtp_plugin.speculative.drafting.trace_check import MetadataFingerprint
from mtp_plugin.speculative.metadata import MTPSpecMetadata
from mtp_plugin.speculative.state import MTPHiddenStatesManager
from tests.speculative.drafting.contract import snapshot
from tests.speculative.drafting.host import Prompt, ScriptedLayer, Step, Turn
from tests.speculative.plain_host import (
    Attention,
    KVAttention,
    LimitedAttention,
    PlainAttributes,
    int32,
)

VANILLA = SpeculativeDecodingMode.MTP
EAGLE = SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL


def make_manager(*request_ids: int) -> MTPHiddenStatesManager:
    config = MTPDecodingConfig(max_draft_len=2)
    manager = MTPHiddenStatesManager(config, torch.float32, 4, 4, device="cpu")
    for request_id in request_ids:
        manager.slot_manager.add_slot(request_id)
    return manager


def make_spec(manager: Any = None, **options: Any) -> MTPSpecMetadata:
    given = {"max_num_requests": 6, "max_draft_len": 2, "mtp_hidden_states_manager": manager}
    return MTPSpecMetadata(**{**given, **options})


# --- prepare ---


def test_prepare_finds_slots_in_batch_order() -> None:
    spec = make_spec(make_manager(70, 71, 72))
    addresses = spec.slot_ids.data_ptr(), spec.batch_indices_cuda.data_ptr()
    spec.slot_ids.fill_(-1)
    spec.request_ids = [72, 70]
    spec.prepare()
    assert spec.slot_ids.tolist() == [2, 0, -1, -1, -1, -1]
    assert spec.batch_indices_cuda[:2].tolist() == [0, 1]
    assert (spec.slot_ids.dtype, spec.batch_indices_cuda.dtype) == (torch.int64, torch.int32)
    spec.request_ids = range(70, 73)
    spec.prepare()
    assert spec.slot_ids[:3].tolist() == [0, 1, 2]
    assert (spec.slot_ids.data_ptr(), spec.batch_indices_cuda.data_ptr()) == addresses


def test_prepare_copies_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots at every step; the indices of the batch, once for its size."""
    copied: list[torch.dtype] = []
    upload = MTPSpecMetadata._upload

    def note(buffer: Any, values: list[int], dtype: torch.dtype) -> None:
        copied.append(dtype)
        upload(buffer, values, dtype)

    monkeypatch.setattr(MTPSpecMetadata, "_upload", staticmethod(note))
    spec = make_spec(make_manager(70, 71, 72))
    uploads = []
    for ids in ([70, 71], [71, 70], [72], [70, 71, 72], [72]):
        spec.request_ids = ids
        spec.prepare()
        uploads.append(copied.count(torch.int32))
        assert spec.batch_indices_cuda[: len(ids)].tolist() == list(range(len(ids)))
        assert spec.slot_ids[: len(ids)].tolist() == [request - 70 for request in ids]
    assert uploads == [1, 1, 1, 2, 2]
    assert copied.count(torch.int64) == 5


def test_padding_rows_share_the_sentinel() -> None:
    manager = make_manager(5)
    spec = make_spec(manager)
    spec.request_ids = [5, CUDA_GRAPH_DUMMY_REQUEST_ID, CUDA_GRAPH_DUMMY_REQUEST_ID - 3]
    spec.prepare()
    assert spec.slot_ids[:3].tolist() == [0, manager.sentinel_slot, manager.sentinel_slot]


def test_prepare_refuses_what_cannot_be() -> None:
    spec = make_spec(make_manager(5))
    with pytest.raises(MetadataError, match=r"prepare\(\): request_ids must be assigned"):
        spec.prepare()
    spec.request_ids = [5, 6]
    with pytest.raises(MetadataError, match="request 6 has no slot in the MTP manager"):
        spec.prepare()
    spec.request_ids = [5] * 7
    with pytest.raises(MetadataError, match="7 requests, but max_num_requests is 6"):
        spec.prepare()


def test_prepare_without_requests_or_manager() -> None:
    spec = make_spec()
    assert spec.slot_ids is None
    spec.batch_indices_cuda.fill_(-1)
    spec.request_ids = []
    spec.prepare()
    assert spec.batch_indices_cuda.tolist() == [-1] * 6
    spec.request_ids = [1, 2]
    spec.prepare()
    assert spec.batch_indices_cuda[:2].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("mode", "window", "expected"),
    [
        (VANILLA, "trtllm", 17),
        (VANILLA, "exact", 20),
        (EAGLE, "trtllm", 20),
        (SpeculativeDecodingMode.NONE, "trtllm", 20),
    ],
)
def test_draft_tokens_of_a_step(mode: SpeculativeDecodingMode, window: str, expected: int) -> None:
    """Three generations: K rows each instead of K+1 where the window is one row short."""
    spec = make_spec(spec_dec_mode=mode, draft_window=window)
    spec.num_tokens, spec.num_generations, spec.request_ids = 20, 3, [1, 2, 3]
    assert spec.dp_num_tokens() == expected  # what ranks exchange beforehand
    spec.prepare()
    assert spec.num_tokens == expected


def test_the_window_is_the_workers_by_default() -> None:
    """With both defaults a layer is fed as many rows as `prepare` counts."""
    step = Step(2, [Prompt([1, 2, 3])], [Turn([1, 2], [5, 6], [5, 7, 8]) for _ in range(3)])
    step.spec = MTPSpecMetadata(
        max_num_requests=12, max_draft_len=2, mtp_hidden_states_manager=step.manager
    )
    worker = MTPWorker(SimpleNamespace(max_draft_len=2), device="cpu")
    assert step.spec.draft_window == worker.draft_window == "exact"
    step.spec.num_tokens, step.spec.num_generations = len(step.input_ids), 3
    step.spec.request_ids = range(4)
    step.spec.draft_tokens = int32([5, 6] * 3)
    step.spec.prepare()
    seen: list[Any] = []
    worker(**step.inputs() | {"spec_metadata": step.spec}, mtp_layers=[ScriptedLayer(0, seen)] * 2)
    assert [len(call.ids) for call in seen] == [step.spec.num_tokens] * 2


def host_manager(**attributes: Any) -> SimpleNamespace:
    """A host's own manager, with what TensorRT-LLM's has: slots and the two pools."""
    return SimpleNamespace(slot_manager=SlotManager(4), **attributes)


def test_managers_of_hosts_serve_greedy_steps() -> None:
    def step(make: Any) -> dict[str, torch.Tensor]:
        given = Step(2, [Prompt([1, 2, 3])], [Turn([1, 2], [5, 6], [5, 7, 8])])
        given.spec = MTPSpecMetadata(
            max_num_requests=2, max_draft_len=2, mtp_hidden_states_manager=make(given.manager)
        )
        given.spec.num_generations, given.spec.request_ids = 1, [0, 1]
        given.spec.draft_tokens = int32([5, 6])
        given.spec.prepare()
        worker = MTPWorker(SimpleNamespace(max_draft_len=2), device="cpu")
        return worker(**given.inputs(), mtp_layers=[ScriptedLayer(0), ScriptedLayer(1)])

    names = "slot_manager", "mtp_past_hidden_states_pool", "mtp_past_tokens_pool"
    ours = step(lambda manager: manager)
    hosts = step(lambda manager: SimpleNamespace(**{n: getattr(manager, n) for n in names}))
    for name in ("new_tokens", "new_tokens_lens", "next_draft_tokens"):
        assert torch.equal(hosts[name], ours[name])


def test_metadata_of_a_host_manager() -> None:
    spec = make_spec(host_manager(mtp_past_tokens_pool=torch.zeros(4, 2)))
    assert spec.device == torch.device("cpu")
    for ids, missing in (([5], 5), ([CUDA_GRAPH_DUMMY_REQUEST_ID], CUDA_GRAPH_DUMMY_REQUEST_ID)):
        spec.request_ids = ids
        with pytest.raises(MetadataError, match=f"request {missing} has no slot in the MTP"):
            spec.prepare()
    assert make_spec(host_manager(relaxed_delta_pool=0)).slot_ids is not None
    with pytest.raises(
        ConfigError, match=r"_manager: expected an object with slot_manager\.get_slot"
    ):
        make_spec(SimpleNamespace(device="cpu"))


def test_pointers_are_the_addresses_of_the_slots() -> None:
    """Read by hosts' kernels; views of a larger pool have a stride of their own."""
    assert make_spec().mtp_hidden_states_ptrs is make_spec().mtp_past_tokens_ptrs is None
    manager = make_manager(70, 71, 72)
    manager.mtp_past_tokens_pool = torch.zeros(manager.num_rows, 5, dtype=torch.int32)[:, 1:3]
    spec = make_spec(manager)
    spec.request_ids = [72, 70]
    spec.prepare()
    for name in ("hidden_states", "tokens"):
        pointers = getattr(spec, f"mtp_{'past_' * (name == 'tokens')}{name}_ptrs")
        pool = getattr(manager, f"mtp_past_{name}_pool")
        assert (pointers.dtype, pointers.shape) == (torch.int64, (6,))
        assert pointers[:2].tolist() == [pool[2].data_ptr(), pool[0].data_ptr()]


def test_pointers_are_none_without_slots_or_a_tensor() -> None:
    spec = make_spec()
    spec.mtp_hidden_states_manager = make_manager(70)
    assert spec.mtp_hidden_states_ptrs is None
    assert make_spec(host_manager(mtp_past_tokens_pool=[[0]])).mtp_past_tokens_ptrs is None


def test_what_hosts_ask_for_that_mtp_has_no_use_for() -> None:
    spec = make_spec(mtp_num_modules=3)
    assert spec.draft_token_indices_cuda.tolist() == [0, 1, 2]
    assert spec.draft_token_indices_cuda.dtype == torch.int64
    assert (spec.num_extra_kv_tokens, spec.num_layers) == (0, 0)
    assert spec.is_spec_dec_tree is spec.is_spec_dec_dynamic_tree is False
    assert spec.num_accepted_draft_tokens is None
    assert spec.is_layer_capture(0) is False
    states = torch.ones(2, 4)
    assert spec.maybe_capture_hidden_states(0, states) is None
    assert spec.maybe_capture_hidden_states(0, states, states) is None
    given = make_spec(
        num_extra_kv_tokens=2,
        num_layers=7,
        is_spec_dec_tree=False,
        is_spec_dec_dynamic_tree=False,
        num_accepted_draft_tokens=states,
    )
    assert (given.num_extra_kv_tokens, given.num_layers) == (2, 7)
    view = given.create_cuda_graph_metadata(2)
    assert view.num_accepted_draft_tokens is states
    assert view.draft_token_indices_cuda.tolist() == [0]


def test_fields_that_hosts_assign() -> None:
    spec = make_spec(max_total_draft_tokens=2, mtp_num_modules=2, runtime_draft_len=1)
    spec.runtime_draft_len = 2
    spec.mtp_hidden_states_ptrs = spec.mtp_past_tokens_ptrs = pointers = torch.zeros(6)
    assert spec.mtp_hidden_states_ptrs is spec.mtp_past_tokens_ptrs is pointers
    assert (spec.max_total_draft_tokens, spec.runtime_draft_len) == (2, 2)
    assert make_spec().max_total_draft_tokens == 2
    given = make_spec(mtp_hidden_states_ptrs=None, mtp_past_tokens_ptrs=pointers)
    assert given.mtp_hidden_states_ptrs is None
    assert given.mtp_past_tokens_ptrs is pointers
    assert make_spec().spec_dec_mode.is_mtp()


@pytest.mark.parametrize(("mode", "later"), [(EAGLE, [1, 3]), (VANILLA, None)])
def test_sequences_per_rank_are_token_counts_of_later_passes(
    mode: SpeculativeDecodingMode, later: list[int] | None
) -> None:
    spec = make_spec(spec_dec_mode=mode)
    assert spec.all_rank_num_seqs is None
    spec.all_rank_num_seqs = [1, 3]
    assert spec.all_rank_num_seqs == [1, 3]
    assert spec.subseq_all_rank_num_tokens == later


class NewerMode:
    """A host's mode in which the one-model way is none of eagle's."""

    def is_mtp_eagle(self) -> bool:
        return False

    def is_mtp_eagle_one_model(self) -> bool:
        return True

    def is_mtp_vanilla(self) -> bool:
        return False


class OlderMode(Enum):
    """A host's mode without these methods."""

    MTP = 1
    MTP_EAGLE = 2


def test_modes_of_hosts() -> None:
    newer = make_spec(spec_dec_mode=NewerMode())
    newer.all_rank_num_seqs = [1, 3]
    assert newer.subseq_all_rank_num_tokens == [1, 3]
    for mode, counted in ((OlderMode.MTP, 6), (OlderMode.MTP_EAGLE, 8)):
        older = make_spec(spec_dec_mode=mode, draft_window="trtllm")
        older.request_ids, older.num_generations, older.num_tokens = [1, 2], 2, 8
        older.prepare()
        assert older.num_tokens == counted


def test_the_view_of_a_graph() -> None:
    """Buffers of its own at its own size; filling one leaves the other alone."""
    manager = make_manager(5, 6)
    spec = make_spec(manager, spec_dec_mode=EAGLE)
    spec.request_ids = [5, 6]
    spec.prepare()
    view = spec.create_cuda_graph_metadata(2)
    assert (view.is_cuda_graph, view.max_num_requests) == (True, 2)
    assert (spec.is_cuda_graph, spec.max_num_requests) == (False, 6)
    assert view.slot_ids.shape == view.batch_indices_cuda.shape == (2,)
    assert view.mtp_hidden_states_manager is manager
    assert view.create_cuda_graph_metadata(1) is view
    assert (spec.prepared_ids, view.prepared_ids) == ([5, 6], None)  # its slots are zeros
    view.request_ids = [6, 5]
    view.prepare()
    assert view.slot_ids.tolist() == [1, 0]
    assert spec.slot_ids[:2].tolist() == [0, 1]
    view.request_ids = [5, 6, 5]
    with pytest.raises(MetadataError, match="3 requests, but max_num_requests is 2"):
        view.prepare()


def test_the_device_is_that_of_the_manager() -> None:
    assert make_spec(make_manager()).device == torch.device("cpu")
    assert make_spec(device=torch.device("meta")).batch_indices_cuda.device.type == "meta"
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert make_spec().device == torch.device(expected)


# --- the draft loop ---


HOSTS = {
    "least": lambda: Attention([5, 4, 4], 1),
    "plain": lambda: PlainAttributes([5, 4, 4], 1),
    "kv_lens": lambda: KVAttention([5, 4, 4], 1, [5, 13, 14]),
    "limited": lambda: LimitedAttention([5, 4, 4], 1, [5, 13, 14]),
}
EVERY_HOST = pytest.mark.parametrize("make", HOSTS.values(), ids=HOSTS)
N = int32([1, 1, 4])  # emitted of K = 3: a prompt, a run of one, a full run


def windows(loop: DraftLoop) -> None:
    loop.feed_window(N, step_rows=4, window=3, history_lens=[2])


@EVERY_HOST
def test_one_loop_at_a_time(make: Any) -> None:
    attn = make()
    before = snapshot(attn)
    with draft_loop(attn) as loop:
        windows(loop)
        changed = snapshot(attn)
        with pytest.raises(MetadataError, match="already changed for a draft loop"):
            DraftLoop(attn).open()
        assert snapshot(attn) == changed
    assert snapshot(attn) == before


def test_windows_refresh_lengths_alone() -> None:
    """Contexts stay contexts there: tables of a loop of single rows would not fit them."""
    attn = KVAttention([5, 4, 4], 1, [5, 13, 14])
    with draft_loop(attn) as loop:
        loop.feed_window(N, step_rows=4, window=4)
        assert attn.refreshed == {"kv_lens": 1}
    assert attn.refreshed == {"kv_lens": 2}


def test_a_host_of_one_hook_is_refreshed_by_it() -> None:
    attn = KVAttention([5, 4, 4], 1, [5, 13, 14])
    attn.update_for_spec_dec = None
    with draft_loop(attn) as loop:
        loop.feed_single_rows(N, 3)
        assert attn.refreshed == {"kv_lens": 1}


def test_trace_check_leaves_out_only_fields_that_are_declared_as_derived() -> None:
    """Private names of one engine's fields may mean anything in another."""
    attn = SimpleNamespace(_layout_rows=1, _table=2, derived_fields=frozenset({"_table"}))
    before = MetadataFingerprint.take(attn)
    attn._table = 3
    before.compare(attn)
    attn._layout_rows = 4
    with pytest.raises(MetadataError, match=r"left changes in: _layout_rows$"):
        before.compare(attn)


# --- hosts that read the list of cached tokens ---


class Counting(KVAttention):
    """Its backend reads how many tokens are cached from the host's list."""

    reads_cached_token_counts = True

    @property
    def counts(self) -> list[int]:
        return self.kv_cache_params.num_cached_tokens_per_seq


def assert_consistent(attn: Counting) -> None:
    """Cached tokens and rows of the step add up to the KV length, on host and device."""
    host = torch.tensor(attn.counts) + attn._seq_lens
    assert torch.equal(host.int(), attn.kv_lens_cuda)


def test_cached_counts_of_windows() -> None:
    """A prompt's second chunk with two rows of history, and two generations."""
    attn = Counting([5, 4, 4], 1, [8, 13, 14])
    original = attn.counts
    with draft_loop(attn) as loop:
        windows(loop)
        assert attn.counts == [8 - 7, 10 - 3, 14 - 3]
        assert_consistent(attn)
    assert attn.counts is original
    assert attn.counts == [3, 9, 10]


def test_cached_counts_of_single_rows() -> None:
    """All but the row that is being written."""
    attn = Counting([5, 4, 4], 1, [5, 13, 14])
    with draft_loop(attn) as loop:
        loop.feed_single_rows(N, 3)
        assert attn.counts == [5, 10, 14]
        assert_consistent(attn)
        loop.advance()
        assert attn.counts == [6, 11, 15]
        assert_consistent(attn)
    assert attn.counts == [0, 9, 10]


def test_cached_counts_never_fall_below_nothing() -> None:
    attn = Counting([4], 0, [5])
    with draft_loop(attn) as loop:
        loop.feed_window(int32([0]), step_rows=4, window=3)
        assert attn.counts == [0]
        assert_consistent(attn)


def test_a_host_without_cache_parameters() -> None:
    attn = SimpleNamespace(
        _seq_lens=int32([4]),
        _seq_lens_cuda=int32([4]),
        num_contexts=0,
        num_seqs=1,
        is_cuda_graph=False,
        on_update=lambda: None,
    )
    before = snapshot(attn)
    with draft_loop(attn) as loop:
        loop.feed_window(int32([1]), step_rows=4, window=3)
        assert attn._seq_lens.tolist() == [3]
    assert snapshot(attn) == before
