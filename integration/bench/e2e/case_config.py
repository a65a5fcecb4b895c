"""The executor of a case."""

from __future__ import annotations

from typing import Any

from integration.bench.e2e.cases import KINDS, VANILLA, E2ECase, E2EOptions, Synthetic
from integration.bench.e2e.subject import Subject

TOKENS_PER_BLOCK = 32
PREFILL_TOKENS, CPU_PREFILL_TOKENS = 8192, 1024
"""Target rows of a step at most."""


def executor_config(
    subject: Subject, case: E2ECase, options: E2EOptions, synthetic: Synthetic | None
) -> dict[str, Any]:
    """A config with room for the whole batch at once."""
    length = options.isl + options.osl
    blocks = case.batch * -(-length // TOKENS_PER_BLOCK)
    on_device = subject.device.type == "cuda"
    prefill = PREFILL_TOKENS if on_device else CPU_PREFILL_TOKENS
    config: dict[str, Any] = {
        "model": f"{subject.name}, ids only",
        "device": subject.device.type,
        "max_batch_size": case.batch,
        "max_num_tokens": max(prefill, case.batch * (case.k + 1)),
        "max_seq_len": length,
        "kv_cache_config": {
            "tokens_per_block": TOKENS_PER_BLOCK,
            "max_tokens": blocks * TOKENS_PER_BLOCK,
        },
    }
    if on_device and options.graphs:
        # a batch that shrinks runs in the next larger graph; nothing is captured while it is timed
        config["cuda_graph_config"] = {"enable_padding": True, "capture": "all"}
    if not case.is_off:
        speculative: dict[str, Any] = {
            "decoding_type": "MTP",
            "max_draft_len": case.k,
            "use_mtp_vanilla": case.worker == VANILLA,
            "mtp": {"draft_vocab": options.draft_vocab},
        }
        if synthetic is not None:
            speculative["mtp"] |= {
                "verification": "synthetic",
                "synthetic_acceptance": list(synthetic.shares(case.k)),
                "synthetic_seed": synthetic.seed,
            }
        verifications = list(
            dict.fromkeys(["coupled", *(KINDS[name].verification for name in options.kinds)])
        )
        if len(verifications) > 1:
            speculative["mtp"]["verification"] = verifications
        config["speculative_config"] = speculative
    return config
