"""What managers, samplers, workers, metadata and the registry refuse, by name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.config import MTPDecodingConfig, OtherDecodingConfig, SpeculativeDecodingMode
from mtp_plugin.errors import MTPPluginError
from mtp_plugin.ops.step import SamplingKind
from mtp_plugin.plugin import (
    DraftPlan,
    HostFacts,
    MTPPlugin,
    NoSpeculationPlugin,
    SpeculativePieces,
    register_plugin,
    unregister_plugin,
)
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.speculative.draft_length.controller import DraftLengthController
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker, NoDraftsWorker
from mtp_plugin.speculative.host import DecodingOptions, RequestFacts
from mtp_plugin.speculative.metadata import MTPSpecMetadata
from mtp_plugin.speculative.sampler import MTPSampler, SamplerHooks, SampleStateMTP
from mtp_plugin.speculative.state import MTPHiddenStatesManager
from mtp_plugin.speculative.verification import RelaxedVerification, Verifier
from tests.speculative import test_sampler
from tests.speculative.drafting.host import Prompt, ScriptedLayer, Step, Turn
from tests.speculative.drafting.test_ranks import mapping
from tests.speculative.plain_host import KVAttention
from tests.speculative.state import cases

CPU = torch.device("cpu")
INT32 = torch.int32
OWN_VOCAB = SimpleNamespace(model=SimpleNamespace(d2t=torch.arange(3)))
MISSING = object()
Rows = list[tuple[Callable[[], Any], str]]


def build_manager(config: Any = None, **changed: Any) -> MTPHiddenStatesManager:
    config = SimpleNamespace(max_draft_len=2) if config is None else config
    arguments = {"dtype": torch.float32, "hidden_size": 4, "max_num_requests": 2, **changed}
    return MTPHiddenStatesManager(config, device="cpu", **arguments)


def prepare_request(request_id: Any) -> None:
    build_manager().prepare_resources(cases.batch(cases.Request(request_id)))


def build_sampler(nextn: Any = 3, **changed: Any) -> MTPSampler:
    own = {name: changed.pop(name) for name in test_sampler.OWN & set(changed)}
    args = SimpleNamespace(**{"max_num_sequences": 6, "max_seq_len": 64, **changed})
    return MTPSampler(args, nextn=nextn, device="cpu", **own)


def sample(name: str, value: Any = None, **request: Any) -> SampleStateMTP:
    outputs = test_sampler.outputs([5, 6]) | {name: value}
    if value is MISSING:
        del outputs[name]
    batch = test_sampler.batch([], [test_sampler.Request(0, **request)])
    return build_sampler().sample_async(batch, outputs)


def update(name: str, value: Any) -> None:
    """Apply a state that a host built from its own tensors."""
    sampler, batch = build_sampler(), test_sampler.batch([], [test_sampler.Request(0)])
    host = sampler.sample_async(batch, test_sampler.outputs([5, 6])).host
    setattr(host, name, value)
    sampler.update_requests(SampleStateMTP(scheduled_requests=batch, host=host))


def validate(sampler: MTPSampler | None = None, **options: Any) -> None:
    facts = RequestFacts.of(7, SamplingParams(**options), prompt_len=1, max_seq_len=64)
    (sampler or build_sampler()).validate_request(test_sampler.Request(0, facts=facts))


WORKERS = {"vanilla": MTPWorker, "eagle": MTPEagleWorker}


def make_worker(kind: str = "eagle", config: Any = None, **options: Any) -> Any:
    config = SimpleNamespace(max_draft_len=3) if config is None else config
    return WORKERS[kind](config, device="cpu", **options)


def call_worker(method: str, *, kind: str = "eagle", spec: Any = None, **changed: Any) -> None:
    """Call a worker of K = 3 with the inputs of one context and one generation."""
    mode = "MTP" if kind == "vanilla" else "MTP_EAGLE_ONE_MODEL"
    given = Step(
        3, [Prompt([1, 2, 3])], [Turn([4, 5], [6] * 3, [7] * 4)], mode=SpeculativeDecodingMode[mode]
    )
    for name, value in (spec or {}).items():
        setattr(given.spec, name, value)
    num_layers = 3 if kind == "vanilla" else 1
    counts = torch.ones(2, dtype=torch.int32)
    inputs = {
        **given.inputs(),
        "mtp_layers": [ScriptedLayer() for _ in range(num_layers)],
        "last_tokens_idx": torch.tensor([2, 6]),
        "accepted_tokens": torch.ones(2, 4, dtype=torch.int32),
        "num_accepted_tokens": counts,
        **changed,
    }
    worker = make_worker(kind)
    call = getattr(worker, method)
    # skip_forward takes the arguments of forward
    parameters = inspect.signature(worker.forward if method == "skip_forward" else call).parameters
    call(**{name: value for name, value in inputs.items() if name in parameters})


def host_facts(**changed: Any) -> HostFacts:
    sizes = {"max_batch_size": 4, "max_num_sequences": 8, "max_seq_len": 64}
    given = {"hidden_size": 8, "vocab_size": 32, "dtype": torch.bfloat16, "device": CPU, **sizes}
    return HostFacts(**{**given, **changed})


def change_pieces(**changed: Any) -> SpeculativePieces:
    plugin = NoSpeculationPlugin()
    pieces = plugin.build(None, plugin.plan(None, 0), host_facts())
    return dataclasses.replace(pieces, **changed)


def serving(options: Any) -> Any:
    """A sampler that serves these options."""
    return SimpleNamespace(served_options=options, sample_async=print, update_requests=print)


def make_spec(**changed: Any) -> MTPSpecMetadata:
    return MTPSpecMetadata(**{"max_num_requests": 6, "max_draft_len": 2, **changed})


def relaxed(**tokens: int) -> SimpleNamespace:
    options = {"use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 2, "relaxed_delta": 0.5}
    return SimpleNamespace(max_draft_len=2, **options, **tokens)


def thinking(*tokens: int) -> DecodingOptions:
    return DecodingOptions(2, use_relaxed_acceptance_for_thinking=True, thinking_tokens=tokens)


def synthetic(k: int, **options: Any) -> SimpleNamespace:
    rates = {"verification": "synthetic", "synthetic_acceptance": [0.5, 0.4, 0.3]}
    own = MTPDecodingConfig(max_draft_len=3, mtp=rates).mtp
    return SimpleNamespace(max_draft_len=k, mtp=own, **options)


def controller(config: MTPDecodingConfig) -> DraftLengthController:
    return DraftLengthController(config, max_batch_size=16)


PROCESSED = SamplingKind.PROCESSED
EAGLE = MTPDecodingConfig(max_draft_len=3)
NINE = MTPDecodingConfig(max_draft_len=2, mtp={"draft_vocab": 9})
REJECTION = MTPDecodingConfig(max_draft_len=3, mtp={"verification": "rejection"})
NO_K = "gives no max_draft_len and no num_nextn_predict_layers"
NO_SLOTS = "slot_ids: call prepare() first"
NO_MANAGER = "mtp_hidden_states_manager, got None"
STATES = torch.zeros(7, 8)
FLOATS = "torch.bfloat16 or torch.float16 or torch.float32"

# fmt: off
MANAGER: Rows = [
    (lambda: build_manager(hidden_size=True),
     "ConfigError: MTPHiddenStatesManager: hidden_size: expected an integer >= 1, got True"),
    (lambda: build_manager(max_num_requests=0),
     "max_num_requests: expected an integer >= 1, got 0"),
    (lambda: build_manager(num_seq_slots=2.5), "num_seq_slots: expected an integer >= 1, got 2.5"),
    (lambda: build_manager(vocab_size=0),
     "ConfigError: MTPHiddenStatesManager: vocab_size: expected an integer >= 1, got 0"),
    (lambda: build_manager(dtype=torch.int16),
     "dtype: expected a floating-point torch.dtype, got torch.int16"),
    (lambda: build_manager(SimpleNamespace()), NO_K),
    (lambda: build_manager(sa_manager="s"),
     "ConfigError: MTPHiddenStatesManager: not served in this version: sa_manager='s'"),
    (lambda: build_manager(REJECTION),
     "ConfigError: MTPHiddenStatesManager: vocab_size must be given with mtp.verification"),
    (lambda: build_manager(relaxed(begin_thinking_phase_token=1)),
     "there is no end_thinking_phase_token, so nothing"),
    (lambda: prepare_request(None), "MetadataError: request_id: expected an integer, got None"),
    (lambda: build_manager().add_dummy_requests(["7"]),  # type: ignore[list-item]
     "add_dummy_requests: request id: expected an integer, got '7'"),
    (lambda: build_manager().slot_of(None),  # type: ignore[arg-type]
     "MetadataError: request_id: expected an integer, got None"),
    (lambda: build_manager().slot_of(8), "MetadataError: request 8 has no slot in the MTP manager"),
    (lambda: build_manager().slot_rows([0]),  # type: ignore[arg-type]
     "TensorContractError: slot_ids: expected integer tensor [R], got [0]"),
]
SAMPLER: Rows = [
    (lambda: build_sampler(nextn=True),
     "ConfigError: MTPSampler: nextn: expected an integer >= 0, got True"),
    (lambda: build_sampler(max_num_sequences=6.5),
     "max_num_sequences: expected an integer >= 1, got 6.5"),
    (lambda: build_sampler(max_seq_len=None), "max_seq_len: expected an integer >= 1, got None"),
    (lambda: build_sampler(max_draft_len=2),
     "MTPSampler: expected nextn like args.max_draft_len, got nextn=3 and max_draft_len=2;"),
    (lambda: build_sampler(always_greedy=True),
     "always_greedy=True (set it in hooks=SamplerHooks(always_greedy=...))"),
    (lambda: build_sampler(max_beam_width=4),
     "ConfigError: MTPSampler: max_beam_width must be 1 with speculation, got 4"),
    (lambda: build_sampler().sample_async(test_sampler.batch([], []), [1]),  # type: ignore[arg-type]
     "ExecutorError: sample_async: expected model_outputs or outputs, got [1]"),
    (lambda: sample("new_tokens", [[5, 6, -1, -1]]),
     "TensorContractError: new_tokens: expected tensor [R, k+1], got [[5, 6, -1, -1]]"),
    (lambda: sample("next_draft_tokens"),
     "TensorContractError: next_draft_tokens: expected tensor [R, k], got None"),
    (lambda: sample("new_tokens_lens", MISSING),
     "new_tokens_lens: expected integer tensor [>= 1] on cpu, got None"),
    (lambda: sample("logprob_entries", [[0] * 3], py_return_log_probs=True, py_num_logprobs=0),
     "logprob_entries: expected torch.int32 tensor [>= 1, k+1, "),
    (lambda: sample("status", py_seq_slot="0"),
     "sample_async: expected a sequence slot of 0..5 for each request, got ['0']"),
    (lambda: update("new_tokens", [[5], [6]]),
     "sample state, new_tokens: expected integer tensor [k+1, S, 1], got [[5], [6]]"),
    (lambda: update("new_tokens_lens", torch.ones(6)),
     "sample state, new_tokens_lens: expected integer tensor [S], got torch.float32 [6]"),
    (lambda: update("new_tokens_lens", None), "holds no lengths or no drafts"),
    (lambda: update("next_draft_tokens", None), "holds no lengths or no drafts"),
    (lambda: build_sampler().update_requests(SampleStateMTP(cases.batch())),
     "holds no host tensors"),
    (lambda: build_sampler().update_requests(5), "expected a state of sample_async, got 5"),
    (lambda: validate(temperature=0.7, top_p=0.5, seed=3, n=2),
     "not supported with MTP: temperature=0.7, top_p=0.5, seed=3, n=2"),
    (lambda: validate(build_sampler(hooks=SamplerHooks(always_greedy=True)), temperature=0.7, n=2),
     "MTP: n=2"),
]
WORKER: Rows = [
    (lambda: call_worker("forward", input_ids=None),
     "TensorContractError: input_ids: expected integer tensor, got None"),
    (lambda: call_worker("skip_drafting", input_ids=[1, 2]),
     "input_ids: expected integer tensor, got [1, 2]"),
    (lambda: call_worker("forward", position_ids=None),
     "position_ids: expected integer tensor, got None"),
    (lambda: call_worker("forward", hidden_states=None),
     f"hidden_states: expected {FLOATS} tensor [T, H], got None"),
    (lambda: call_worker("forward", hidden_states=STATES.bool()),
     f"hidden_states: expected {FLOATS} tensor [T, H], got torch.bool [7, 8]"),
    (lambda: call_worker("forward", logits=None),
     "logits: expected floating-point tensor, got None"),
    (lambda: call_worker("skip_forward", logits=[0.5]), "logits: expected tensor, got [0.5]"),
    (lambda: call_worker("forward", spec={"runtime_draft_len": "2"}),
     "MetadataError: runtime_draft_len: expected an integer, got '2'"),
    (lambda: call_worker("forward", spec={"runtime_draft_len": 4}),
     "runtime_draft_len: expected 0 to max_draft_len (3), got 4"),
    (lambda: call_worker("skip_forward", kind="vanilla", spec={"runtime_draft_len": -1}),
     "expected 0 to max_draft_len (3), got -1"),
    (lambda: call_worker("skip_drafting"), "expected T = 4 rows"),
    (lambda: call_worker("forward", spec={"runtime_draft_len": 1}),
     "MetadataError: step: expected T = 5 rows, 3 of prompts and K+1 = 2 for each of 1 "
     "generations (runtime_draft_len: 1), got 7"),
    (lambda: call_worker("forward", spec={"sampling_kind": PROCESSED,
        "mtp_hidden_states_manager": None}),
     NO_MANAGER),
    (lambda: call_worker("forward", spec={"sampling_kind": PROCESSED, "slot_ids": None}), NO_SLOTS),
    (lambda: call_worker("forward", spec={"sampling_kind": PROCESSED,
        "mtp_hidden_states_manager": 7}),
     "needs a manager with a slot table, got int without slot_rows"),
    (lambda: call_worker("forward", spec={"draft_lens": torch.tensor([True])}),
     "draft_lens: expected integer tensor, got torch.bool [1]"),
    (lambda: call_worker("forward", spec={"next_prompt_tokens": [3]}),
     "next_prompt_tokens: expected integer tensor [1], got [3]"),
    (lambda: call_worker("sample_and_accept_draft_tokens", logits=None),
     "logits: expected floating-point tensor, got None"),
    (lambda: call_worker("sample_and_accept_draft_tokens", input_ids=torch.ones(7).bool()),
     "input_ids: expected integer tensor, got torch.bool [7]"),
    (lambda: call_worker("update_mtp_hidden_states", kind="vanilla",
        spec={"mtp_hidden_states_manager": None}),
     NO_MANAGER),
    (lambda: call_worker("forward", kind="vanilla", spec={"mtp_hidden_states_manager": None}),
     NO_MANAGER),
    (lambda: call_worker("forward", kind="vanilla", spec={"slot_ids": None}), NO_SLOTS),
    (lambda: call_worker("forward", kind="vanilla", mtp_layers=[ScriptedLayer()]),
     "drafts K = 3 tokens with one layer each, got 1 layers"),
    (lambda: call_worker("forward", mtp_layers=[]),
     "ConfigError: eagle MTP drafts with one layer, got none"),
    (lambda: call_worker("change_attn_metadata", num_accepted_tokens=[1, 1]),
     "num_accepted_tokens: expected integer tensor [R], got [1, 1]"),
    (lambda: make_worker().change_attn_metadata(torch.ones(1, dtype=INT32), KVAttention([5], 0,
        [20])),
     "generations of 2 to K+1 = 4 rows, got 5"),
    (lambda: make_worker().restore_attn_metadata(KVAttention([2], 0, [9])),
     "restore_attn_metadata: nothing was changed"),
    (lambda: call_worker("prepare_drafter_inputs", kind="vanilla", accepted_tokens=None),
     "accepted_tokens: expected integer tensor [R, K+1], got None"),
    (lambda: call_worker("prepare_drafter_inputs", kind="vanilla", num_accepted_tokens=[1, 1]),
     "num_accepted_tokens: expected integer tensor [R], got [1, 1]"),
    (lambda: call_worker("prepare_drafter_inputs", last_tokens_idx=None),
     "last_tokens_idx: expected integer tensor [R], got None"),
    (lambda: make_worker(config=SimpleNamespace()), NO_K),
    (lambda: make_worker(config=SimpleNamespace(num_nextn_predict_layers="2")),
     "expected an integer >= 1, got '2'"),
    (lambda: make_worker(config=SimpleNamespace(max_draft_len=1,
        mtp=SimpleNamespace(kernels="cuda"))),
     "mtp: kernels: should be 'auto', 'triton' or 'reference', got 'cuda'"),
    (lambda: make_worker("vanilla", layer_kwargs=["lora_params"]),
     "ConfigError: layer_kwargs: expected a list with names of all_rank"),
    (lambda: make_worker(config=relaxed(end_thinking_phase_token=1)),
     "there is no begin_thinking_phase_token, so nothing"),
    (lambda: make_worker(config=synthetic(3, use_relaxed_acceptance_for_thinking=True)),
     "synthetic acceptance cannot be relaxed"),
    (lambda: make_worker(config=synthetic(2)), "expected 2 rates, one per draft"),
    (lambda: make_worker(config=NINE),
     "draft_vocab: 9 would be ignored; expected draft_vocab_ids with it"),
    (lambda: make_worker(config=NINE, draft_vocab_ids=torch.arange(3)),
     "draft_vocab_ids: expected a vector of torch.int32, "),
    (lambda: make_worker(config=NINE, draft_vocab_ids=torch.zeros(0, dtype=INT32)),
     "draft_vocab_ids: expected a vector of torch.int32, "),
    (lambda: make_worker().set_draft_model(OWN_VOCAB),
     "expected a draft model with the target's vocabulary"),
    (lambda: make_worker(use_separate_draft_kv_cache=True),
     "MTPEagleWorker: not served in this version: use_separate_draft_kv_cache=True"),
    (lambda: make_worker(mapping={"tp_size": 2}),
     "not served in this version: mapping={'tp_size': 2}"),
    (lambda: make_worker("vanilla", sa_manager="s", is_new=1),
     "MTPWorker: not served in this version: sa_manager='s', is_new=1"),
    (lambda: make_worker(model_config=SimpleNamespace(mapping=mapping(tp_size=2))),
     "(tensor parallelism, tp_size=2, without gather_logits)"),
    (lambda: make_worker(mapping=mapping(cp_size=2), gather_logits=print),
     "(context parallelism, cp_size=2)"),
    (lambda: make_worker(mapping=mapping(tp_size=2, pp_size=2), gather_logits=print),
     "(the last of several pipeline stages, pp_size=2)"),
    (lambda: make_worker(mapping=mapping(tp_size=2, enable_attention_dp=True,
        enable_lm_head_tp_in_adp=True), gather_logits=print),
     "(a draft head split under attention data parallelism; write enable_lm_head_tp_in_adp: "
     "false, which changes no output)"),
    (lambda: make_worker(mapping=mapping(world_size=4, tp_size=2), gather_logits=print),
     "(4 ranks, but tp_size=2)"),
    (lambda: NoDraftsWorker(SimpleNamespace(max_draft_len=3), device="cpu"),
     "max_draft_len: expected 0 without drafts, got 3"),
]
OTHERS: Rows = [
    (lambda: make_spec(max_num_requests=0),
     "ConfigError: MTPSpecMetadata: max_num_requests: expected "),
    (lambda: make_spec(max_draft_len="3"),
     "ConfigError: MTPSpecMetadata: max_draft_len: expected "),
    (lambda: make_spec(mtp_num_modules=None),
     "ConfigError: MTPSpecMetadata: mtp_num_modules: expected "),
    (lambda: make_spec(max_position=-1), "ConfigError: MTPSpecMetadata: max_position: expected "),
    (lambda: make_spec(draft_window="wide"),
     "ConfigError: MTPSpecMetadata: draft_window: expected "),
    (lambda: make_spec(mtp_hidden_states_manager=SimpleNamespace(device="cpu")),
     "ConfigError: mtp_hidden_states_manager: expected an object with slot_manager.get_slot"),
    (lambda: make_spec().prepare(), "MetadataError: prepare(): request_ids must be assigned"),
    (lambda: Verifier([]), "ConfigError: verification: expected at least one mode, got none"),
    (lambda: RelaxedVerification(thinking(-1, 5), CPU), "there is no begin"),
    (lambda: RelaxedVerification(thinking(5, 5), CPU), "begin and end must differ"),
    (lambda: controller(EAGLE).choose(0),
     "ExecutorError: draft length: expected a batch of 1 to 16 requests, got 0"),
    (lambda: controller(EAGLE).draft_lens([1, 17]), "expected a batch of 1 to 16 requests, got 17"),
    (lambda: controller(MTPDecodingConfig()), "ConfigError: max_draft_len: not known yet"),
    (lambda: unregister_plugin("MTP"),
     "PluginError: decoding_type 'MTP' has no plugin that could be removed"),
    (lambda: register_plugin(None),  # type: ignore[arg-type]
     "PluginError: register_plugin: expected a SpeculativePlugin object"),
    (lambda: register_plugin(MTPPlugin), "register_plugin: expected a SpeculativePlugin object"),  # type: ignore[arg-type]
    (lambda: register_plugin(SimpleNamespace(decoding_type="LOOKUP", plan=print)),  # type: ignore[arg-type]
     "register_plugin: expected a SpeculativePlugin object"),
    (lambda: DraftPlan(-1),
     "ConfigError: DraftPlan: max_draft_len: expected an integer >= 0, got -1"),
    (lambda: DraftPlan(2, history_rows=True),
     "ConfigError: DraftPlan: history_rows: expected an integer >= 0, got True"),
    (lambda: DraftPlan(2, past_pairs=1.5),  # type: ignore[arg-type]
     "DraftPlan: past_pairs: expected an integer >= 0, got 1.5"),
    (lambda: MTPPlugin().plan(MTPDecodingConfig(max_draft_len=3, use_mtp_vanilla=True), 1),
     "3 is more than the checkpoint's 1 MTP layer"),
    (lambda: MTPPlugin().plan(OtherDecodingConfig("NGRAM"), 1),
     "expected an MTPDecodingConfig, got OtherDecodingConfig"),
    (lambda: host_facts(hidden_size=-1), "ConfigError: HostFacts: hidden_size: expected "),
    (lambda: host_facts(dtype=torch.int32), "ConfigError: HostFacts: dtype: expected "),
    (lambda: host_facts(device=7), "ConfigError: HostFacts: device: expected "),
    (lambda: host_facts(max_batch_size=1.5), "ConfigError: HostFacts: max_batch_size: expected "),
    (lambda: host_facts(max_num_sequences=None),
     "ConfigError: HostFacts: max_num_sequences: expected "),
    (lambda: host_facts(vocab_size=0), "ConfigError: HostFacts: vocab_size: expected "),
    (lambda: host_facts(max_seq_len=0), "ConfigError: HostFacts: max_seq_len: expected "),
    (lambda: host_facts(chain="sideways"), "ConfigError: HostFacts: chain: expected "),
    (lambda: host_facts(encode={}), "ConfigError: HostFacts: encode: expected "),
    (lambda: change_pieces(manager=None),
     "PluginError: SpeculativePieces: manager: expected an object with slot_of, "
     "prepare_resources, update_resources, free_resources"),
    (lambda: change_pieces(sampler=object()),
     "SpeculativePieces: sampler: expected an object with sample_async, update_requests"),
    (lambda: change_pieces(sampler=serving({1})),
     "SpeculativePieces: sampler.served_options: expected a set of names"),
    (lambda: change_pieces(worker=None), "SpeculativePieces: worker: expected a function"),
    (lambda: change_pieces(make_metadata=SimpleNamespace()),
     "SpeculativePieces: make_metadata: expected a function"),
    (lambda: change_pieces(memory_report="4 MiB"),
     "SpeculativePieces: memory_report: expected a function or None"),
    (lambda: change_pieces(plan=None), "SpeculativePieces: plan: expected a DraftPlan"),
    (lambda: change_pieces(replay_checks=()),
     "SpeculativePieces: replay_checks: expected a function"),
    (lambda: change_pieces(backend="torch"), "SpeculativePieces: backend: expected a Backend"),
    (lambda: change_pieces(draft_vocab_ids=[1]),
     "SpeculativePieces: draft_vocab_ids: expected a tensor or None"),
    (lambda: change_pieces(make_graph_metadata=5),
     "SpeculativePieces: make_graph_metadata: expected a function or None"),
]
# fmt: on


@pytest.mark.parametrize("row", MANAGER + SAMPLER + WORKER + OTHERS, ids=lambda row: row[1])
def test_call_is_refused(row: tuple[Callable[[], object], str]) -> None:
    call, message = row
    with pytest.raises(MTPPluginError) as refused:
        call()
    assert message in f"{type(refused.value).__name__}: {refused.value}"
