"""All draft passes of a step after the first in one CUDA graph, for vLLM before 0.32.

vLLM 0.24 to 0.26 capture one pass, and between two replays compute slot mappings and attention
metadata on the host. vLLM 0.32 captures the loop by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BACKENDS = frozenset(("FLASH_ATTN", "TRITON_ATTN"))
"""Attention backends whose metadata is built by launches alone, without values of the host."""


def can_capture(speculator: Any) -> bool:
    """Whether every layer of the draft model has a backend whose metadata a graph can update."""
    groups = [group for groups in speculator.attn_groups for group in groups]
    return (
        speculator.num_speculative_steps > 1
        and speculator.advance_draft_positions
        and getattr(speculator, "eplb_state", None) is None  # notified by the host before each pass
        and all(group.backend.get_name() in BACKENDS for group in groups)
    )


def run_passes(
    speculator: Any,
    run_pass: Callable[..., None],
    slot_mappings_by_layer: Callable[[torch.Tensor, Any], dict[str, torch.Tensor]],
    num_requests: int,
    num_tokens: int,
    _metadata: Any,
    _mappings: Any,
    num_tokens_across_dp: torch.Tensor | None,
    mode: Any,
) -> None:
    """Run the passes 1 to K - 1, each with metadata for the lengths that the last one left.

    Rows after the last request have no query tokens: their slots are padding.

    Args:
        run_pass: ``_generate_draft``, whose arguments follow.
    """
    buffers, tables = speculator.input_buffers, speculator.block_tables
    speculator.draft_max_seq_len = speculator.max_model_len
    for step in range(1, speculator.num_speculative_steps):
        speculator.current_draft_step.fill_(step)
        slots = tables.compute_slot_mappings(
            speculator.idx_mapping[:num_requests],
            buffers.query_start_loc[: num_requests + 1],
            buffers.positions[:num_requests],
            num_tokens,
        )
        metadata = speculator._build_draft_attn_metadata(
            num_reqs=num_requests, num_reqs_padded=num_requests, num_tokens_padded=num_tokens
        )
        mappings = slot_mappings_by_layer(slots, speculator.kv_cache_config)
        run_pass(num_requests, num_tokens, metadata, mappings, num_tokens_across_dp, mode)
