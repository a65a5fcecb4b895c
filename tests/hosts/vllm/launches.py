"""Print the kernels that are compiled early and those of steps, for a Hopper GPU that is absent.

Usage: ``python -m tests.hosts.vllm.launches``, without the interpreter.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch

from mtp_plugin.hosts.vllm import early_kernels
from mtp_plugin.hosts.vllm.options import VllmOptions
from mtp_plugin.ops.backend import Backend
from mtp_plugin.speculative.rows.options import EngineSettings
from mtp_plugin.speculative.rows.request_slots import RequestSlots
from mtp_plugin.speculative.rows.row_ops import DraftRows, RowOps, StepRows
from tests.hosts.launches import compare
from tests.hosts.vllm.fake_vllm import make_config

THINKING = {"thinking_begin_token": 3, "thinking_end_token": 4, "relaxed_topk": 5}
ENGINES: dict[str, tuple[int, int, dict[str, int], Sequence[int] | None]] = {
    "without drafts": (2048, 0, {}, None),
    "drafts": (2048, 3, THINKING, [*range(0, 2048, 3)]),
    "an odd vocabulary": (1999, 1, THINKING | {"thinking_end_token": 1}, range(700)),
}
"""Vocabulary, K, options and draft vocabulary."""
SLOTS = 70


def compile_early(settings: EngineSettings, vocab: int) -> None:
    """Launch what the process of a worker's job launches."""
    config = make_config(
        model_config__dtype=torch.bfloat16,
        model_config__get_vocab_size=lambda: vocab,
        speculative_config__num_speculative_tokens=settings.num_drafts,
        scheduler_config=SimpleNamespace(max_num_seqs=SLOTS),
    )
    with patch.object(early_kernels, "CompileJob") as job:
        early_kernels.start(config, settings, 90, is_first_rank=True)
    ((request,),) = job.call_args.args
    function, arguments, _ = pickle.loads(request.content)
    function(*arguments)


def run_steps(settings: EngineSettings, vocab: int) -> None:
    """Launch what batches of all sizes need, with unprocessed and with processed logits."""
    slots = RequestSlots(SLOTS, torch.device("cpu"), settings)
    ops = RowOps(slots, settings, Backend.TRITON, vocab)
    width, padded = settings.num_drafts + 1, -(-vocab // 64) * 64
    columns = padded if settings.draft_ids is None else settings.most_draft_columns
    for count in range(1, SLOTS + 1):
        indices, positions = torch.arange(count), torch.randint(1, 99, (count,))
        if settings.num_drafts:
            logits = torch.zeros(count, columns, dtype=torch.bfloat16)[:, :vocab]
            ops.sample_drafts(DraftRows(logits, indices, positions, 0, torch.tensor(1)))
        for dtype in (torch.bfloat16, torch.float32):
            logits = torch.zeros(count * width, padded, dtype=dtype)[:, :vocab]
            tokens = ops.sample(logits[:count], indices, positions)
            ops.follow_phase(tokens, indices, tokens >= 0)
            for rows in (count * width, count * width - 1) if settings.num_drafts else ():
                of_rows = torch.zeros(rows, dtype=torch.int32)  # vLLM's dtypes
                step = StepRows(
                    logits[:rows],
                    drafts=of_rows,
                    positions=of_rows.to(torch.int64),
                    row_indices=of_rows.to(torch.int64),
                    offsets=of_rows,
                    cu_num_logits=torch.arange(count + 1, dtype=torch.int32) * width,
                    indices=indices,
                    host_indices=np.arange(count),
                    seq_lens=indices.to(torch.int32),
                    prefill_lens=torch.zeros(SLOTS, dtype=torch.int32),
                )
                ops.verify(step)


def main() -> None:
    report = {}
    for name, (vocab, drafts, options, draft_ids) in ENGINES.items():
        settings = EngineSettings(VllmOptions(**options), drafts, draft_ids=draft_ids)
        report[name] = compare(*(partial(f, settings, vocab) for f in (compile_early, run_steps)))
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
