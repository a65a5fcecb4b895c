"""A host's metadata is read once a step, and what it lacks is not needed without reason."""

from __future__ import annotations

import dataclasses
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtp_plugin.config import MTPDecodingConfig, SpeculativeDecodingMode
from mtp_plugin.errors import ConfigError, MetadataError, TensorContractError
from mtp_plugin.ops.step import SamplingKind, SlotRows
from mtp_plugin.requests.columns import TableColumns
from mtp_plugin.requests.states import CUDA_GRAPH_DUMMY_REQUEST_ID
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker, NoDraftsWorker
from mtp_plugin.speculative.host import DecodingOptions, HostStep, RankRows, cached_tokens
from mtp_plugin.speculative.metadata import MTPSpecMetadata
from mtp_plugin.speculative.state import SlotStateManager
from mtp_plugin.speculative.verification import StrictVerification
from tests.speculative.drafting.host import Prompt, ScriptedLayer, Step, Turn
from tests.speculative.plain_host import Attention, KVAttention, LimitedAttention, int32
from tests.speculative.state.cases import Request, batch

K = 2
WORKERS = [
    pytest.param(MTPEagleWorker, {}, id="eagle"),
    pytest.param(MTPWorker, {}, id="vanilla"),
    pytest.param(MTPWorker, {"draft_window": "trtllm", "chain": "target_shift"}, id="trtllm"),
]
FIELDS = {
    "runtime_draft_len",
    "draft_tokens",
    "draft_lens",
    "next_prompt_tokens",
    "mtp_hidden_states_manager",
    "slot_ids",
    "sampling_kind",
    "request_ids",
    "prepared_ids",
    "is_cuda_graph",
    "is_all_greedy_sample",
    "max_position",
    "all_rank_num_tokens",
    "subseq_all_rank_num_tokens",
    "all_rank_max_num_tokens",
    "all_rank_num_seqs",
    "all_rank_num_gens",
}
"""What a step reads of speculative metadata."""


def mixed(**options: Any) -> Step:
    return Step(
        K,
        [Prompt([3, 4, 5]), Prompt([6, 7, 8, 9], 0, 2)],
        [Turn([1, 2, 3], [10, 11], [10, 12, 13], draft_len=1), Turn([1, 2], [5, 6], [5, 6, 7])],
        **options,
    )


class Counted:
    """A proxy that counts how often each attribute of an object is read."""

    def __init__(self, shown: Any) -> None:
        object.__setattr__(self, "_shown", shown)
        object.__setattr__(self, "_reads", Counter())

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__
        if name in {"_shown", "_reads", "__class__"}:
            return own(self, name)
        own(self, "_reads")[name] += 1
        return getattr(own(self, "_shown"), name)


@pytest.mark.parametrize(("kind", "mtp"), WORKERS)
@pytest.mark.parametrize("keep_warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("drafts", [K, 0])
def test_a_forward_reads_every_field_once(
    kind: Any, mtp: dict[str, Any], keep_warm: bool, drafts: int
) -> None:
    turns = [Turn([1, 2, 3], [10, 11][:drafts], [10, 12, 13][: drafts + 1])]
    step = Step(K, [Prompt([3, 4, 5]), Prompt([6, 7, 8, 9], 0, 2)], turns if drafts else [])
    step.spec.runtime_draft_len = drafts
    config = MTPDecodingConfig(max_draft_len=K, mtp={**mtp, "keep_warm": keep_warm})
    counted = Counted(step.spec)
    layers = [ScriptedLayer(depth) for depth in range(K)]
    kind(config, device="cpu")(**step.inputs() | {"spec_metadata": counted}, mtp_layers=layers)
    assert counted._reads == dict.fromkeys(FIELDS, 1)


def test_decoding_without_drafts_reads_every_field_once() -> None:
    step = Step(0, [Prompt([3, 4, 5])], [Turn([1, 2], [], [7])])
    counted = Counted(step.spec)
    worker = NoDraftsWorker(SimpleNamespace(max_draft_len=0), device="cpu")
    worker(**step.inputs() | {"spec_metadata": counted})
    of_a_manager = {"request_ids", "prepared_ids", "is_cuda_graph", "is_all_greedy_sample"}
    assert counted._reads == dict.fromkeys(FIELDS - of_a_manager, 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda ids: ids[:-1], r"request_ids: expected a list of 4, got \[\d+, \d+, \d+\]"),
        (lambda ids: ids * 2, "request_ids: expected a list of 4, got "),
        (torch.tensor, "request_ids: expected a list of 4, got a Tensor"),
        (lambda ids: ids[::-1], r"request_ids: \[.*\], and prepare\(\) was called for \[.*\]"),
    ],
)
def test_ids_of_another_step_are_refused(changed: Any, message: str) -> None:
    """Their slots would be other requests'."""
    step = mixed(slots=[5, 0, 7, 2])
    step.spec.request_ids = changed(list(step.spec.request_ids))
    with pytest.raises(MetadataError, match=f"^{message}"):
        HostStep.read(step.attn, step.spec, K, step.position_ids[0])


