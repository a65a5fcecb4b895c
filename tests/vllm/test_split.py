"""Prefill in one engine and decode in another: the output is that of one engine."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import CHECKPOINT, JOBS, PLUGIN, PROMPTS, ROOT, job, request

pytest.importorskip("vllm")
from tokenizers import Tokenizer

BLOCK = 32
LENGTHS = [BLOCK * blocks + more for blocks in (1, 2, 3, 4) for more in (-1, 0, 1, 2)]
"""Prompt lengths around the edges of KV blocks."""
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
)
NIXL = find_spec("nixl")
_NIXL_FOLDER = [str(Path(NIXL.origin).parents[1])] if NIXL and NIXL.origin else []
NIXL_ENVIRONMENT = {
    "UCX_TLS": "tcp,self",
    "PYTHONPATH": os.pathsep.join(("tests/vllm/shim", ".", *_NIXL_FOLDER)),
}


def split_requests() -> list[dict[str, Any]]:
    """Return a request of 40 tokens for each length; each option has each length modulo 32."""
    tokenizer = Tokenizer.from_file(str(ROOT / CHECKPOINT / "tokenizer.json"))
    ids = tokenizer.encode("".join(PROMPTS)).ids
    return [
        request(ids[7 * n : 7 * n + length], 40, seed=n, **OPTIONS[(n + n // 4) % 4])
        for n, length in enumerate(LENGTHS)
    ]


def split_job(connector: str, num_drafts: int, *, on_both: bool = True) -> dict[str, Any]:
    """Return two engines; ``on_both``: the first one has the plugin, too."""
    env = NIXL_ENVIRONMENT if connector == "NixlConnector" else {}
    first, second = (
        job(
            num_drafts,
            {"split": split_requests()},
            plugin=plugin,
            env=env,
            block_size=BLOCK,
            kv_transfer_config={
                "kv_connector": connector,
                "kv_role": role,
                "kv_buffer_device": "cpu",
            },
        )
        for plugin, role in ((PLUGIN if on_both else None, "kv_producer"), (PLUGIN, "kv_consumer"))
    )
    return second | {"prefill": first["engine"], "module": "tests.vllm.run_split"}


WHOLE = "whole_k0"
SPLIT = {
    "files_k0": split_job("ExampleConnector", 0),
    "files_k3": split_job("ExampleConnector", 3),
    "files_k3_decode_alone": split_job("ExampleConnector", 3, on_both=False),
    "nixl_k0": split_job("NixlConnector", 0),
    "nixl_k3": split_job("NixlConnector", 3),
}
JOBS |= {WHOLE: job(0, {"split": split_requests()}, block_size=BLOCK), **SPLIT}


def _of(name: str) -> Any:
    if name.startswith("nixl") and NIXL is None:
        why = "NixlConnector: pip install --no-deps nixl nixl-cu13, 60 MB"
        return pytest.param(name, marks=pytest.mark.skip(why))
    return pytest.param(name, marks=pytest.mark.engines(WHOLE, name))


@pytest.mark.parametrize("name", [*map(_of, SPLIT)])
def test_prefill_in_another_engine_does_not_change_the_output(results, report, name):
    expected, result = results(WHOLE)["split"], results(name)
    found, counters = result["split"]["outputs"], result["split"]["counters"]
    same = [a["tokens"] == b["tokens"] for a, b in zip(found, expected["outputs"], strict=True)]
    loaded = counters["external_prefix_cache_hits"]
    line = f"{name}: {sum(same)} of {len(same)} equal, {loaded} of {sum(LENGTHS)} tokens loaded"
    if drafts := counters.get("spec_decode_num_drafts"):
        accepted = counters["spec_decode_num_accepted_tokens"]
        line += f", acceptance length {1 + accepted / drafts:.2f}"
    report(line)
    assert all(len(each["tokens"]) == 40 for each in found)
    assert all(same)
    assert loaded > sum(LENGTHS) / 2
