"""A fake ``vllm`` package with the methods that the plugin wraps or needs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mtp_plugin.hosts.vllm.versions import NAMES, SIGNATURES

FURTHER = {
    "vllm.v1.engine.input_processor:InputProcessor._validate_params": ("supported_tasks",),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_model": ("dummy", "args", "kwargs"),
    "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.load_model": ("target_model",),
    "vllm.v1.worker.gpu.states:RequestState.add_request": ("num_computed_tokens", "max_tokens"),
}
"""Parameters of vLLM's own that the plugin hands on without reading them."""


def install(
    monkeypatch: pytest.MonkeyPatch,
    version: str = "0.32.0",
    signatures: Mapping[str, tuple[str, ...]] | None = None,
) -> dict[str, ModuleType]:
    """Put a ``vllm`` into ``sys.modules`` whose functions return their arguments.

    Args:
        signatures: ``module:Class.method`` -> parameters; default: those of vLLM 0.32, whose names
            are set if any of them are given.
    """
    signatures = signatures or SIGNATURES
    root = ModuleType("vllm")
    root.__version__ = version  # type: ignore[attr-defined]
    modules = {"vllm": root}
    for target, parameters in signatures.items():
        parameters = (*parameters, *FURTHER.get(target, ()))
        name, _, path = target.partition(":")
        module = _module(modules, name)
        owner_name, _, method = path.partition(".")
        if not method:
            setattr(module, path, make_function(path, parameters))
            continue
        if not hasattr(module, owner_name):
            setattr(module, owner_name, type(owner_name, (), {"__module__": name}))
        function = make_function(method, ("self", *parameters))
        setattr(getattr(module, owner_name), method, function)
    for target, names in NAMES.items() if SIGNATURES.keys() & signatures.keys() else ():
        name, _, owner_name = target.partition(":")
        owner: Any = _module(modules, name)
        if owner_name and not hasattr(owner, owner_name):
            setattr(owner, owner_name, type(owner_name, (), {"__module__": name}))
        owner = getattr(owner, owner_name) if owner_name else owner
        for attribute in names:
            setattr(owner, attribute, None)
    platforms = _module(modules, "vllm.platforms")
    platforms.current_platform = SimpleNamespace(  # type: ignore[attr-defined]
        is_cuda=lambda: False, is_cpu=lambda: True
    )
    _module(modules, "vllm.triton_utils").HAS_TRITON = True  # type: ignore[attr-defined]
    exceptions = _module(modules, "vllm.exceptions")
    exceptions.VLLMValidationError = type("VLLMValidationError", (Exception,), {})  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


def make_function(name: str, parameters: tuple[str, ...]) -> Any:
    """A function with these parameters, all but the first optional; it returns those after ``self``
    as a tuple, or None if it is a constructor."""
    optional = ", ".join([*parameters[:1], *(f"{p}=None" for p in parameters[1:])])
    given = [parameter for parameter in parameters if parameter != "self"]
    result = "None" if name == "__init__" else f"({''.join(p + ', ' for p in given)})"
    scope: dict[str, Any] = {}
    exec(f"def {name}({optional}):\n    return {result}", scope)
    return scope[name]


def _module(modules: dict[str, ModuleType], name: str) -> ModuleType:
    if name not in modules:
        modules[name] = ModuleType(name)
        parent, _, last = name.rpartition(".")
        setattr(_module(modules, parent), last, modules[name])
    return modules[name]


def make_config(given: Any = None, **changes: Any) -> SimpleNamespace:
    """A ``VllmConfig`` with MTP and the plugin on.

    Args:
        given: ``additional_config.mtp_plugin``; None: no options.
        changes: of attributes, ``part__name`` for those of a part.
    """
    config = SimpleNamespace(
        additional_config={"mtp_plugin": {} if given is None else given},
        use_v2_model_runner=True,
        model_config=SimpleNamespace(
            runner_type="generate",
            is_diffusion=False,
            get_vocab_size=lambda: 900,
            hf_config=SimpleNamespace(eos_token_id=0),
            hf_text_config=SimpleNamespace(eos_token_id=None),
            try_get_generation_config=dict,
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        speculative_config=SimpleNamespace(
            method="mtp",
            num_speculative_tokens=3,
            draft_sample_method="greedy",
            rejection_sample_method="standard",
            num_speculative_tokens_per_batch_size=None,
        ),
    )
    for path, value in changes.items():
        part, _, name = path.partition("__")
        if name:
            setattr(getattr(config, part), name, value)
        else:
            setattr(config, part, value)
    return config