@pytest.mark.parametrize("kind", [MTPWorker, MTPEagleWorker])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_step_without_request_ids_refuses_to_read_slots(kind: Any, is_prepared: bool) -> None:
    """Without ids every row would read the options of the request in slot 0."""
    step = mixed(slots=[5, 0, 7, 2])
    if is_prepared:
        step.spec.request_ids = None
        message = "request_ids: expected a list of 4, got None"
    else:
        step.spec = dataclasses.replace(step.spec)
        step.spec.sampling_kind = SamplingKind.PROCESSED
        message = r"this step needs spec_metadata.slot_ids: call prepare\(\) first"
    worker = kind(MTPDecodingConfig(max_draft_len=K), device="cpu")
    layers = [ScriptedLayer(depth) for depth in range(K)]
    with pytest.raises(MetadataError, match=message):
        worker(**step.inputs(), mtp_layers=layers)


def test_step_without_request_ids_refuses_when_the_manager_holds_options() -> None:
    """Also for metadata of a host engine that records no prepare()."""
    step = Step(K, turns=[Turn([1, 2], [5, 6], [5, 9, 7])])
    step.manager.prepare_resources(batch(Request(40, py_return_log_probs=True)))
    for spec in (
        MTPSpecMetadata(max_num_requests=1, max_draft_len=K),
        SimpleNamespace(slot_ids=torch.zeros(1, dtype=torch.int64)),
    ):
        spec.mtp_hidden_states_manager = step.manager
        with pytest.raises(MetadataError, match=r"request_ids: .* got None, and the manager holds"):
            HostStep.read(step.attn, spec, K)


def test_ids_in_another_order_than_the_attention_metadata_are_refused() -> None:
    step = mixed()
    for same in (None, [], torch.arange(4), range(4), (0, 1, 2, 3)):
        step.attn.request_ids = same
        HostStep.read(step.attn, step.spec, K)
    step.attn.request_ids = [0, 1, 3, 2]
    message = r"request_ids: \[0, 1, 2, 3\] in the speculative .* \[0, 1, 3, 2\] in the attention"
    with pytest.raises(MetadataError, match=message):
        HostStep.read(step.attn, step.spec, K)


def test_ids_listed_twice_are_refused_except_padding_and_dummies() -> None:
    step = mixed()
    manager = step.manager
    manager.add_dummy_requests([50])
    own = MTPSpecMetadata(
        max_num_requests=9,
        max_draft_len=K,
        mtp_hidden_states_manager=manager,
        device=manager.device,
    )
    padding = CUDA_GRAPH_DUMMY_REQUEST_ID
    for allowed in ([0, 50, 50, 1], [0, 1, padding, padding]):
        step.attn.request_ids = own.request_ids = allowed
        own.prepare()
        HostStep.read(step.attn, own, K)
    twice, message = [0, 1, 2, 1], r"expected every request once, got 1 2 times in \[0, 1, 2, 1\]"
    own.request_ids = twice
    with pytest.raises(MetadataError, match=message):
        own.prepare()
    theirs = SimpleNamespace(
        request_ids=twice, slot_ids=torch.arange(4), mtp_hidden_states_manager=manager
    )
    step.attn.request_ids = None
    with pytest.raises(MetadataError, match=message):
        HostStep.read(step.attn, theirs, K)


