"""A program with the verification method ``single`` of CONTRIBUTING.md, run in several hosts.

``python -m tests.speculative.verification.recipe_program CODE`` prints JSON; CODE: of the method in
the slots, or ``none``.
"""

# ruff: noqa: E402 (the table has the entry before other modules read it)

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mtp_plugin import verifications

CODE = None if sys.argv[1] == "none" else int(sys.argv[1])
verifications.METHODS["single"] = verifications.VerificationMethod(
    "at most one draft of a step", ("coupled", "greedy"), code=CODE
)

import torch

from mtp_plugin import LLM, SamplingParams
from mtp_plugin.ops.backend import Backend
from mtp_plugin.speculative.rows.request_options import method_problems
from mtp_plugin.speculative.verification import registry, rejection
from tests.hosts.vllm.rows import make_batch, make_ops, output_of, sample, verify, with_drafts
from tests.test_contributing import ROOT, VERIFICATION

names: dict[str, Any] = dict(vars(rejection))
exec(VERIFICATION, names)
registry.MODES = (*registry.MODES, names["SingleVerification"])
registry.BUILT = (*registry.BUILT, "single")
PROMPT = "class HTTPServer:\n"


def generate(mtp: dict[str, Any], *methods: str | None) -> list[list[Any]]:
    """Return token ids and histogram of output tokens per step, of a request with each method."""
    checkpoint = str(Path(ROOT) / "integration" / "tiny_model" / "checkpoint")
    config = {"decoding_type": "MTP", "max_draft_len": 3, "mtp": mtp}
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=3, verification=method)
        for method in methods
    ]
    with LLM(checkpoint, speculative_config=config) as llm:
        outputs = llm.generate([PROMPT] * len(params), params)
    completions = [output.outputs[0] for output in outputs]
    return [[each.token_ids, each.acceptance.histogram] for each in completions]


def in_vllm(backend: Backend) -> list[list[list[int]]]:
    """Return the output of a ragged step, all coupled, and with every second request single."""
    batch = make_batch(3, [4, 2, 4, 1])
    batch = with_drafts(batch, sample(make_ops(backend), batch).tolist(), 3)
    code = {index: {"verification": CODE} for index in batch.indices[::2]}
    return [output_of(verify(make_ops(backend, columns=each), batch)) for each in ({}, code)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if CODE is None:
        found["single"] = generate({"verification": "single"}, None)
        found["in vLLM"] = method_problems("name", "single", make_ops(Backend.TORCH).settings)
    else:
        found["coupled"] = generate({"verification": "coupled"}, None)
        both = {"verification": ["coupled", "single"]}
        found["both"] = generate(both, None, "coupled", "single")
        found["in vLLM"] = [in_vllm(backend) for backend in Backend]
    sys.stdout.write(json.dumps(found))
