"""The reduced head of two ranks, each a process, over gloo."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import distributed, nn
from torch.multiprocessing.spawn import spawn

from mtp_plugin.hosts.vllm.draft_head import CopiedDraftHead

VOCAB, PADDED, RANKS = 14, 8, 2
"""Ids; rows of each rank, of which the second one has two of padding."""


LISTS: tuple[Sequence[int], ...] = (range(7), (1, 3, 12), (13,), range(VOCAB))


def main() -> None:
    """Run both ranks; raises if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (str(Path(folder, "store")),), RANKS)


def run_rank(rank: int, store: str) -> None:
    """Check every list as one of the ranks."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS
    )
    for ids in LISTS:
        check(rank, list(ids))
    distributed.destroy_process_group()


def check(rank: int, ids: list[int]) -> None:
    """Compare the logits of all ranks with the listed columns, twice with new weights between."""
    head = nn.Module()
    first = rank * PADDED
    head.shard_indices = SimpleNamespace(
        org_vocab_start_index=first, org_vocab_end_index=min(first + PADDED, VOCAB)
    )
    head.tp_size, head.quant_method = RANKS, None
    head.weight = nn.Parameter(torch.full((PADDED, 4), torch.nan), requires_grad=False)
    group = SimpleNamespace(
        rank_in_group=rank, ranks=list(range(RANKS)), device_group=distributed.group.WORLD
    )
    copied = None
    for seed in range(2):
        rng = torch.Generator().manual_seed(seed)
        whole, x = torch.randn(VOCAB, 4, generator=rng), torch.randn(3, 4, generator=rng)
        own = whole[first : first + PADDED]
        head.weight[: len(own)] = own
        if copied is None:
            copied = CopiedDraftHead(head, ids, group)
        else:
            copied.refresh()
        parts = [torch.empty(3, len(copied.weight)) for _ in range(RANKS)]
        distributed.all_gather(parts, x @ copied.weight.T)
        logits = torch.cat(parts, 1)
        torch.testing.assert_close(logits[:, : len(ids)], x @ whole[ids].T)
        assert not logits[:, len(ids) :].any()
