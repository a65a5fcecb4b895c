"""The registry, what MTP costs a host, and the pieces it builds."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mtp_plugin.speculative.plugin.registry as registry
from mtp_plugin.config import MTPDecodingConfig, SpeculativeDecodingMode
from mtp_plugin.errors import ConfigError, MetadataError, PluginError
from mtp_plugin.hosts.embedded.request import LlmRequest
from mtp_plugin.ops.backend import Backend
from mtp_plugin.plugin import (
    ENTRY_POINT_GROUP,
    DraftPlan,
    HostFacts,
    MTPPlugin,
    NoSpeculationPlugin,
    SpeculativePieces,
    find_plugin,
    register_plugin,
    unregister_plugin,
)
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.states import CUDA_GRAPH_DUMMY_REQUEST_ID
from mtp_plugin.speculative.draft_length.controller import DraftState
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker, NoDraftsWorker
from mtp_plugin.speculative.host import ResourceManager
from mtp_plugin.speculative.plugin import build_pieces, make_plan
from mtp_plugin.speculative.state import MTPHiddenStatesManager, SlotStateManager
from tests.speculative import plain_host


class Lookup:
    """A plugin that only has a name."""

    decoding_type = "LOOKUP"

    def plan(self, config: Any, num_mtp_layers: int) -> DraftPlan:
        raise NotImplementedError

    def build(self, config: Any, plan: DraftPlan, host: HostFacts) -> SpeculativePieces:
        raise NotImplementedError


LOOKUP = Lookup()


class Misnamed(Lookup):
    decoding_type = "ANOTHER"


@pytest.fixture(autouse=True)
def _registry_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    offer(monkeypatch)


def offer(monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    """Installed packages offer these entry points, name -> `module:object`."""
    offered = [EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in points.items()]

    def entry_points(*, group: str) -> list[EntryPoint]:
        assert group in ("mtp_plugin.plugins", "mtp_plugin.drafters")
        return offered if group == ENTRY_POINT_GROUP else []

    monkeypatch.setattr(registry, "entry_points", entry_points)


# --- the registry ---


@pytest.mark.parametrize("name", ["MTP", "mtp", "Mtp"])
def test_mtp_is_built_in(name: str) -> None:
    assert isinstance(find_plugin(name), MTPPlugin)


@pytest.mark.parametrize("name", [None, "none", "NONE"])
def test_no_speculation_is_built_in(name: str | None) -> None:
    assert isinstance(find_plugin(name), NoSpeculationPlugin)


def test_a_registered_plugin_answers_to_its_name() -> None:
    register_plugin(LOOKUP)
    register_plugin(LOOKUP)
    assert find_plugin("lookup") is LOOKUP
    unregister_plugin("Lookup")
    with pytest.raises(PluginError, match="'lookup' has no plugin"):
        find_plugin("lookup")


@pytest.mark.parametrize("taken", ["LOOKUP", "MTP"])
def test_a_name_belongs_to_one(taken: str) -> None:
    register_plugin(LOOKUP)
    other = Lookup()
    other.decoding_type = taken
    with pytest.raises(PluginError, match=f"'{taken}' is already served by"):
        register_plugin(other)
    assert find_plugin("LOOKUP") is LOOKUP


@pytest.mark.parametrize("target", ["LOOKUP", "Lookup"], ids=["object", "class"])
def test_packages_offer_plugins(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """Under the entry-point group, in any case, loaded once."""
    offer(monkeypatch, Lookup=f"tests.speculative.test_plugin:{target}")
    found = find_plugin("LOOKUP")
    assert found.decoding_type == "LOOKUP"
    offer(monkeypatch)
    assert find_plugin("lookup") is found


def test_a_built_in_name_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, MTP="tests.speculative.test_plugin:LOOKUP")
    assert isinstance(find_plugin("MTP"), MTPPlugin)


def test_an_unknown_name_lists_the_known(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, SUFFIX="tests.speculative.test_plugin:LOOKUP")
    register_plugin(LOOKUP)
    with pytest.raises(
        PluginError, match=r"'EAGLE9' has no plugin; known: lookup, mtp, none, suffix$"
    ):
        find_plugin("EAGLE9")


def test_an_entry_point_under_a_wrong_name(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Lookup="tests.speculative.test_plugin:Misnamed")
    with pytest.raises(
        PluginError,
        match=r"entry point 'Lookup' of mtp_plugin\.plugins \(.*Misnamed\): expected a plugin with "
        r"that decoding_type, got 'ANOTHER'",
    ):
        find_plugin("lookup")
    with pytest.raises(PluginError, match="'another' has no plugin"):
        find_plugin("another")


class Exiting:
    decoding_type = "LOOKUP"

    def __init__(self) -> None:
        raise SystemExit(3)


class Nameless(Lookup):
    decoding_type = ""


NOT_A_PLUGIN = SimpleNamespace(decoding_type="LOOKUP", plan=print)
HERE = "tests.speculative.test_plugin"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("tests.no_such_module:LOOKUP", "ModuleNotFoundError: No module named 'tests.no_such"),
        (f"{HERE}:NO_SUCH_NAME", "AttributeError: .* has no attribute 'NO_SUCH_NAME'"),
        ("two words", "cannot be loaded: AttributeError"),
        (f"{HERE}:Exiting", "cannot be loaded: SystemExit: 3"),
        (f"{HERE}:Nameless", "has decoding_type '', expected a name"),
        (f"{HERE}:NOT_A_PLUGIN", r"expected a SpeculativePlugin object, but .* has no build\(\)"),
        (f"{HERE}:HERE", "has decoding_type None, expected a name"),
    ],
)
def test_entry_point_that_cannot_be_loaded_is_a_named_error(
    monkeypatch: pytest.MonkeyPatch, target: str, message: str
) -> None:
    offer(monkeypatch, Lookup=target)
    where = rf"^entry point 'Lookup' of mtp_plugin\.plugins \({target}\).*"
    with pytest.raises(PluginError, match=where + message):
        find_plugin("lookup")
    with pytest.raises(PluginError, match=where):  # nothing was registered
        find_plugin("lookup")


@pytest.mark.parametrize("returned", [None, {}, 3, DraftPlan])
def test_what_plan_and_build_return_is_checked(returned: Any) -> None:
    plugin = Lookup()
    plugin.plan = plugin.build = lambda *_: returned  # type: ignore[method-assign]
    with pytest.raises(PluginError, match=r"^Lookup\.plan\(\): expected a DraftPlan, got"):
        make_plan(plugin, None, 0)
    with pytest.raises(PluginError, match=r"^Lookup\.build\(\): expected SpeculativePieces, got"):
        build_pieces(plugin, None, DraftPlan(1), host())


# --- what MTP costs ---


@pytest.mark.parametrize(
    ("config", "num_layers", "plan"),
    [
        ({}, 3, DraftPlan(1, num_draft_layers=1, loop_rows=0)),
        ({"max_draft_len": 4}, 1, DraftPlan(4, num_draft_layers=1, loop_rows=3)),
        ({"use_mtp_vanilla": True}, 3, DraftPlan(3, 3, history_rows=3, past_pairs=3)),
        (
            {"use_mtp_vanilla": True, "max_draft_len": 2},
            3,
            DraftPlan(2, num_draft_layers=2, history_rows=2, past_pairs=2),
        ),
        (
            {"max_draft_len": 2, "mtp": {"verification": "block"}},
            1,
            DraftPlan(2, num_draft_layers=1, loop_rows=1, num_draft_probs=2),
        ),
    ],
)
def test_plans(config: dict[str, Any], num_layers: int, plan: DraftPlan) -> None:
    assert MTPPlugin().plan(MTPDecodingConfig(**config), num_layers) == plan


def test_rows_of_a_plan() -> None:
    """Eagle, K = 3: four rows a step, twice with a step in flight, and two after the loop."""
    eagle = DraftPlan(3, num_draft_layers=1, loop_rows=2)
    assert eagle.step_rows == 4
    assert eagle.rows_to_reserve(10, in_flight=False) == 16
    assert eagle.rows_to_reserve(10, in_flight=True) == 20
    assert eagle.prompt_rows_to_reserve(10) == 12
    assert eagle.chunk_tokens(8, 5) == 5
    vanilla = DraftPlan(3, num_draft_layers=3, history_rows=3)
    assert vanilla.rows_to_reserve(10, in_flight=True) == 18
    assert vanilla.prompt_rows_to_reserve(10) == 10
    assert [vanilla.chunk_tokens(start, 5) for start in (0, 2, 3, 8)] == [5, 7, 8, 8]


def test_target_only_decoding_costs_one_row() -> None:
    plan = NoSpeculationPlugin().plan(None, 0)
    assert plan == DraftPlan(0)
    assert plan.rows_to_reserve(10, in_flight=True) == 12


# --- the pieces ---


def host(**facts: Any) -> HostFacts:
    given = {
        "hidden_size": 8,
        "vocab_size": 32,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "max_batch_size": 4,
        "max_num_sequences": 8,
        "max_seq_len": 64,
    }
    return HostFacts(**{**given, **facts})


def build(facts: HostFacts | None = None, layers: int = 3, **config: Any) -> SpeculativePieces:
    decoding = MTPDecodingConfig(**config)
    plugin = MTPPlugin()
    return plugin.build(decoding, plugin.plan(decoding, layers), facts or host())


@pytest.mark.parametrize(
    ("vanilla", "worker", "mode", "modules"),
    [
        (False, MTPEagleWorker, SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL, 1),
        (True, MTPWorker, SpeculativeDecodingMode.MTP, 3),
    ],
)
def test_pieces(vanilla: bool, worker: type, mode: SpeculativeDecodingMode, modules: int) -> None:
    pieces = build(max_draft_len=3, use_mtp_vanilla=vanilla)
    assert type(pieces.worker) is worker
    assert pieces.worker.max_draft_len == pieces.sampler.draft_len == 3
    assert pieces.manager.get_max_resource_count() == 4
    assert pieces.sampler.max_num_sequences == 8
    assert pieces.sampler.max_seq_len == 64
    metadata = pieces.make_metadata()
    assert metadata is not pieces.make_metadata()
    assert metadata.spec_dec_mode is mode
    assert metadata.mtp_num_modules == modules
    assert metadata.mtp_hidden_states_manager is pieces.manager
    assert (metadata.max_num_requests, metadata.max_draft_len) == (4, 3)
    assert metadata.max_position == 63
    assert metadata.draft_window == "exact"


def test_pieces_of_target_only_decoding() -> None:
    plugin = NoSpeculationPlugin()
    pieces = plugin.build(None, plugin.plan(None, 0), host())
    assert isinstance(pieces.worker, NoDraftsWorker)
    assert pieces.sampler.draft_len == 0
    metadata = pieces.make_metadata()
    assert metadata.spec_dec_mode.is_none()
    assert metadata.max_draft_len == 0
    assert metadata.mtp_hidden_states_manager is pieces.manager
    assert pieces.choose_draft_len(SimpleNamespace()) == 0
    assert pieces.draft_lengths is None
    assert pieces.alarms is None


@pytest.mark.parametrize("vanilla", [False, True])
@pytest.mark.parametrize(("seed", "used"), [(0, 7), (5, 5)])
def test_seed_of_the_engine_unless_the_config_has_one(vanilla: bool, seed: int, used: int) -> None:
    pieces = build(
        host(engine_seed=7), max_draft_len=2, use_mtp_vanilla=vanilla, mtp={"seed": seed}
    )
    assert pieces.manager.engine_seed == used


def test_the_chain_is_the_checkpoints_unless_the_config_says() -> None:
    shifted = host(chain="target_shift")
    options = {"max_draft_len": 2, "use_mtp_vanilla": True}
    assert build(shifted, **options).worker.chain == "target_shift"
    assert build(shifted, **options, mtp={"chain": "none"}).worker.chain == "none"


@pytest.mark.parametrize(
    ("config", "limits"),
    [
        ({"max_draft_len": 3}, {1: 3, 99: 3}),
        ({"max_draft_len": 3, "max_concurrency": 2}, {1: 3, 2: 3, 3: 0}),
        (
            {"max_draft_len": 3, "draft_len_schedule": {2: 3, 8: 1}},
            {1: 3, 2: 3, 3: 1, 8: 1, 9: 0},
        ),
    ],
)
def test_drafts_by_batch_size(config: dict[str, Any], limits: dict[int, int]) -> None:
    pieces = build(host(max_batch_size=99), **config)
    assert {size: pieces.choose_draft_len(batch_of(size)) for size in limits} == limits


def batch_of(size: int) -> SimpleNamespace:
    requests = [SimpleNamespace(py_draft_state=DraftState.fresh(3)) for _ in range(size)]
    return SimpleNamespace(context_requests=[], all_requests=lambda: requests)


def test_results_reach_the_gate_and_the_alarms() -> None:
    """What the sampler hears of a step, with drafts and without, at the length it verified."""
    pieces = build(max_draft_len=3, acceptance_window=2, acceptance_length_threshold=1.5)
    request = plain_host.Request(7)
    for num_emitted, num_drafted in ((1, 3), (1, 0), (3, 2), (3, 3)):
        pieces.sampler.on_step(request, num_emitted, num_drafted)
    assert pieces.draft_lengths.gates[3].acceptance_length == 2.0
    assert pieces.alarms.acceptance_length == pytest.approx(7 / 3)


def test_synthetic_pieces_say_so() -> None:
    options = {"verification": "synthetic", "synthetic_acceptance": [0.5, 0.25]}
    pieces = build(max_draft_len=2, mtp=options)
    assert pieces.label.name == "synthetic"
    assert pieces.alarms is None
    (mode,) = pieces.worker.verifier.modes
    assert mode.rule.thresholds.tolist() == [2**29, 2**29]
    strict = build(max_draft_len=2)
    assert strict.label is None
    assert strict.alarms is not None


# --- a cut draft vocabulary ---

RELAXED_ON = {
    "use_relaxed_acceptance_for_thinking": True,
    "begin_thinking_phase_token": 9,
    "end_thinking_phase_token": 11,
}


def test_a_draft_vocabulary_reaches_the_worker(tmp_path: Path) -> None:
    """One tensor, ascending, for the host and for the worker."""
    listed = tmp_path / "ids.json"
    listed.write_text("[9, 31, 2]")
    for option, ids in ((4, [0, 1, 2, 3]), (str(listed), [2, 9, 31]), (32, list(range(32)))):
        for keep_warm in (True, False):
            options = {"draft_vocab": option, "keep_warm": keep_warm}
            pieces = build(max_draft_len=2, mtp=options)
            assert pieces.draft_vocab_ids.dtype == torch.int32
            assert pieces.draft_vocab_ids.tolist() == ids
            given = pieces.worker.draft_vocab_ids
            assert given.data_ptr() == pieces.draft_vocab_ids.data_ptr()
    whole = build(max_draft_len=2)
    assert whole.draft_vocab_ids is None
    assert whole.worker.draft_vocab_ids is None


def test_a_draft_vocabulary_has_the_stop_ids_and_thinking_tags(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="mtp_plugin")
    pieces = build(host(end_ids=(3, 31, 40)), max_draft_len=2, mtp={"draft_vocab": 4}, **RELAXED_ON)
    assert pieces.draft_vocab_ids.tolist() == [0, 1, 2, 3, 9, 11, 31]
    assert "draft vocabulary: added 3 stop ids and thinking tags" in caplog.text
    assert build(max_draft_len=2).draft_vocab_ids is None


def test_draft_vocabularies_that_cannot_be(tmp_path: Path) -> None:
    """A file is read before weights are; the vocabulary is known when the pieces are built."""
    plugin, listed = MTPPlugin(), tmp_path / "ids.json"
    for option, message in (
        (33, "mtp.draft_vocab: expected at most the vocabulary of 32, got 33"),
        (str(listed), "expected ids of the vocabulary of 32, got 32, 40"),
    ):
        listed.write_text("[40, 1, 32]")
        config = MTPDecodingConfig(max_draft_len=2, mtp={"draft_vocab": option})
        plan = plugin.plan(config, 1)
        with pytest.raises(ConfigError, match=message):
            plugin.build(config, plan, host())
    listed.write_text("[1, 1]")
    with pytest.raises(ConfigError, match="expected every id once, got 1 more than once"):
        plugin.plan(config, 1)


# --- thinking tokens ---

RELAXED = {
    "max_draft_len": 2,
    "use_relaxed_acceptance_for_thinking": True,
    "relaxed_topk": 4,
    "relaxed_delta": 0.5,
}


@pytest.fixture
def tokenizer() -> dict[str, list[int]]:
    return {"<think>": [7], "</think>": [8], "<far>": [99]}


def test_thinking_tokens_reach_worker_and_manager(tokenizer: dict[str, list[int]]) -> None:
    pieces = build(host(encode=tokenizer.__getitem__), **RELAXED)
    for modes in (pieces.worker.verifier.modes, pieces.manager.modes):
        strict, relaxed = modes
        assert (strict.name, relaxed.thinking_tokens) == ("strict", (7, 8))
        assert (relaxed.topk, relaxed.delta) == (4, 0.5)
    assert pieces.label.name == "relaxed"
    given = build(begin_thinking_phase_token=3, end_thinking_phase_token=4, **RELAXED)
    assert given.worker.verifier.modes[1].thinking_tokens == (3, 4)


def test_thinking_tokens_outside_the_vocabulary(tokenizer: dict[str, list[int]]) -> None:
    encode = tokenizer.__getitem__
    with pytest.raises(
        ConfigError, match="end_thinking_phase_token: 99 is outside the vocabulary of 32"
    ):
        build(host(encode=encode), mtp={"end_thinking_phase": "<far>"}, **RELAXED)
    with pytest.raises(ConfigError, match="no id is set and no tokenizer is loaded"):
        build(**RELAXED)


def test_strict_decoding_needs_no_thinking_tokens() -> None:
    (mode,) = build(max_draft_len=2).worker.verifier.modes
    assert mode.name == "strict"


# --- what a host calls of the components ---


def test_pieces_answer_for_themselves() -> None:
    pieces = build(max_draft_len=2, mtp={"check_metadata": True, "kernels": "reference"})
    assert pieces.backend is pieces.worker.backend is Backend.TORCH
    assert pieces.checks_metadata
    slots, size = pieces.manager.sentinel_slot + 1, pieces.manager.bytes_per_slot()
    edits = pieces.manager.logits_allocator.num_bytes
    assert pieces.memory_report() == (
        f"MTP state {slots * size / 2**20:.1f} MiB ({slots} slots of {size} bytes), "
        f"logits processing {edits / 2**20:.1f} MiB"
    )
    with pieces.replay_checks() as checks:
        assert list(checks) == []
    assert not target_only().checks_metadata


def target_only(facts: HostFacts | None = None) -> SpeculativePieces:
    plugin = NoSpeculationPlugin()
    return plugin.build(None, plugin.plan(None, 0), facts or host())


def eagle(facts: HostFacts | None = None) -> SpeculativePieces:
    return build(facts, max_draft_len=2)


def vanilla(facts: HostFacts | None = None) -> SpeculativePieces:
    return build(facts, max_draft_len=2, use_mtp_vanilla=True)


PLUGINS = pytest.mark.parametrize("make", [target_only, eagle, vanilla])


@PLUGINS
def test_every_plugin_keeps_what_requests_ask_for(make: Any) -> None:
    """In slots, whatever it drafts."""
    pieces = make()
    assert isinstance(pieces.manager, ResourceManager)
    assert pieces.slot_of == pieces.manager.slot_of
    assert pieces.manager.modes[0].columns == pieces.worker.verifier.modes[0].columns
    assert pieces.served_options >= {"min_tokens", "stop_token_ids", "speculate"}
    assert pieces.served_options >= {"temperature", "top_k", "top_p", "min_p", "seed"}
    assert "n" not in pieces.served_options
    request = LlmRequest(
        5, [1, 2], SamplingParams(min_tokens=3, stop_token_ids=(9,)), max_draft_len=2, max_seq_len=9
    )
    request.context_chunk_size = 2
    pieces.manager.prepare_resources(SimpleNamespace(context_requests=[request]))
    metadata = pieces.make_metadata()
    metadata.request_ids = [5]
    metadata.prepare()
    rows = pieces.manager.slot_rows(metadata.slot_ids)
    values = {name: rows.read(name, slice(0, 1)).tolist() for name in ("prompt_len", "min_tokens")}
    assert values == {"prompt_len": [2], "min_tokens": [3]}
    assert rows.read("stop_ids", slice(0, 1))[0, :2].tolist() == [9, -1]


@PLUGINS
def test_graphs_of_every_plugin(make: Any) -> None:
    """The store's tensors keep their addresses; metadata of a graph has buffers of its own."""
    pieces = make()
    first, second = pieces.device_store(), pieces.device_store()
    assert first.new_tokens.data_ptr() == second.new_tokens.data_ptr()
    metadata = pieces.make_metadata()
    captured = pieces.make_graph_metadata(metadata, 2)
    assert (captured.is_cuda_graph, captured.max_num_requests) == (True, 2)
    assert captured.slot_ids.data_ptr() != metadata.slot_ids.data_ptr()
    assert captured.mtp_hidden_states_manager is pieces.manager


