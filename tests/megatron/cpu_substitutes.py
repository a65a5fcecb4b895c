"""Substitutes for what Megatron's dynamic engine needs of CUDA, so that it runs on the CPU.

Replaced: names of ``torch.cuda``, pinned memory, the package ``flash_attn`` and one Triton kernel,
for which Megatron has a torch version. Everything else is Megatron's own code.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")


class Event:
    def __init__(self, *_args: Any, **_named: Any) -> None:
        self.time = 0.0

    def record(self, *_args: Any, **_named: Any) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None: ...

    def wait(self, *_args: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.time - self.time)


class Stream:
    def __init__(self, *_args: Any, **_named: Any) -> None: ...

    def wait_stream(self, *_args: Any) -> None: ...

    def wait_event(self, *_args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


def replace_cuda() -> None:
    """Replace names of ``torch`` and ``torch.cuda`` for the rest of the process."""
    properties = types.SimpleNamespace(
        total_memory=16 << 30, major=9, minor=0, multi_processor_count=132, name="CPU"
    )
    for name, value in {
        "current_device": lambda: CPU,
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda *_: Stream(),
        "default_stream": lambda *_: Stream(),
        "stream": lambda *_: contextlib.nullcontext(),
        "synchronize": lambda *_, **__: None,
        "set_device": lambda *_: None,
        "mem_get_info": lambda *_: (8 << 30, 16 << 30),
        "memory_stats": lambda *_, **__: {},
        "memory_allocated": lambda *_, **__: 0,
        "memory_reserved": lambda *_, **__: 0,
        "max_memory_allocated": lambda *_, **__: 0,
        "empty_cache": lambda: None,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (9, 0),
    }.items():
        setattr(torch.cuda, name, value)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_, **__: None
    for name in (
        *("empty", "zeros", "ones", "full", "tensor", "arange"),
        *("empty_like", "zeros_like", "full_like"),
    ):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.Tensor.cuda = lambda self, *_, **__: self
    flash_attn = types.ModuleType("flash_attn")
    flash_attn.__version__ = "2.8.3"
    flash_attn.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    flash_attn.flash_attn_varlen_func = flash_attn_varlen_func
    flash_attn.flash_attn_with_kvcache = flash_attn_with_kvcache
    flash_attn.flash_attn_func = None
    sys.modules["flash_attn"] = flash_attn


def replace_kernels_of_megatron() -> None:
    """Select Megatron's torch version of a kernel; skip the CUDA state of its random numbers."""
    from megatron.core.inference.contexts import dynamic_context
    from megatron.core.tensor_parallel import random

    dynamic_context.triton_append_key_value_cache = None
    random.CudaRNGStatesTracker.fork = lambda _self, _name=None: contextlib.nullcontext()


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        named.pop("pin_memory", None)
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        return function(*args, **named)

    return call


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Causal attention of q [S, heads, D], whose last row is the last of k [T, KV heads, D]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    queries, keys = q.shape[0], k.shape[0]
    weights = torch.einsum("shd,thd->hst", q.float(), k.float()) * scale
    later = torch.arange(keys)[None] > (torch.arange(queries)[:, None] + keys - queries)
    weights = weights.masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("hst,thd->shd", weights, v.float()).to(q.dtype)


def _pages(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    return cache[table.long()].reshape(-1, *cache.shape[2:])[:length]


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    _max_q: int,
    _max_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,  # noqa: ARG001 - the interface of flash_attn
    window_size: tuple[int, int] = (-1, -1),  # noqa: ARG001
    block_table: torch.Tensor | None = None,
    return_attn_probs: bool = False,  # noqa: ARG001
) -> torch.Tensor:
    out = torch.zeros_like(q)
    for i in range(len(cu_q) - 1):
        start, end, length = int(cu_q[i]), int(cu_q[i + 1]), int(cu_k[i + 1] - cu_k[i])
        if end > start:
            keys, values = (_pages(cache, block_table[i], length) for cache in (k, v))
            out[start:end] = _attention(q[start:end], keys, values, softmax_scale)
    return out


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,  # noqa: ARG001
    window_size: tuple[int, int] = (-1, -1),  # noqa: ARG001
    block_table: torch.Tensor | None = None,
    num_splits: int = 0,  # noqa: ARG001
    **_named: Any,
) -> torch.Tensor:
    out = torch.zeros_like(q)
    for i in range(q.shape[0]):
        if length := int(cache_seqlens[i]):
            keys, values = (_pages(cache, block_table[i], length) for cache in (k_cache, v_cache))
            out[i] = _attention(q[i], keys, values, softmax_scale)
    return out
