"""Install the plugin's functions, and optionally its sampling, in Megatron-Core's controller."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from mtp_plugin.errors import HostError, expect
from mtp_plugin.hosts.megatron import kv_rewind, next_forward, token_verify
from mtp_plugin.hosts.megatron.sampling import sampling_class
from mtp_plugin.ops import state_rollback
from mtp_plugin.ops.backend import Backend

CONTROLLER = "megatron.core.inference.text_generation_controllers.text_generation_controller"
"""Module whose global names are replaced."""

FUNCTIONS: dict[str, tuple[Callable[..., Any], str | None]] = {
    # its tensors are on the host, as in Megatron, so it runs in torch
    "rewind_kv_cache": (kv_rewind.rewind_kv_cache, None),
    "verify_speculative_tokens": (token_verify.verify_speculative_tokens, "input_tokens"),
    "prepare_next_forward_pass": (next_forward.prepare_next_forward_pass, "output_tokens"),
    "mamba_state_selective_copy": (
        state_rollback.mamba_state_selective_copy,
        "intermediate_states",
    ),
}
"""Our function for each of Megatron's, and the argument whose device selects the kernels."""

SAMPLING_CLASSES = ("TorchSampling", "FlashInferSampling")
SAMPLING_METHODS = {
    "sample_kernel": (
        "logits n context no_top_k no_top_p gather_indices token_to_request_index output eager "
        "cache_key"
    ),
    "sample_speculative": (
        "required_logits num_decode num_prefill num_speculative_tokens context gather_indices "
        "eager cache_key"
    ),
}

_logger = logging.getLogger("mtp_plugin")


@dataclass(frozen=True)
class Status:
    """State of the plugin in this process."""

    installed: bool
    version: str | None = None
    """``megatron.core.__version__``, for information only."""
    replaced: tuple[str, ...] = ()
    """Names of the controller's module that refer to our functions and classes."""
    sampling: bool = False
    """Whether controllers that are built from now on sample with the plugin."""

    def __str__(self) -> str:
        if not self.installed:
            return "mtp_plugin is not installed in Megatron-Core"
        return (
            f"mtp_plugin is installed in Megatron-Core {self.version or '(no version)'}: "
            f"{', '.join(self.replaced)}"
        )


_originals: dict[str, Any] = {}
_ours: dict[str, Any] = {}


def install(*, sampling: bool = False, kernels: str = "auto") -> Status:
    """Replace four functions of Megatron's text generation controller in this process.

    Controllers that exist already use them too.

    Args:
        sampling: also replace the sampling classes, so that controllers that are built from now on
            sample with the key (``inference_sampling_seed``, request id, token index): the output
            of a request depends on neither the batch nor the number of speculative tokens.
        kernels: ``auto`` (Triton for CUDA tensors), ``triton`` or ``reference`` (torch).

    Raises:
        HostError: Megatron-Core cannot be imported, its controller does not have the expected names
            and parameters, or the plugin is installed already; nothing is changed then.
        ConfigError: an unknown value of ``kernels``.
    """
    expect(not _originals, HostError, "install(): mtp_plugin is installed in this process already")
    Backend.of(kernels, None if kernels == "triton" else "cpu")
    try:
        module = importlib.import_module(CONTROLLER)
    except ImportError as error:
        raise HostError(f"install(): {CONTROLLER} cannot be imported: {error}") from error
    problems = _function_problems(module)
    if sampling:
        problems += _sampling_problems(module)
    if problems:
        raise HostError(
            f"install(): {CONTROLLER} is not supported, nothing was changed: {'; '.join(problems)}"
        )
    ours = {
        name: _with_kernels(function, device_of, kernels)
        for name, (function, device_of) in FUNCTIONS.items()
    }
    if sampling:
        for name in SAMPLING_CLASSES:
            ours[name] = sampling_class(getattr(module, name), kernels)
    for name, new in ours.items():
        _originals[name] = getattr(module, name)
        _ours[name] = new
        setattr(module, name, new)
    current = status()
    _logger.info("%s", current)
    return current


def uninstall() -> None:
    """Restore Megatron's own functions and classes.

    Controllers that were built with ``sampling=True`` keep sampling with the plugin.

    Raises:
        HostError: the plugin is not installed, or a name was replaced again by other code; nothing
            is changed then.
    """
    expect(bool(_originals), HostError, "uninstall(): mtp_plugin is not installed in this process")
    module = importlib.import_module(CONTROLLER)
    others = [name for name, new in _ours.items() if getattr(module, name, None) is not new]
    expect(
        not others,
        HostError,
        f"uninstall(): other code replaced {', '.join(others)} of {CONTROLLER} after install(); "
        f"restore them first",
    )
    for name, original in _originals.items():
        setattr(module, name, original)
    _originals.clear()
    _ours.clear()


def status() -> Status:
    """Return the state of the plugin in this process."""
    if not _originals:
        return Status(installed=False)
    version = getattr(importlib.import_module("megatron.core"), "__version__", None)
    return Status(
        installed=True,
        version=version,
        replaced=tuple(_originals),
        sampling=SAMPLING_CLASSES[0] in _originals,
    )


def _with_kernels(
    function: Callable[..., Any], device_of: str | None, kernels: str
) -> Callable[..., Any]:
    if device_of is None:
        return functools.partial(function, backend=Backend.TORCH)
    position = list(inspect.signature(function).parameters).index(device_of)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        tensor = arguments[position] if position < len(arguments) else named.get(device_of)
        device = tensor.device if isinstance(tensor, torch.Tensor) else torch.device("cpu")
        return function(*arguments, **named, backend=Backend.of(kernels, device))

    return call


def _function_problems(module: ModuleType) -> list[str]:
    problems = []
    for name, (function, _) in FUNCTIONS.items():
        own = [
            each.name
            for each in inspect.signature(function).parameters.values()
            if each.name not in ("out", "backend")
        ]
        problems += _parameter_problems(module, name, own)
    return problems


def _sampling_problems(module: ModuleType) -> list[str]:
    problems = []
    for name in SAMPLING_CLASSES:
        found = getattr(module, name, None)
        if not isinstance(found, type):
            problems.append(f"{name}: expected a class, got {type(found).__name__}")
            continue
        for method, parameters in SAMPLING_METHODS.items():
            problems += _parameter_problems(found, method, ["self", *parameters.split()])
    return problems


def _parameter_problems(owner: Any, name: str, expected: list[str]) -> list[str]:
    found = getattr(owner, name, None)
    where = name if isinstance(owner, ModuleType) else f"{owner.__name__}.{name}"
    if not callable(found):
        kind = "no such name" if found is None else type(found).__name__
        return [f"{where}: expected a function, got {kind}"]
    try:
        parameters = list(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return [f"{where}: expected a function with a signature"]
    if parameters == expected:
        return []
    return [f"{where}: expected the parameters {expected}, got {parameters}"]
