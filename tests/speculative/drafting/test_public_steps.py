"""The steps that TensorRT-LLM calls one by one, with its arguments and nothing more.

Expected values are worked out by hand, in letters: `a` is 0, `b` is 1, `.` is -1; a state is the
letter of its token in every column.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.errors import ConfigError, MetadataError
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker
from mtp_plugin.speculative.drafting.public_steps import STEPS
from mtp_plugin.speculative.metadata import MTPSpecMetadata
from mtp_plugin.speculative.state import MTPHiddenStatesManager
from tests.ops.letters import ids, rows_with_top
from tests.speculative.plain_host import Attention, KVAttention, PlainAttributes, int32

H = 4
WORKERS = [MTPWorker, MTPEagleWorker]


def with_lengths(seq_lens: list[int], num_contexts: int) -> KVAttention:
    """As TensorRT-LLM's own backend: lengths on the device, ten tokens cached before the step."""
    return KVAttention(seq_lens, num_contexts, [10 + rows for rows in seq_lens])


HOSTS = pytest.mark.parametrize(
    "attention", [Attention, with_lengths, PlainAttributes], ids=["least", "kv_lens", "plain"]
)


def make_worker(worker_class: type, k: int) -> Any:
    return worker_class(make_config(k), device="cpu")


def make_config(k: int) -> MTPDecodingConfig:
    return MTPDecodingConfig(num_nextn_predict_layers=k)


def states(letters: str) -> torch.Tensor:
    return torch.tensor(ids(letters), dtype=torch.float32).unsqueeze(1).expand(-1, H).contiguous()


def spec_of(k: int, manager: Any = None, request_ids: Sequence[int] | None = None) -> Any:
    spec = MTPSpecMetadata(
        max_num_requests=32,
        spec_dec_mode=make_config(k).spec_dec_mode,
        max_draft_len=k,
        max_total_draft_tokens=k,
        mtp_num_modules=k,
        mtp_hidden_states_manager=manager,
        device=torch.device("cpu"),
    )
    if request_ids is not None:
        spec.request_ids = request_ids
        # tables of addresses are carried and not read
        spec.mtp_hidden_states_ptrs = torch.full((len(request_ids),), -1)
        spec.mtp_past_tokens_ptrs = torch.full((len(request_ids),), -1)
        spec.runtime_draft_len = k
        spec.prepare()
    return spec


