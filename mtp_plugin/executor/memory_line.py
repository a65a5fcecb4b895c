"""The line that says what an executor allocated beside the weights."""

from __future__ import annotations

from mtp_plugin.executor.model_engine import ModelEngine


def memory_line(engine: ModelEngine) -> str:
    """What an engine holds for KV cache, MTP state and CUDA graphs, in MiB."""
    blocks, report = engine.blocks, engine.pieces.memory_report
    kv = _mib(engine.pools.num_bytes())
    parts = [f"KV cache {kv} ({blocks.num_blocks} blocks of {blocks.block_size} tokens)"]
    if report is not None:
        parts.append(report())
    if engine.captured is not None:
        parts.append(
            f"CUDA graphs {_mib(engine.captured.num_bytes)} ({len(engine.captured.shapes)})"
        )
    return f"memory: {', '.join(parts)}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