@pytest.mark.parametrize("kind", [MTPWorker, MTPEagleWorker])
@pytest.mark.parametrize("method", ["forward", "skip_drafting", "skip_forward"])
def test_unknown_keywords_and_missing_metadata_are_named(kind: Any, method: str) -> None:
    step = Step(K, [Prompt([3, 4, 5])])
    worker = kind(MTPDecodingConfig(max_draft_len=K), device="cpu")
    inputs = step.inputs() | {"mtp_layers": [ScriptedLayer(depth) for depth in range(K)]}
    call = getattr(worker, method)
    call(**inputs, resource_manager=object())  # TensorRT-LLM 1.3 passes it
    message = rf"^{kind.__name__}.{method}: unknown keyword lm_haed, scale; expected input_ids, "
    with pytest.raises(ConfigError, match=message):
        call(**inputs, lm_haed=None, scale=0)
    with pytest.raises(MetadataError, match=r"^attn_metadata: expected the step's .* got None$"):
        call(**inputs | {"attn_metadata": None})


@pytest.mark.parametrize("kind", [MTPWorker, MTPEagleWorker])
@pytest.mark.parametrize("has_look_ahead", [True, False])
def test_public_inputs_after_an_unfinished_chunk_are_those_of_forward(
    kind: Any, has_look_ahead: bool
) -> None:
    """The prompt's next token, whether the metadata or the manager knows it."""
    prompts = [Prompt([3, 4, 5]), Prompt([6, 7, 8, 9], 0, 2)]
    steps = [Step(K, prompts, look_ahead=has_look_ahead) for _ in range(2)]
    for step in steps:
        if not has_look_ahead:
            step.manager._contexts = [
                SimpleNamespace(
                    request_id=number,
                    is_last_context_chunk=prompt.is_final,
                    context_current_position=prompt.start,
                    context_chunk_size=prompt.end - prompt.start,
                    get_tokens=lambda _, prompt=prompt: prompt.tokens,
                )
                for number, prompt in enumerate(prompts)
            ]
    seen: list[Any] = []
    worker = kind(MTPDecodingConfig(max_draft_len=K), device="cpu")
    worker(**steps[0].inputs(), mtp_layers=[ScriptedLayer(depth, seen) for depth in range(K)])
    step = steps[1]
    tokens, counts = worker.sample_and_accept_draft_tokens(
        step.input_ids, step.logits, step.spec, step.attn
    )
    given = {
        "input_ids": step.input_ids,
        "position_ids": step.position_ids,
        "hidden_states": step.hidden_states,
        "accepted_tokens": tokens,
        "spec_metadata": step.spec,
        "attn_metadata": step.attn,
    }
    if kind is MTPEagleWorker:
        given["last_tokens_idx"] = step.attn.seq_lens_cuda.cumsum(0) - 1
    else:
        given["num_accepted_tokens"] = counts
    assert counts.tolist() == [1, 0]
    read = worker.prepare_drafter_inputs(**given)["input_ids"].tolist()
    assert read == seen[0].ids
    assert read[-1] == 8


def test_drafts_that_are_no_tensor_are_refused() -> None:
    step = mixed()
    step.spec.draft_tokens = [1, 2]
    with pytest.raises(TensorContractError, match=r"^draft_tokens: expected integer tensor, got "):
        HostStep.read(step.attn, step.spec, K, step.position_ids[0])