def test_past_pairs_are_kept_where_layers_of_their_own_depth_read_them() -> None:
    for make in (target_only, eagle):
        manager = make().manager
        assert type(manager) is SlotStateManager
        assert not hasattr(manager, "mtp_past_tokens_pool")
        assert not hasattr(manager, "mtp_past_hidden_states_pool")
    manager = vanilla().manager
    assert type(manager) is MTPHiddenStatesManager
    assert manager.mtp_past_tokens_pool.shape[1:] == (2,)
    assert manager.mtp_past_hidden_states_pool.shape[1:] == (2, 8)
    assert manager.dtype == manager.mtp_past_hidden_states_pool.dtype == torch.bfloat16
    # and where a host builds the manager itself
    config = MTPDecodingConfig(max_draft_len=2)
    own = MTPHiddenStatesManager(config, torch.float32, 8, 4, device="cpu")
    assert own.mtp_past_tokens_pool.shape[1:] == (2,)


@pytest.mark.parametrize(
    ("make", "size"),
    [
        # 72 numbers: 22, the 16 last tokens, 32 stop ids, how drafts are verified and sampled
        (target_only, 4 * 72),
        (eagle, 4 * 72),
        # two pairs of eight numbers of two bytes and a token
        (vanilla, 4 * 72 + 2 * (8 * 2 + 4)),
        (
            lambda: build(**RELAXED, begin_thinking_phase_token=3, end_thinking_phase_token=4),
            4 * 76,
        ),
    ],
    ids=["none", "eagle", "vanilla", "relaxed"],
)
def test_memory_reports(make: Any, size: int) -> None:
    """Four requests of a batch, eight sequences, two dummies of ranks, and the sentinel."""
    pieces = make()
    assert (pieces.manager.num_rows, pieces.manager.bytes_per_slot()) == (15, size)
    name = "MTP state" if pieces.plan.max_draft_len else "request state"
    report = f"{name} 0.0 MiB (15 slots of {size} bytes), logits processing 0.0 MiB"
    assert pieces.memory_report() == report


@PLUGINS
def test_slots_of_requests_and_of_padding(make: Any) -> None:
    pieces = make()
    slot = pieces.manager.slot_manager.add_slot(7)
    assert pieces.slot_of(7) == slot
    assert pieces.slot_of(CUDA_GRAPH_DUMMY_REQUEST_ID) == pieces.manager.sentinel_slot
    with pytest.raises(MetadataError, match="request 8 has no slot in the MTP manager"):
        pieces.slot_of(8)


@pytest.mark.parametrize("reads_states", [True, False])
def test_states_that_a_host_reads_again_are_left_alone(reads_states: bool) -> None:
    pieces = build(host(reads_states=reads_states), max_draft_len=2, use_mtp_vanilla=True)
    assert pieces.worker.may_overwrite_states is not reads_states
