"""Which implementation of the ops a plugin runs on; chosen once, when its pieces are built."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mtp_plugin.errors import ConfigError
from mtp_plugin.speculative.ops import (
    acceptance,
    draft,
    draft_inputs,
    first_pass,
    history,
    logits,
    synthetic_acceptance,
)


@dataclass(frozen=True)
class StepOps:
    """The ops of one MTP step; every implementation has the signatures of the references."""

    name: str
    accept_strict: Callable[..., Any]
    accept_relaxed: Callable[..., Any]
    forced_matches: Callable[..., Any]
    early_stops_masked: Callable[..., Any]
    advance_history: Callable[..., Any]
    vanilla_first_pass: Callable[..., Any]
    eagle_first_pass: Callable[..., Any]
    generation_window: Callable[..., Any]
    context_rows: Callable[..., Any]
    accepted_rows: Callable[..., Any]
    draft_argmax: Callable[..., Any]
    propose: Callable[..., Any]
    place_last_states: Callable[..., Any]
    local_top1: Callable[..., Any]
    merge_top1: Callable[..., Any]


REFERENCE_OPS = StepOps(
    name="reference",
    accept_strict=acceptance.accept_strict,
    accept_relaxed=acceptance.accept_relaxed,
    forced_matches=synthetic_acceptance.forced_matches,
    early_stops_masked=logits.early_stops_masked,
    advance_history=history.advance_history,
    vanilla_first_pass=first_pass.vanilla_first_pass,
    eagle_first_pass=first_pass.eagle_first_pass,
    generation_window=draft_inputs.generation_window,
    context_rows=draft_inputs.context_rows,
    accepted_rows=draft_inputs.accepted_rows,
    draft_argmax=draft.draft_argmax,
    propose=draft.propose,
    place_last_states=draft.place_last_states,
    local_top1=draft.local_top1,
    merge_top1=draft.merge_top1,
)


def triton_ops() -> StepOps:
    """The Triton kernels, with the references of the rare steps that have none.

    Raises:
        ConfigError: triton is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "kernels: 'triton' was asked for, but the package triton is not installed"
        )
    from mtp_plugin.speculative.ops.acceptance import launch as acceptance_launch
    from mtp_plugin.speculative.ops.draft import launch as draft_launch
    from mtp_plugin.speculative.ops.draft import states_launch
    from mtp_plugin.speculative.ops.draft_inputs import launch as draft_inputs_launch
    from mtp_plugin.speculative.ops.logits import launch as logits_launch
    from mtp_plugin.speculative.ops.synthetic_acceptance import (
        launch as synthetic_acceptance_launch,
    )

    return StepOps(
        name="triton",
        accept_strict=acceptance_launch.accept_strict,
        accept_relaxed=acceptance_launch.accept_relaxed,
        forced_matches=synthetic_acceptance_launch.forced_matches,
        early_stops_masked=logits_launch.early_stops_masked,
        advance_history=draft_inputs_launch.advance_history,
        vanilla_first_pass=draft_inputs_launch.vanilla_first_pass,
        eagle_first_pass=draft_inputs_launch.eagle_first_pass,
        generation_window=draft_inputs.generation_window,
        context_rows=draft_inputs.context_rows,
        accepted_rows=draft_inputs.accepted_rows,
        draft_argmax=draft_launch.draft_argmax,
        propose=draft_launch.propose,
        place_last_states=states_launch.place_last_states,
        local_top1=draft_launch.local_top1,
        merge_top1=draft_launch.merge_top1,
    )


def select_ops(kernels: str, device: torch.device | str | None = None) -> StepOps:
    """The ops for a ``kernels`` option.

    Args:
        kernels: ``triton``, ``reference``, or ``auto``: Triton where the device is a CUDA one and
            triton is installed, else the references.
        device: that the pieces run on; None: CUDA where present.

    Raises:
        ConfigError: an unknown name, or ``triton`` without the package or without a device.
    """
    if kernels == "reference":
        return REFERENCE_OPS
    if kernels == "triton":
        on_cpu = device is not None and torch.device(device).type == "cpu"
        if on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError(
                "kernels: 'triton' needs a CUDA device (a CPU runs them only with "
                "TRITON_INTERPRET=1)"
            )
        return triton_ops()
    if kernels != "auto":
        raise ConfigError(f"kernels: expected auto, triton or reference, got {kernels!r}")
    cuda = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    return triton_ops() if cuda and importlib.util.find_spec("triton") else REFERENCE_OPS
