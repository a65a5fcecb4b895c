"""Public entry points refuse arguments that are no tensor or no integer with a named error."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.errors import ConfigError, ExecutorError, MetadataError, TensorContractError
from mtp_plugin.speculative.sampler import MTPSampler, SampleStateMTP
from mtp_plugin.speculative.state import MTPHiddenStatesManager
from tests.speculative import test_sampler
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

CASES = {
    f"{part}: {name}": case
    for part, table in (("manager", MANAGER), ("sampler", SAMPLER))
    for name, case in table.items()
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_types_are_refused_by_name(name: str) -> None:
    call, error, message = CASES[name]
    with pytest.raises(error, match=re.escape(message)):
        call()
