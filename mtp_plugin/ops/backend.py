"""Which implementation of the ops a plugin runs on; chosen once, when its pieces are built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mtp_plugin.errors import ConfigError
from mtp_plugin.ops import acceptance, draft_inputs, draft_step, history, sampling


@dataclass(frozen=True)
class StepOps:
    """The ops of one MTP step; every implementation has the signatures of the references."""

    name: str
    accept_strict: Callable[..., Any]
    accept_relaxed: Callable[..., Any]
    mask_early_stops: Callable[..., Any]
    advance_history: Callable[..., Any]
    generation_window: Callable[..., Any]
    context_rows: Callable[..., Any]
    context_rows_with_history: Callable[..., Any]
    accepted_rows: Callable[..., Any]
    draft_argmax: Callable[..., Any]
    shift_ids: Callable[..., Any]
    shift_states: Callable[..., Any]


REFERENCE_OPS = StepOps(
    name="reference",
    accept_strict=acceptance.accept_strict,
    accept_relaxed=acceptance.accept_relaxed,
    mask_early_stops=sampling.mask_early_stops,
    advance_history=history.advance_history,
    generation_window=draft_inputs.generation_window,
    context_rows=draft_inputs.context_rows,
    context_rows_with_history=draft_inputs.context_rows_with_history,
    accepted_rows=draft_inputs.accepted_rows,
    draft_argmax=draft_step.draft_argmax,
    shift_ids=draft_step.shift_ids,
    shift_states=draft_step.shift_states,
)


def select_ops(kernels: str) -> StepOps:
    """The ops for a ``kernels`` option: ``auto`` or ``reference``.

    Raises:
        ConfigError: ``triton``, which is not built, or an unknown name.
    """
    if kernels in ("auto", "reference"):
        return REFERENCE_OPS
    if kernels == "triton":
        raise ConfigError("kernels: 'triton' is not built in this version; use auto or reference")
    raise ConfigError(f"kernels: expected auto, triton or reference, got {kernels!r}")