def with_pools(k: int, past: list[str]) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Metadata over a manager whose pools were replaced by [batch, K, H] tensors."""
    batch = len(past)
    manager = MTPHiddenStatesManager(
        config=make_config(k),
        dtype=torch.float32,
        hidden_size=H,
        max_num_requests=batch,
        device="cpu",
    )
    for request_id in range(batch):
        manager.slot_manager.add_slot(request_id)
    tokens = int32([ids(letters) for letters in past])
    pool = torch.stack([states(letters) for letters in past])
    spec = spec_of(k, manager)
    spec.mtp_hidden_states_manager.mtp_past_hidden_states_pool = pool
    spec.mtp_hidden_states_manager.mtp_past_tokens_pool = tokens
    spec.request_ids = range(batch)
    spec.prepare()
    return spec, tokens, pool


# --- acceptance ---


class AcceptCase(NamedTuple):
    id: str
    k: int
    num_contexts: int
    target: str  # one letter per row of logits
    drafts: str
    emitted: list[str]


@pytest.mark.parametrize("worker_class", WORKERS)
def test_attributes_that_hosts_read(worker_class: Any) -> None:
    worker = make_worker(worker_class, 3)
    assert isinstance(worker, MTPWorker)
    assert worker.is_thop is False
    if worker_class is MTPEagleWorker:
        assert worker.mtp_num_modules == 3
        worker.mtp_num_modules = 1  # hosts may assign it


ACCEPT_CASES = [
    AcceptCase("prompt", 1, 1, "b", "", ["b"]),
    AcceptCase("prompts", 1, 4, "bddg", "", ["b", "d", "d", "g"]),
    AcceptCase("generation", 3, 0, "bdce", "bde", ["bdc"]),
    AcceptCase("two", 1, 0, "bdeg", "bf", ["bd", "e"]),
    AcceptCase("all_and_none", 3, 0, "egfc edfh", "egf fhe", ["egfc", "e"]),
    AcceptCase("mixed", 1, 1, "b eg", "e", ["b", "eg"]),
]


@HOSTS
@pytest.mark.parametrize("worker_class", WORKERS)
@pytest.mark.parametrize("is_thop", [True, False])
@pytest.mark.parametrize("case", ACCEPT_CASES, ids=lambda case: case.id)
def test_acceptance_without_manager_and_prepare(
    attention: Any, worker_class: Any, is_thop: bool, case: AcceptCase
) -> None:
    batch = len(case.emitted)
    spec = spec_of(case.k)
    spec.draft_tokens = int32(ids(case.drafts))
    spec.runtime_draft_len = case.k
    worker = make_worker(worker_class, case.k)
    worker.is_thop = is_thop
    # lengths play no part: the host here calls every one 1
    attn = attention([1] * batch, case.num_contexts)
    accepted, counts = worker.sample_and_accept_draft_tokens(
        None, rows_with_top(case.target, vocab=8), spec, attn
    )
    assert accepted.dtype == counts.dtype == torch.int32
    assert counts.tolist() == [len(run) for run in case.emitted]
    assert accepted.tolist() == [ids(run.ljust(case.k + 1, ".")) for run in case.emitted]


def test_acceptance_of_a_single_flat_row() -> None:
    worker = make_worker(MTPWorker, 2)
    accepted, counts = worker.sample_and_accept_draft_tokens(
        None, rows_with_top("f")[0], spec_of(2), Attention([4], 1)
    )
    assert (accepted.tolist(), counts.tolist()) == ([ids("f..")], [1])


def test_more_drafts_than_generations_are_cut() -> None:
    """Buffers of a graph are as long as its largest batch."""
    spec = spec_of(2)
    spec.draft_tokens = int32(ids("bczzzz"))
    accepted, _ = make_worker(MTPWorker, 2).sample_and_accept_draft_tokens(
        None, rows_with_top("bcd"), spec, Attention([3], 0)
    )
    assert accepted.tolist() == [ids("bcd")]


# --- history ---


class HistoryCase(NamedTuple):
    id: str
    k: int
    chunks: list[str]  # of contexts
    steps: list[str]  # K+1 inputs of generations
    num_accepted: list[int]  # contexts first
    past: list[str]
    kept: list[str]


HISTORY_CASES = [
    HistoryCase("prompt", 1, ["fghij"], [], [1], ["a"], ["j"]),
    HistoryCase("prompts", 2, ["fghij", "lmno", "vwxyz"], [], [1, 1, 1], ["aa", "bb", "cc"],
                ["ij", "no", "yz"]),
    HistoryCase("short_prompt", 3, ["f"], [], [1], ["aaa"], ["aaf"]),
    HistoryCase("all_accepted", 1, [], ["fz"], [2], ["a"], ["z"]),
    HistoryCase("some_of_four", 1, [], ["fg", "hi", "jk", "lm"], [2, 1, 1, 2], ["a", "b", "c", "d"],
                ["g", "h", "j", "m"]),
    HistoryCase("three_drafts", 3, [], ["tuvw", "tuvw", "tuvw", "tuvw"], [1, 2, 3, 4],
                ["qrs", "qrs", "qrs", "qrs"], ["rst", "stu", "tuv", "uvw"]),
    HistoryCase("mixed", 2, ["pqr"], ["tuv", "xyz"], [1, 2, 1], ["aa", "bc", "de"],
                ["qr", "tu", "ex"]),
]  # fmt: skip


@HOSTS
@pytest.mark.parametrize("case", HISTORY_CASES, ids=lambda case: case.id)
def test_history(attention: Any, case: HistoryCase) -> None:
    spec, tokens, pool = with_pools(case.k, case.past)
    flat = "".join(case.chunks + case.steps)
    seq_lens = [len(rows) for rows in case.chunks + case.steps]
    result = make_worker(MTPWorker, case.k).update_mtp_hidden_states(
        input_ids=int32(ids(flat)),
        hidden_states=states(flat),
        num_accepted_tokens=int32(case.num_accepted),
        spec_metadata=spec,
        attn_metadata=attention(seq_lens, len(case.chunks)),
    )
    assert result is None
    for slot, letters in enumerate(case.kept):
        assert tokens[slot].tolist() == ids(letters)
        assert torch.equal(pool[slot], states(letters))


def test_history_of_a_host_that_replaced_the_states_only() -> None:
    spec, _, pool = with_pools(2, ["aa"])
    manager = spec.mtp_hidden_states_manager
    manager.mtp_past_tokens_pool = torch.zeros(9, 2, dtype=torch.int32)
    make_worker(MTPWorker, 2).update_mtp_hidden_states(
        int32(ids("tuv")), states("tuv"), int32([2]), spec, Attention([3], 0)
    )
    assert manager.mtp_past_tokens_pool[0].tolist() == ids("tu")
    assert torch.equal(pool[0], states("tu"))


# --- inputs of the first draft pass ---


@HOSTS
@pytest.mark.parametrize("one_dim", [True, False])
def test_vanilla_inputs_of_generations(attention: Any, one_dim: bool) -> None:
    """From the advanced pools: K rows each, the newest token last. The step's ids are not read."""
    spec, _, _ = with_pools(3, ["tuv", "def", "nop"])
    positions = int32([10, 11, 12, 13, 21, 22, 23, 24, 32, 33, 34, 35])
    inputs = make_worker(MTPWorker, 3).prepare_drafter_inputs(
        input_ids=int32([-1] * 12),
        position_ids=positions if one_dim else positions.unsqueeze(0),
        hidden_states=torch.full((12, H), torch.nan),
        accepted_tokens=int32([ids("w..."), ids("fg.."), ids("aopq")]),
        num_accepted_tokens=int32([1, 2, 4]),
        spec_metadata=spec,
        attn_metadata=(attn := attention([4, 4, 4], 0)),
    )
    assert set(inputs) == {"input_ids", "position_ids", "hidden_states", "attn_metadata"}
    assert inputs["attn_metadata"] is attn
    assert inputs["input_ids"].dtype == torch.int32
    assert inputs["input_ids"].tolist() == ids("uvw" + "efg" + "opq")
    assert torch.equal(inputs["hidden_states"], states("tuv" + "def" + "nop"))
    # rows L+n-K .. L+n-1, in the shape and type of the positions given
    expected = int32([8, 9, 10, 20, 21, 22, 33, 34, 35])
    assert torch.equal(inputs["position_ids"], expected if one_dim else expected.unsqueeze(0))