def test_what_is_read() -> None:
    step = mixed(attention=LimitedAttention, slots=[5, 0, 7, 2])
    heard: list[Any] = []
    step.attn.after_acceptance = heard.append
    step.spec.sampling_kind = SamplingKind.PROCESSED
    read = HostStep.read(step.attn, step.spec, K, step.position_ids[0])
    layout = read.layout
    assert (layout.chunk_lens, layout.num_generations, layout.draft_len) == ((3, 2), 2, K)
    assert layout.positions.tolist() == step.position_ids[0].tolist()
    assert read.draft_tokens.tolist() == [10, 11, 5, 6]
    assert read.draft_lens.tolist() == [1, 2]
    assert read.next_prompt_tokens.tolist() == [-1, 8]
    assert read.final_context.tolist() == [True, False]
    assert read.manager is step.manager
    assert read.slot_ids.tolist() == [5, 0, 7, 2]
    assert read.slot_ids.dtype == torch.int64
    assert isinstance(read.slots, SlotRows)
    assert read.slots.table is step.manager.table.rows
    assert isinstance(read.slots.columns, TableColumns)
    assert read.sampling_kind is SamplingKind.PROCESSED
    assert read.max_position == 200
    assert read.kv_lens is step.attn.kv_lens_cuda
    read.after_acceptance("counts")
    assert heard == ["counts"]
    assert read.ranks == RankRows()
    assert read.expect_slots() is read.slots
    assert read.expect_manager() == (step.manager, read.slot_ids)


def test_buffers_of_a_larger_batch_are_cut() -> None:
    """Those of a graph are as long as its batch; a host's may be longer still."""
    step = Step(K, [Prompt([6, 7, 8], 0, 1)], [Turn([1, 2], [5, 6], [5, 6, 7])], num_slots=9)
    step.spec.draft_tokens = int32([[5, 6], [99, 99], [99, 99]])
    step.spec.draft_lens = int32([2, 99, 99])
    step.spec.next_prompt_tokens = int32([7])
    read = HostStep.read(step.attn, step.spec, K)
    assert read.draft_tokens.tolist() == [5, 6]
    assert read.draft_lens.tolist() == [2]
    assert read.next_prompt_tokens.tolist() == [7]
    assert read.final_context.tolist() == [False]
    assert read.slot_ids.shape == (2,)
    # not a buffer: its further entries could be those of tokens
    step.spec.next_prompt_tokens = int32([7, -1, -1])
    with pytest.raises(TensorContractError, match=r"^next_prompt_tokens: .* \[1\], got .* \[3\]"):
        HostStep.read(step.attn, step.spec, K)


def test_a_host_with_the_least_that_there_is() -> None:
    """Nothing but the shape of the step; K is the worker's."""
    read = HostStep.read(Attention([2, 3, 3], 1), SimpleNamespace(), K)
    assert (read.layout.num_requests, read.layout.draft_len) == (3, K)
    assert read.draft_tokens.tolist() == []
    assert read.draft_tokens.dtype == torch.int32
    absent = ("draft_lens", "next_prompt_tokens", "final_context", "manager", "slot_ids", "slots")
    for name in (*absent, "max_position", "kv_lens", "after_acceptance"):
        assert getattr(read, name) is None, name
    assert read.sampling_kind is SamplingKind.GREEDY
    assert HostStep.read(KVAttention([2], 1, [5]), None, K).kv_lens.tolist() == [5]


