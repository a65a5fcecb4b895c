"""Print the kernels of the warm-up and of steps after it, for a Hopper GPU that is absent.

Usage: ``python -m tests.hosts.sglang.launches``, without the interpreter.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from types import SimpleNamespace

import torch

from mtp_plugin.hosts.sglang.engine import Engine
from mtp_plugin.hosts.sglang.options import SglangOptions
from mtp_plugin.ops.backend import Backend
from mtp_plugin.speculative.rows.options import EngineSettings
from tests.hosts.launches import compare

THINKING = {"thinking_begin_token": 3, "thinking_end_token": 4, "relaxed_topk": 5}
ENGINES = {
    "without drafts": (2048, 0, {}, None),
    "drafts": (2048, 3, {}, None),
    "relaxed acceptance, a token map": (2048, 3, THINKING, torch.arange(0, 2048, 3)),
    "an odd vocabulary": (1999, 1, THINKING, None),
}
"""Vocabulary, K, options and token map."""
SLOTS = 70


def make_engine(vocab: int, drafts: int, options: dict, token_map: torch.Tensor | None) -> Engine:
    engine = Engine(EngineSettings(SglangOptions(**options), drafts, drafter="eagle"))
    pool = SimpleNamespace(req_to_token=torch.zeros(SLOTS + 1, 4), free_slots=())
    config = SimpleNamespace(vocab_size=vocab)
    engine.attach(SimpleNamespace(model_config=config, req_to_token_pool=pool))
    engine.drafts_from(SimpleNamespace(hot_token_id=token_map))
    engine._ops.backend = engine._penalties._backend = Backend.TRITON
    return engine


def run_steps(engine: Engine, vocab: int, drafts: int, token_map: torch.Tensor | None) -> None:
    """Launch what batches of all sizes need."""
    columns = vocab if token_map is None else len(token_map)
    engine._penalized = {1: "r"}
    for slot in range(1, SLOTS + 1):
        engine._penalties.stage(slot, [1, 2], ())
    engine._penalties.apply()
    for count in range(1, SLOTS + 1):
        slots, positions = torch.arange(1, count + 1), torch.randint(1, 99, (count,))
        tokens = engine._ops.sample(torch.zeros(count, vocab), slots, positions)
        mode = SimpleNamespace(is_decode=lambda: True)
        step = SimpleNamespace(
            req_pool_indices=slots,
            seq_lens=positions,
            positions=positions,
            rids=["r"],
            forward_mode=mode,
        )
        with engine.sampling(SimpleNamespace(next_token_logits=torch.zeros(count, vocab)), step):
            pass
        engine.follow(tokens, step)
        if drafts:
            rows = count * (drafts + 1)
            drafted = torch.zeros(rows, dtype=torch.int64)
            for column in (0, 1):
                engine._drafts(torch.zeros(count, columns), slots, positions, column)
            logits = torch.zeros(rows, vocab)
            engine._penalize(logits, drafted, positions, slots)
            accepted = engine._ops.verify_uniform(logits, drafted, positions, slots, slots.numpy())
            engine._penalties.count(accepted.tokens, accepted.num_accepted.clone(), slots)


def main() -> None:
    report = {}
    for name, (vocab, drafts, options, token_map) in ENGINES.items():
        engine = make_engine(vocab, drafts, options, token_map)
        steps = partial(run_steps, engine, vocab, drafts, token_map)
        report[name] = compare(engine.launch_kernels, steps)
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