@HOSTS
def test_vanilla_inputs_of_a_mixed_batch(attention: Any) -> None:
    """The very order of the steps: history first, then the inputs from it."""
    spec, _, _ = with_pools(2, ["aa", "hi"])
    worker = make_worker(MTPWorker, 2)
    attn = attention([3, 3], 1)
    flat = "pqr" + "jkl"
    counts = int32([1, 2])
    worker.update_mtp_hidden_states(int32(ids(flat)), states(flat), counts, spec, attn)
    inputs = worker.prepare_drafter_inputs(
        int32(ids(flat)),
        int32([0, 1, 2, 7, 8, 9]),
        states(flat),
        int32([ids("s.."), ids("kz.")]),
        counts,
        spec,
        attn,
    )
    assert inputs["input_ids"].tolist() == ids("qrs" + "kz")
    assert inputs["position_ids"].tolist() == [0, 1, 2, 7, 8]
    assert torch.equal(inputs["hidden_states"], states("pqr" + "jk"))


def test_vanilla_inputs_of_a_shorter_step() -> None:
    """One draft of three: the window is the newest pair of the pools, not the oldest."""
    spec, _, _ = with_pools(3, ["tuv"])
    worker = MTPWorker(make_config(3), device="cpu")
    spec.runtime_draft_len = 1
    worker.update_mtp_hidden_states(
        int32(ids("wx")), states("wx"), int32([2]), spec, Attention([2], 0)
    )
    inputs = worker.prepare_drafter_inputs(
        int32(ids("wx")),
        int32([10, 11]),
        states("wx"),
        int32([ids("xy")]),
        int32([2]),
        spec,
        Attention([2], 0),
    )
    assert inputs["input_ids"].tolist() == ids("y")
    assert inputs["position_ids"].tolist() == [11]
    assert torch.equal(inputs["hidden_states"], states("x"))