class Operations(TorchDispatchMode):
    """Records the operations that would launch on a device; views launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_reading_generations_launches_nothing() -> None:
    """Prompts need one comparison, which finds the chunks that end their prompts."""
    alone = Step(K, turns=[Turn([1, 2], [5, 6], [5, 6, 7], draft_len=1)], padding=1)
    for step, expected in ((alone, []), (mixed(), ["aten.lt.Scalar"])):
        with Operations() as operations:
            HostStep.read(step.attn, step.spec, K, step.position_ids[0])
        assert operations.names == expected


def test_generations_alone_end_no_prompt() -> None:
    step = Step(K, turns=[Turn([1, 2], [5, 6], [5, 6, 7])])
    read = HostStep.read(step.attn, step.spec, K)
    assert read.next_prompt_tokens.tolist() == []
    assert read.final_context is None


@pytest.mark.parametrize("length", [-1, K + 1])
def test_draft_lengths_that_cannot_be(length: int) -> None:
    spec = SimpleNamespace(runtime_draft_len=length)
    with pytest.raises(MetadataError, match=rf"expected 0 to max_draft_len \({K}\), got {length}"):
        HostStep.read(Attention([3], 0), spec, K)


def test_positions_of_another_step() -> None:
    attention = Attention([2, 3], 1)
    for count in (4, 6):
        with pytest.raises(MetadataError, match=rf"expected T = 5 rows.* got {count}"):
            HostStep.read(attention, SimpleNamespace(), K, torch.arange(count))
    with pytest.raises(TensorContractError, match=r"positions: expected integer tensor \[5\]"):
        HostStep.read(attention, SimpleNamespace(), K, torch.zeros(5))


def test_what_a_step_misses_is_named() -> None:
    step, bare = mixed(), SimpleNamespace()
    read = HostStep.read(step.attn, bare, K)
    for expected in (read.expect_slots, read.expect_manager):
        with pytest.raises(MetadataError, match="mtp_hidden_states_manager, got None"):
            expected()
    bare.mtp_hidden_states_manager = step.manager
    read = HostStep.read(step.attn, bare, K)
    assert read.slots is None
    for expected in (read.expect_slots, read.expect_manager):
        with pytest.raises(MetadataError, match=r"spec_metadata.slot_ids: call prepare\(\) first"):
            expected()
    bare.slot_ids, bare.mtp_hidden_states_manager = torch.arange(4), SimpleNamespace()
    read = HostStep.read(step.attn, bare, K)
    assert read.expect_manager() == (bare.mtp_hidden_states_manager, read.slot_ids)
    with pytest.raises(MetadataError, match=r"slot table, got SimpleNamespace without slot_rows"):
        read.expect_slots()


@pytest.mark.parametrize("host", ["no manager", "no slots", "no table"])
def test_strict_acceptance_needs_no_manager(host: str) -> None:
    """Eagle drafts from the step's own states: nothing of it is kept in slots."""
    step, same = mixed(), mixed()
    worker = MTPEagleWorker(MTPDecodingConfig(max_draft_len=K), device="cpu")
    if host == "no manager":
        step.spec.mtp_hidden_states_manager = step.spec.slot_ids = None
    elif host == "no slots":
        step.spec.slot_ids = None
    else:
        step.spec.mtp_hidden_states_manager = SimpleNamespace()
    expected, outputs = (
        worker(**each.inputs(), mtp_layers=[ScriptedLayer(0)]) for each in (same, step)
    )
    for name, value in expected.items():
        assert torch.equal(outputs[name], value), name


def test_past_pairs_of_a_hosts_own_manager() -> None:
    """Two pools and nothing else: strict vanilla reads no slot table."""
    step, same = mixed(), mixed()
    worker = MTPWorker(MTPDecodingConfig(max_draft_len=K), device="cpu")
    ours = step.manager
    names = ("mtp_past_tokens_pool", "mtp_past_hidden_states_pool")
    own = SimpleNamespace(**{name: getattr(ours, name).clone() for name in names})
    step.spec.mtp_hidden_states_manager = own
    expected, outputs = (
        worker(**each.inputs(), mtp_layers=[ScriptedLayer(depth) for depth in range(K)])
        for each in (same, step)
    )
    for name, value in expected.items():
        assert torch.equal(outputs[name], value), name
    for name in names:
        live = slice(0, 4)
        assert torch.equal(getattr(own, name)[live], getattr(same.manager, name)[live])
        assert not torch.equal(getattr(own, name)[live], getattr(ours, name)[live])


