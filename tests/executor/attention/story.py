"""Attention row by row over keys and values in plain lists, without pages, tiles or batches."""

from __future__ import annotations

import math

import torch

from tests.executor.attention.case import Case
from tests.speculative.ops.on_device import DEVICE


def write(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Both pools behind the step; what the sentinel block holds means nothing."""
    keys, values = case.key_pool.clone(), case.value_pool.clone()
    for row, (sequence, position, alive) in enumerate(case.rows()):
        if alive:
            place = case.pool_row(sequence, position)
            keys[place], values[place] = case.key[row], case.value[row]
    return keys, values


def attend(case: Case, scaling: float | None = None) -> torch.Tensor:
    """[T, Hq, D] in double precision; dead rows are NaN, nobody may compare them."""
    scale = case.heads.width**-0.5 if scaling is None else scaling
    shared = case.heads.query // case.heads.kv
    keys, values = (pool.double().cpu() for pool in write(case))
    query = case.query.double().cpu()
    output = torch.full(query.shape, torch.nan, dtype=torch.float64)
    for row, (sequence, position, alive) in enumerate(case.rows()):
        if not alive:
            continue
        places = [case.pool_row(sequence, p) for p in range(position + 1)]
        for head in range(case.heads.query):
            kv_head = head // shared
            scores = [
                scale * float(torch.dot(query[row, head], keys[place, kv_head])) for place in places
            ]
            highest = max(scores)
            weights = [math.exp(score - highest) for score in scores]
            mean = torch.zeros(case.heads.width, dtype=torch.float64)
            for weight, place in zip(weights, places, strict=True):
                mean += weight / sum(weights) * values[place, kv_head]
            output[row, head] = mean
    return output.to(DEVICE)
