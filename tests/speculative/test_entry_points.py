"""Public entry points refuse arguments that are no tensor or no integer with a named error."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.config import SpeculativeDecodingMode
from mtp_plugin.errors import ConfigError, ExecutorError, MetadataError, TensorContractError
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker
from mtp_plugin.speculative.sampler import MTPSampler, SampleStateMTP
from mtp_plugin.speculative.state import MTPHiddenStatesManager
from tests.speculative import test_sampler
from tests.speculative.drafting.host import Prompt, ScriptedLayer, Step, Turn
from tests.speculative.state import cases

MISSING = object()
Case = tuple[Callable[[], Any], type[Exception], str]


def build_manager(**changed: Any) -> MTPHiddenStatesManager:
    config = SimpleNamespace(max_draft_len=2)
    arguments = {"dtype": torch.float32, "hidden_size": 4, "max_num_requests": 2, **changed}
    return MTPHiddenStatesManager(config, device="cpu", **arguments)


def prepare_request(request_id: Any) -> None:
    build_manager().prepare_resources(cases.batch(cases.Request(request_id)))


MANAGER: dict[str, Case] = {
    "hidden_size": (
        lambda: build_manager(hidden_size=True),
        ConfigError,
        "MTPHiddenStatesManager: hidden_size: expected an integer >= 1, got True",
    ),
    "num_seq_slots": (
        lambda: build_manager(num_seq_slots=2.5),
        ConfigError,
        "MTPHiddenStatesManager: num_seq_slots: expected an integer >= 1, got 2.5",
    ),
    "vocab_size": (
        lambda: build_manager(vocab_size="9"),
        ConfigError,
        "MTPHiddenStatesManager: vocab_size: expected an integer >= 1, got '9'",
    ),
    "dtype": (
        lambda: build_manager(dtype=torch.int16),
        ConfigError,
        "MTPHiddenStatesManager: dtype: expected a floating-point torch.dtype, got torch.int16",
    ),
    "request id": (
        lambda: prepare_request(None),
        MetadataError,
        "request_id: expected an integer, got None",
    ),
    "dummy id": (
        lambda: build_manager().add_dummy_requests(["7"]),  # type: ignore[list-item]
        MetadataError,
        "add_dummy_requests: request id: expected an integer, got '7'",
    ),
    "slot of": (
        lambda: build_manager().slot_of(None),  # type: ignore[arg-type]
        MetadataError,
        "request_id: expected an integer, got None",
    ),
    "slot ids": (
        lambda: build_manager().slot_rows([0]),  # type: ignore[arg-type]
        TensorContractError,
        "slot_ids: expected integer tensor [R], got [0]",
    ),
    "bool slot ids": (
        lambda: build_manager().slot_rows(torch.tensor([True])),
        TensorContractError,
        "slot_ids: expected integer tensor [R], got torch.bool [1] on cpu",
    ),
}


def build_sampler(nextn: Any = 3, **changed: Any) -> MTPSampler:
    args = SimpleNamespace(**{"max_num_sequences": 6, "max_seq_len": 64, **changed})
    return MTPSampler(args, nextn=nextn, device="cpu")


def sample(name: str, value: Any, **request: Any) -> SampleStateMTP:
    outputs = test_sampler.outputs([5, 6]) | {name: value}
    if value is MISSING:
        del outputs[name]
    batch = test_sampler.batch([], [test_sampler.Request(0, **request)])
    return build_sampler().sample_async(batch, outputs)


def sample_logprobs(entries: Any) -> None:
    sample(
        "logprob_entries",
        entries,
        py_return_log_probs=True,
        py_num_logprobs=0,
    )


def update(name: str, value: Any) -> None:
    """Apply a state that a host built from its own tensors."""
    sampler, batch = build_sampler(), test_sampler.batch([], [test_sampler.Request(0)])
    host = sampler.sample_async(batch, test_sampler.outputs([5, 6])).host
    setattr(host, name, value)
    sampler.update_requests(SampleStateMTP(scheduled_requests=batch, host=host))


SAMPLER: dict[str, Case] = {
    "nextn": (
        lambda: build_sampler(nextn=True),
        ConfigError,
        "MTPSampler: nextn: expected an integer >= 0, got True",
    ),
    "max_num_sequences": (
        lambda: build_sampler(max_num_sequences=6.5),
        ConfigError,
        "MTPSampler: max_num_sequences: expected an integer >= 1, got 6.5",
    ),
    "max_seq_len": (
        lambda: build_sampler(max_seq_len=None),
        ConfigError,
        "MTPSampler: max_seq_len: expected an integer >= 1, got None",
    ),
    "outputs": (
        lambda: build_sampler().sample_async(test_sampler.batch([], []), [1]),  # type: ignore[arg-type]
        ExecutorError,
        "sample_async: expected model_outputs or outputs, got [1]",
    ),
    "new_tokens": (
        lambda: sample("new_tokens", [[5, 6, -1, -1]]),
        TensorContractError,
        "new_tokens: expected tensor [R, k+1], got [[5, 6, -1, -1]]",
    ),
    "next_draft_tokens": (
        lambda: sample("next_draft_tokens", None),
        TensorContractError,
        "next_draft_tokens: expected tensor [R, k], got None",
    ),
    "missing tensor": (
        lambda: sample("new_tokens_lens", MISSING),
        TensorContractError,
        "new_tokens_lens: expected integer tensor [>= 1] on cpu, got None",
    ),
    "logprob_entries": (
        lambda: sample_logprobs([[0] * 3]),
        TensorContractError,
        "logprob_entries: expected torch.int32 tensor [>= 1, k+1, ",
    ),
    "sequence slot": (
        lambda: sample("status", None, py_seq_slot="0"),
        ExecutorError,
        "sample_async: expected a sequence slot of 0..5 for each request, got ['0']",
    ),
    "tokens of a host's state": (
        lambda: update("new_tokens", [[5], [6]]),
        TensorContractError,
        "sample state, new_tokens: expected integer tensor [k+1, S, 1], got [[5], [6]]",
    ),
    "lengths of a host's state": (
        lambda: update("new_tokens_lens", torch.ones(6)),
        TensorContractError,
        "sample state, new_tokens_lens: expected integer tensor [S], got torch.float32 [6] on cpu",
    ),
}

WORKERS = {"vanilla": MTPWorker, "eagle": MTPEagleWorker}


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
    worker = WORKERS[kind](SimpleNamespace(max_draft_len=3), device="cpu")
    call = getattr(worker, method)
    # skip_forward takes the arguments of forward
    parameters = inspect.signature(worker.forward if method == "skip_forward" else call).parameters
    call(**{name: value for name, value in inputs.items() if name in parameters})


def refuse(method: str, message: str, **options: Any) -> Case:
    error = MetadataError if message.startswith("runtime") else TensorContractError
    return lambda: call_worker(method, **options), error, message


HALF_OR_SINGLE = "torch.bfloat16 or torch.float16 or torch.float32"
STATES = torch.zeros(7, 8)
WORKER: dict[str, Case] = {
    "no ids": refuse("forward", "input_ids: expected integer tensor, got None", input_ids=None),
    "listed ids": refuse(
        "skip_drafting", "input_ids: expected integer tensor, got [1, 2]", input_ids=[1, 2]
    ),
    "no positions": refuse(
        "forward", "position_ids: expected integer tensor, got None", position_ids=None
    ),
    "no states": refuse(
        "forward",
        f"hidden_states: expected {HALF_OR_SINGLE} tensor [T, H], got None",
        hidden_states=None,
    ),
    "int16 states": refuse(
        "forward",
        f"hidden_states: expected {HALF_OR_SINGLE} tensor [T, H], got torch.int16 [7, 8] on cpu",
        hidden_states=STATES.to(torch.int16),
        kind="vanilla",
    ),
    "bool states": refuse(
        "forward",
        f"hidden_states: expected {HALF_OR_SINGLE} tensor [T, H], got torch.bool [7, 8] on cpu",
        hidden_states=STATES.bool(),
    ),
    "no logits": refuse("forward", "logits: expected floating-point tensor, got None", logits=None),
    "listed logits of a skipped step": refuse(
        "skip_forward", "logits: expected tensor, got [0.5]", logits=[0.5]
    ),
    "draft length": refuse(
        "forward",
        "runtime_draft_len: expected an integer, got '2'",
        spec={"runtime_draft_len": "2"},
    ),
    "number of drafts": refuse(
        "forward",
        "draft_lens: expected integer tensor, got torch.bool [1] on cpu",
        spec={"draft_lens": torch.tensor([True])},
    ),
    "next prompt tokens": refuse(
        "forward",
        "next_prompt_tokens: expected integer tensor [1], got [3]",
        spec={"next_prompt_tokens": [3]},
    ),
    "logits to verify": refuse(
        "sample_and_accept_draft_tokens",
        "logits: expected floating-point tensor, got None",
        logits=None,
    ),
    "bool ids to verify": refuse(
        "sample_and_accept_draft_tokens",
        "input_ids: expected integer tensor, got torch.bool [7] on cpu",
        input_ids=torch.ones(7).bool(),
    ),
    "history": refuse(
        "update_mtp_hidden_states",
        "input_ids: expected integer tensor, got None",
        kind="vanilla",
        input_ids=None,
    ),
    "changed metadata": refuse(
        "change_attn_metadata",
        "num_accepted_tokens: expected integer tensor [R], got [1, 1]",
        num_accepted_tokens=[1, 1],
    ),
    "accepted tokens of vanilla": refuse(
        "prepare_drafter_inputs",
        "accepted_tokens: expected integer tensor [R, K+1], got None",
        kind="vanilla",
        accepted_tokens=None,
    ),
    "counts of vanilla": refuse(
        "prepare_drafter_inputs",
        "num_accepted_tokens: expected integer tensor [R], got [1, 1]",
        kind="vanilla",
        num_accepted_tokens=[1, 1],
    ),
    "last rows of eagle": refuse(
        "prepare_drafter_inputs",
        "last_tokens_idx: expected integer tensor [R], got None",
        last_tokens_idx=None,
    ),
}

TABLES = {"manager": MANAGER, "sampler": SAMPLER, "worker": WORKER}
CASES = {f"{part}: {name}": case for part, table in TABLES.items() for name, case in table.items()}


@pytest.mark.parametrize("name", CASES)
def test_wrong_types_are_refused_by_name(name: str) -> None:
    call, error, message = CASES[name]
    with pytest.raises(error, match=re.escape(message)):
        call()