@pytest.mark.parametrize("kind", [MTPWorker, MTPEagleWorker])
def test_the_bare_step_needs_no_prepare(kind: Any) -> None:
    step = mixed()
    spec = MTPSpecMetadata(
        max_num_requests=9, max_draft_len=K, mtp_hidden_states_manager=step.manager
    )
    spec.draft_tokens, spec.draft_lens = step.spec.draft_tokens, step.spec.draft_lens
    worker = kind(MTPDecodingConfig(max_draft_len=K), device="cpu")
    tokens, counts = worker.sample_and_accept_draft_tokens(None, step.logits, spec, step.attn)
    assert counts.tolist() == [1, 1, 2, 3]
    assert tokens.tolist() == [[1, -1, -1], [1, -1, -1], [10, 12, -1], [5, 6, 7]]


def test_edited_logits_need_slots() -> None:
    step = mixed()
    step.spec.sampling_kind = SamplingKind.PROCESSED
    step.spec.mtp_hidden_states_manager = None
    worker = MTPEagleWorker(MTPDecodingConfig(max_draft_len=K), device="cpu")
    with pytest.raises(MetadataError, match=r"this step needs .*mtp_hidden_states_manager"):
        worker(**step.inputs(), mtp_layers=[ScriptedLayer(0)])


def strict_modes() -> list[StrictVerification]:
    return [StrictVerification(DecodingOptions(max_draft_len=K), torch.device("cpu"))]


def test_slots_alone_serve_a_request_with_options() -> None:
    """A manager without pools of past pairs, as every plugin may have: the end id is masked."""
    step = Step(K, turns=[Turn([1, 2], [5, 6], [5, 9, 7])], mode=SpeculativeDecodingMode.NONE)
    manager = SlotStateManager(strict_modes(), 3, device="cpu")
    slot = manager.slot_manager.add_slot(0)
    manager.table.write({slot: {"prompt_len": 1, "min_tokens": 9, "stop_ids": [9]}})
    step.spec.mtp_hidden_states_manager = manager
    step.spec.prepare()
    worker = MTPEagleWorker(MTPDecodingConfig(max_draft_len=K), device="cpu")
    emitted = []
    for edits in (False, True):
        step.spec.sampling_kind = SamplingKind.PROCESSED if edits else SamplingKind.GREEDY
        outputs = worker(**step.inputs(), mtp_layers=[ScriptedLayer(0)])
        emitted.append(outputs["new_tokens"][0].tolist())
    assert emitted == [[5, 9, -1], [5, 0, -1]]


@pytest.mark.parametrize(
    ("ranks", "single_rows", "expected"),
    [
        (RankRows(), False, {}),
        (RankRows(), True, {}),
        (RankRows([3, 4], [1, 2]), False, {"all_rank_num_tokens": [3, 4]}),
        (RankRows([3, 4], [1, 2]), True, {"all_rank_num_tokens": [1, 2]}),
        (
            RankRows([3, 4], [1, 2], 4),
            False,
            {"all_rank_num_tokens": [3, 4], "all_rank_max_num_tokens": 4},
        ),
        (
            RankRows([3, 4], [1, 2], 4),
            True,
            {"all_rank_num_tokens": [1, 2], "all_rank_max_num_tokens": 2},
        ),
        (RankRows([3, 4], None, 4), True, {"all_rank_max_num_tokens": 4}),
    ],
)
def test_rank_arguments_of_draft_layers(
    ranks: RankRows, single_rows: bool, expected: dict[str, Any]
) -> None:
    assert ranks.arguments(single_rows=single_rows) == expected


def test_cached_tokens_come_from_the_list_or_from_the_device() -> None:
    lens = torch.tensor([3, 2, 4], dtype=torch.int32)
    given = SimpleNamespace(num_cached_tokens_per_seq=[7, 0, 9])
    kv_lens = torch.tensor([10, 2, 13], dtype=torch.int32)
    for fields in ({"kv_cache_params": given}, {"kv_lens_cuda": kv_lens}):
        assert cached_tokens(SimpleNamespace(_seq_lens=lens, **fields), 2) == [7, 0]
    bare = SimpleNamespace(_seq_lens=lens, kv_cache_params=None)
    assert cached_tokens(bare, 0) == []
    with pytest.raises(MetadataError, match="need kv_cache_params or kv_lens_cuda, got neither"):
        cached_tokens(bare, 2)
