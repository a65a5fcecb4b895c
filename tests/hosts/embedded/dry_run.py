"""Collect the kernels of an executor's steps, for a Hopper GPU that is absent, and print them.

Usage: ``python -m tests.hosts.embedded.dry_run``, without the interpreter.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from unittest.mock import patch

import torch
from triton.runtime.driver import driver

from integration.random_models import random_model
from mtp_plugin.config import parse_config
from mtp_plugin.hosts.embedded import build, early_kernels, model_engine
from mtp_plugin.hosts.embedded.attention import triton as attention
from mtp_plugin.hosts.embedded.cuda_graphs import CapturedSteps, generation_shapes
from mtp_plugin.hosts.embedded.models import fuse
from mtp_plugin.hosts.embedded.prompt_steps import prompt_shapes
from mtp_plugin.ops import launching, programmatic_launch
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.early_compile import record_launches
from tests.compiled.compiler import AbsentDriver

CONFIG = {
    "model": "random",
    "device": "cpu",
    "dtype": "bfloat16",
    "attn_backend": "triton",
    "max_batch_size": 4,
    "max_seq_len": 200,
    "kv_cache_config": {"max_tokens": 1024},
    "speculative_config": {
        "decoding_type": "MTP",
        "max_draft_len": 3,
        "mtp": {"check_metadata": True},  # what it would compare has no values in a dry run
    },
}


class NotCaptured(CapturedSteps):
    """Its steps are launched in dry runs alone."""

    def capture(self, shape) -> None:
        pass


class Job:
    """Records what would be compiled."""

    is_done = True
    requested: list[list[str]] = []  # noqa: RUF012
    waited_for: list[list[str]] = []  # noqa: RUF012

    def __init__(self, requests=(), *, urgent=(), niceness=0) -> None:
        if requests:
            assert bool(urgent) == (niceness == 0) == (not self.requested)
            self.requested.append([request.name.split()[0] for request in requests])

    def wait_for(self, requests) -> None:
        self.waited_for.append([request.name.split()[0] for request in requests])

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass


def probe_dry(write_one_token):
    """The probe's launches would need the GPU."""
    with record_launches():
        return PROBE_POOLS(write_one_token)


PROBE_POOLS = build.probe_pools


def main() -> None:
    driver.set_active(AbsentDriver(90))
    with ExitStack() as patches:
        for owner, name, replacement in (
            (Backend, "of", classmethod(lambda *_: Backend.TRITON)),
            (attention.TritonBackend, "refusal", lambda *_: None),
            (launching, "expect", lambda *_: None),
            (programmatic_launch, "_supports_pdl", lambda _: True),
            (build, "probe_pools", probe_dry),
            (model_engine, "CapturedSteps", NotCaptured),
            (early_kernels, "CompileJob", Job),
            (early_kernels, "launches_kernels", lambda _: True),
        ):
            patches.enter_context(patch.object(owner, name, replacement))
        model = fuse(random_model("glm4_moe", dtype=torch.bfloat16))
        built = build.build_executor(parse_config(CONFIG), model=model)
        engine = built.executor.engine
        shapes = generation_shapes([4], built.pieces.draft_lens, padded=True)
        shapes += prompt_shapes((64,), shapes)
        before = [pool.clone() for pool in built.pools.tensors()]
        engine.capture(shapes, lambda _: None, lazy=True)
        after = built.pools.tensors()
        is_written = any(map(lambda a, b: not torch.equal(a, b), before, after))
    sys.stdout.write(json.dumps([*Job.requested, *Job.waited_for, is_written]))


if __name__ == "__main__":
    main()
