"""The line that says what an executor allocated beside the weights."""

from __future__ import annotations

from collections.abc import Callable

from mtp_plugin.executor.model_engine import ModelEngine


def memory_line(engine: ModelEngine, token_bytes: Callable[[], int]) -> str:
    """KV cache, MTP state and CUDA graphs, in MiB.

    Args:
        engine: with what it holds.
        token_bytes: bytes of a token's KV rows; called where the pools are not there yet.
    """
    blocks, pools, report = engine.blocks, engine.pools, engine.pieces.memory_report
    kv = pools.num_bytes()
    if kv == 0:  # pools come with a layer's first step
        kv = token_bytes() * pools.num_rows
    parts = [f"KV cache {_mib(kv)} ({blocks.num_blocks} blocks of {blocks.block_size} tokens)"]
    if report is not None:
        parts.append(report())
    if engine.captured is not None:
        parts.append(
            f"CUDA graphs {_mib(engine.captured.num_bytes)} ({len(engine.captured.shapes)})"
        )
    return f"memory: {', '.join(parts)}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
