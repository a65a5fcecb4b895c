"""A dry run finds the kernels of an executor's steps without launching one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.embedded import early_kernels
from tests.no_interpreter import run_module

triton = pytest.importorskip("triton")


def test_dry_run_finds_the_kernels_of_steps_and_prompts() -> None:
    needed, later, first, *_, is_written = run_module("tests.hosts.embedded.dry_run")
    of_steps = {name.rpartition(".")[2] for name in needed}
    of_greedy = {name.rpartition(".")[2] for name in first}
    of_processing = {name.rpartition(".")[2] for name in later}
    assert of_steps >= {
        "generation_inputs_kernel",
        "paged_uniform_kernel",  # of generations
        "paged_ragged_kernel",  # of prompts
        "router_logits_kernel",
        "accept_kernel",
        "sample_finish_kernel",
        "logprob_finish_kernel",
        "write_drafts_kernel",
    }
    assert "mask_logits_kernel" not in of_steps
    assert set(first) < set(needed)
    assert of_greedy >= {"generation_inputs_kernel", "paged_uniform_kernel", "top1_kernel"}
    assert not of_greedy & {"sample_finish_kernel", "paged_ragged_kernel"}
    assert of_processing >= {"mask_logits_kernel", "restore_logits_kernel", "token_history_kernel"}
    assert not is_written


NOTHING = (lambda *_: None, lambda: None, [], [], lambda _: None)


def test_kernels_are_compiled_at_their_launch_where_triton_has_other_hooks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton, "knobs", SimpleNamespace())
    early_kernels._warn_once.cache_clear()
    device = torch.device("cuda")
    with early_kernels.EarlyKernels(device, *NOTHING) as kernels:
        assert kernels.compile_later().is_done
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "kernels are compiled at their first launch: AttributeError: "
    )


def test_kernels_of_steps_that_cannot_be_captured_are_not_compiled_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = []
    job = SimpleNamespace(is_done=False, close=lambda: ended.append(True))
    monkeypatch.setattr(early_kernels, "CompileJob", lambda *_, **__: job)
    monkeypatch.setattr(early_kernels, "record_launches", lambda: nullcontext({}))
    with (
        pytest.raises(ConfigError),
        early_kernels.EarlyKernels(torch.device("cuda"), *NOTHING),
    ):
        raise ConfigError("a step cannot be captured")
    assert ended == [True]
