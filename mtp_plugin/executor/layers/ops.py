"""Which implementation of the ops the fused layers run on; chosen once, when a model is fused."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mtp_plugin.errors import ConfigError
from mtp_plugin.executor.layers.mlp import reference as gating
from mtp_plugin.executor.layers.norm import reference as norms
from mtp_plugin.executor.layers.rotary import reference as rotary


@dataclass(frozen=True)
class ExpertOps:
    """The steps of a mixture of experts; see `mtp_plugin.executor.layers.experts.reference`."""

    block_rows_for: Callable[[int], int]
    router_logits: Callable[..., Any]
    assign: Callable[..., Any]
    gate_up: Callable[..., Any]
    down: Callable[..., Any]
    combine: Callable[..., Any]


@dataclass(frozen=True)
class LayerOps:
    """The ops of a decoder layer; every implementation has the signatures of the references."""

    name: str
    rms_norm: Callable[..., Any]
    add_rms_norm: Callable[..., Any]
    join_norms: Callable[..., Any]
    rotate: Callable[..., Any]
    silu_mul: Callable[..., Any]
    experts: ExpertOps | None
    """None: mixtures of experts run as transformers runs them."""


REFERENCE_OPS = LayerOps(
    name="reference",
    rms_norm=norms.rms_norm,
    add_rms_norm=norms.add_rms_norm,
    join_norms=norms.join_norms,
    rotate=rotary.rotate,
    silu_mul=gating.silu_mul,
    experts=None,
)


def triton_ops() -> LayerOps:
    """The Triton kernels.

    Raises:
        ConfigError: triton is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "kernels: 'triton' was asked for, but the package triton is not installed"
        )
    from mtp_plugin.executor.layers.experts import launch as experts_launch
    from mtp_plugin.executor.layers.mlp import launch as gating_launch
    from mtp_plugin.executor.layers.norm import launch as norms_launch
    from mtp_plugin.executor.layers.rotary import launch as rotary_launch

    return LayerOps(
        name="triton",
        rms_norm=norms_launch.rms_norm,
        add_rms_norm=norms_launch.add_rms_norm,
        join_norms=norms_launch.join_norms,
        rotate=rotary_launch.rotate,
        silu_mul=gating_launch.silu_mul,
        experts=ExpertOps(
            block_rows_for=experts_launch.block_rows_for,
            router_logits=experts_launch.router_logits,
            assign=experts_launch.assign,
            gate_up=experts_launch.gate_up,
            down=experts_launch.down,
            combine=experts_launch.combine,
        ),
    )


def select_layer_ops(kernels: str, device: torch.device | str) -> LayerOps:
    """The ops for a ``kernels`` option, which means what it means for the ops of a step.

    Args:
        kernels: ``triton``, ``reference``, or ``auto``: Triton on a CUDA device that has it, else
            the references.
        device: of the weights.

    Raises:
        ConfigError: an unknown name, or ``triton`` where it cannot run.
    """
    device = torch.device(device)
    if kernels == "auto":
        able = device.type == "cuda" and importlib.util.find_spec("triton") is not None
        kernels = "triton" if able else "reference"
    if kernels == "reference":
        return REFERENCE_OPS
    if kernels != "triton":
        raise ConfigError(f"kernels: expected auto, triton or reference, got {kernels!r}")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            "kernels: 'triton' needs a CUDA device (a CPU runs them only with "
            f"TRITON_INTERPRET=1), got {device}"
        )
    return triton_ops()