@pytest.mark.parametrize("worker_class", WORKERS)
def test_no_negative_id_after_a_dead_row(worker_class: Any) -> None:
    """A prompt and a generation whose logits are NaN emit nothing; a layer still reads ids."""
    spec, _, _ = with_pools(2, ["aa", "qr"])
    worker = make_worker(worker_class, 2)
    flat, attn = int32(ids("pqr" + "stu")), Attention([3, 3], 1)
    spec.draft_tokens = int32(ids("tu"))
    accepted, counts = worker.sample_and_accept_draft_tokens(
        flat, torch.full((4, 8), torch.nan), spec, attn
    )
    assert counts.tolist() == [0, 0]
    assert accepted.tolist() == [ids("..."), ids("...")]
    given = {
        "input_ids": flat,
        "position_ids": torch.arange(6),
        "hidden_states": states("pqr" + "stu"),
        "accepted_tokens": accepted,
        "attn_metadata": attn,
        "spec_metadata": spec,
    }
    if worker_class is MTPEagleWorker:
        given["last_tokens_idx"] = torch.tensor([2, 5])
    else:
        given["num_accepted_tokens"] = counts
    read = worker.prepare_drafter_inputs(**given)["input_ids"].tolist()
    assert read[:3] == ids("qra")
    assert min(read) >= 0


@HOSTS
@pytest.mark.parametrize("one_dim", [True, False])
def test_eagle_inputs(attention: Any, one_dim: bool) -> None:
    """A prompt moved on by one, then every accepted column; columns past a run repeat its last."""
    flat = "pqrs" + "tuv" + "wxy"
    positions = torch.tensor([0, 1, 2, 3, 7, 8, 9, 4, 5, 6])
    inputs = make_worker(MTPEagleWorker, 2).prepare_drafter_inputs(
        input_ids=int32(ids(flat)),
        position_ids=positions if one_dim else positions.unsqueeze(0),
        last_tokens_idx=torch.tensor([3, 6, 9]),
        hidden_states=states(flat),
        accepted_tokens=int32([ids("t.."), ids("uvz"), ids("b..")]),
        attn_metadata=(attn := attention([4, 3, 3], 1)),
        spec_metadata=spec_of(2),
    )
    assert inputs["input_ids"].tolist() == ids("qrst" + "uvz" + "bbb")
    assert torch.equal(inputs["position_ids"].reshape(-1), positions)
    assert inputs["position_ids"].dim() == (1 if one_dim else 2)
    assert torch.equal(inputs["hidden_states"], states(flat))
    assert inputs["attn_metadata"] is attn


# --- attention metadata ---


