"""Attention row by row over keys and values in plain lists, without pages, tiles or batches."""

from __future__ import annotations

import math

import torch

from tests.hosts.embedded.attention.case import Case
from tests.ops.on_device import DEVICE


def write(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Both pools after the step; the sentinel block is undefined."""
    keys, values = case.key_pool.clone(), case.value_pool.clone()
    for row, (sequence, position, alive) in enumerate(case.rows()):
        if alive:
            index = case.pool_row(sequence, position)
            keys[index], values[index] = case.key[row], case.value[row]
    return keys, values


def attend(case: Case, scaling: float | None = None) -> torch.Tensor:
    """[T, Hq, D] in double precision; padding rows are NaN and must not be compared."""
    scale = case.heads.width**-0.5 if scaling is None else scaling
    shared = case.heads.query // case.heads.kv
    keys, values = (pool.double().cpu() for pool in write(case))
    query = case.query.double().cpu()
    output = torch.full(query.shape, torch.nan, dtype=torch.float64)
    for row, (sequence, position, alive) in enumerate(case.rows()):
        if not alive:
            continue
        rows = [case.pool_row(sequence, p) for p in range(position + 1)]
        for head in range(case.heads.query):
            kv_head = head // shared
            scores = [
                scale * float(torch.dot(query[row, head], keys[index, kv_head])) for index in rows
            ]
            highest = max(scores)
            weights = [math.exp(score - highest) for score in scores]
            mean = torch.zeros(case.heads.width, dtype=torch.float64)
            for weight, index in zip(weights, rows, strict=True):
                mean += weight / sum(weights) * values[index, kv_head]
            output[row, head] = mean
    return output.to(DEVICE)
