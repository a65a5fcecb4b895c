"""The kernels that other processes compile while vLLM loads its model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mtp_plugin.hosts.vllm.options import VllmOptions
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.early_compile import CompileJob, request_launches
from mtp_plugin.speculative.rows.options import EngineSettings
from mtp_plugin.speculative.rows.request_slots import RequestSlots
from mtp_plugin.speculative.rows.row_ops import WARM_UP_ROWS, RowOps, StepRows

VOCAB_PADDING = 64
"""vLLM pads the rows of logits to a multiple of this many columns."""
NICENESS = 5

_of_worker: CompileJob | None = None


def of_worker() -> CompileJob | None:
    """Return what this process started last; a worker has one engine."""
    return _of_worker


def start(
    vllm_config: Any, settings: EngineSettings, capability: int, *, is_first_rank: bool
) -> None:
    """Start compiling for the logits of an engine, unprocessed and processed ones.

    The worker has not set its device yet: nothing here initialises a driver.
    """
    global _of_worker
    model, spec = vllm_config.model_config, vllm_config.speculative_config
    num_drafts = 0 if spec is None else spec.num_speculative_tokens
    most = vllm_config.scheduler_config.max_num_seqs * (num_drafts + 1)
    counts = tuple(rows for rows in WARM_UP_ROWS if rows <= most)
    dtypes = tuple(dict.fromkeys((str(model.dtype).removeprefix("torch."), "float32")))
    draft_vocab = None
    if (ids := settings.draft_ids) is not None:
        draft_vocab = len(ids), settings.most_draft_columns, not isinstance(ids, range)
    options = settings.options
    thinking = (options.thinking_begin_token, options.thinking_end_token)
    arguments = dtypes, counts, model.get_vocab_size(), num_drafts, draft_vocab, thinking
    request = request_launches(launch_kernels, *arguments, capability=capability)
    _of_worker = CompileJob([request], niceness=NICENESS, starts=is_first_rank)


def launch_kernels(
    dtypes: tuple[str, ...],
    counts: tuple[int, ...],
    vocab: int,
    num_drafts: int,
    draft_vocab: tuple[int, int, bool] | None,
    thinking: tuple[int | None, int | None],
) -> None:
    """Launch the kernels of `RowOps`, in a dry run without a GPU.

    Args:
        counts: of `WARM_UP_ROWS`.
        draft_vocab: number of ids that may be drafted, columns of their logits with padding, and
            whether the ids are listed.
        thinking: token ids that begin and end the thinking phase, by which kernels differ.
    """
    width, most = num_drafts + 1, max(counts)
    options = VllmOptions(thinking_begin_token=thinking[0], thinking_end_token=thinking[1])
    settings, device = EngineSettings(options, num_drafts), torch.device("cpu")
    ops = RowOps(RequestSlots(most, device, settings), settings, Backend.TRITON, vocab)
    padded = -(-vocab // VOCAB_PADDING) * VOCAB_PADDING
    # memory that nothing writes takes none
    memory = torch.from_numpy(np.zeros(most * width * padded, np.float32))
    numbers = torch.zeros(most * width, dtype=torch.int32)
    indices = positions = torch.zeros(most * width, dtype=torch.int64)
    num_drafted, num_columns, is_listed = draft_vocab or (0, 0, False)
    draft_ids = torch.arange(num_drafted, dtype=torch.int32) if is_listed else None
    for dtype in dtypes:
        all_logits = memory.view(getattr(torch, dtype))[: len(memory)].view(-1, padded)[:, :vocab]
        for rows in counts:
            logits = all_logits[: rows * width]
            ops.sample(logits[:rows], indices[:rows], positions[:rows])
            if num_drafted:
                drafted = memory.view(getattr(torch, dtype))[: rows * num_columns].view(rows, -1)
                drafted = drafted[:, :num_drafted]
                ops.sample(drafted, indices[:rows], positions[:rows], draft_ids)
            starts = torch.arange(0, rows * width + 1, width, dtype=torch.int32)
            uniform, ragged = rows * width, rows * width - 1
            for count in (uniform, ragged) if num_drafts else ():
                step = StepRows(
                    logits[:count],
                    drafts=numbers[:count],
                    positions=positions[:count],
                    row_indices=indices[:count],
                    offsets=numbers[:count],
                    cu_num_logits=starts,
                    indices=indices[:rows],
                    host_indices=np.zeros(rows, dtype=np.int32),
                    seq_lens=numbers[:rows],
                    prefill_lens=numbers[:rows],
                )
                ops.verify(step)