@HOSTS
@pytest.mark.parametrize("worker_class", WORKERS)
def test_lengths_change_and_come_back(attention: Any, worker_class: Any) -> None:
    """K = 3, one prompt of five and two generations: n = 1 and n = 4."""
    attn = attention([5, 4, 4], 1)
    originals = attn._seq_lens, attn._seq_lens_cuda, getattr(attn, "kv_lens_cuda", None)
    worker = make_worker(worker_class, 3)
    worker.change_attn_metadata(int32([1, 1, 4]), attn)
    assert attn._seq_lens.tolist() == attn._seq_lens_cuda.tolist() == [5, 3, 3]
    assert attn.seq_lens_cuda.tolist() == [5, 3, 3]
    if originals[2] is not None:
        # 15, 14, 14 after the step's rows, less K+1-n for what was rejected
        assert attn.kv_lens_cuda.tolist() == [15, 11, 14]
    worker.restore_attn_metadata(attn)
    restored = attn._seq_lens, attn._seq_lens_cuda, getattr(attn, "kv_lens_cuda", None)
    for tensor, original in zip(restored, originals, strict=True):
        assert tensor is original
    assert attn._seq_lens.tolist() == attn.seq_lens_cuda.tolist() == [5, 4, 4]
    assert attn.num_contexts == 1


def test_a_step_of_fewer_drafts_is_changed_by_its_own_rows() -> None:
    """K = 1 of 3: two rows of which one was accepted; and rows that no step has."""
    attn = KVAttention([2], 0, [20])
    worker = make_worker(MTPWorker, 3)
    worker.change_attn_metadata(int32([1]), attn)
    assert (attn.kv_lens_cuda.tolist(), attn._seq_lens.tolist()) == ([19], [1])
    worker.restore_attn_metadata(attn)


def test_changes_come_in_pairs() -> None:
    worker, attn = make_worker(MTPWorker, 1), Attention([2], 0)
    worker.change_attn_metadata(int32([1]), attn)
    with pytest.raises(MetadataError, match="the previous change was not restored"):
        worker.change_attn_metadata(int32([1]), attn)
    worker.restore_attn_metadata(attn)
    worker.change_attn_metadata(int32([1]), attn)
    worker.restore_attn_metadata(attn)
    assert attn._seq_lens.tolist() == [2]


# --- the rest ---


@pytest.mark.parametrize("worker_class", WORKERS)
def test_the_draft_sampler(worker_class: Any) -> None:
    drafts = make_worker(worker_class, 1).draft_sampler(rows_with_top("dzb"))
    assert drafts.dtype == torch.int32
    assert drafts.tolist() == ids("dzb")


RANKS = {count: SimpleNamespace(world_size=count, tp_size=count) for count in (1, 2)}


@pytest.mark.parametrize("worker_class", WORKERS)
@pytest.mark.parametrize("step", STEPS)
def test_subclass_that_overrides_a_step_is_refused(worker_class: Any, step: str) -> None:
    """Also if a mixin does; ``forward`` would not call it."""
    mixin = type("Mixin", (), {step: lambda self, *_: self})
    for bases, own in (((mixin, worker_class), {}), ((worker_class,), dict(vars(mixin)))):
        with pytest.raises(ConfigError, match=f"Mine: overrides {step}, which .*register_plugin"):
            type("Mine", bases, own)
    assert type("Mine", (worker_class,), {"forward": None, "other": None})
    assert type("Mine", (mixin, worker_class), {"forward": lambda self: getattr(self, step)()})


@pytest.mark.parametrize("worker_class", WORKERS)
def test_constructors_of_every_version(worker_class: Any) -> None:
    config = make_config(2)
    for worker in (
        worker_class(config),
        worker_class(config, None),
        worker_class(config, model_config=None, use_separate_draft_kv_cache=False),
        worker_class(config, None, False, mapping=None),
        worker_class(config, SimpleNamespace(mapping=RANKS[1]), mapping=RANKS[1]),
        worker_class(config, mapping=SimpleNamespace(tp_size=1)),
        worker_class(config, is_new=0, names=[]),
    ):
        assert worker.max_draft_len == 2
        assert isinstance(worker, torch.nn.Module)
