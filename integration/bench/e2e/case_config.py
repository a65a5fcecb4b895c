"""The executor of a case: its config, and the cases that none can run."""

from __future__ import annotations

from typing import Any

from integration.bench.case import BenchmarkError
from integration.bench.e2e.batch import steady_tokens
from integration.bench.e2e.cases import VANILLA, E2ECase, E2EOptions, Synthetic
from integration.bench.e2e.request_kinds import verifications_of
from integration.bench.e2e.subject import Subject
from mtp_plugin.config import parse_config
from mtp_plugin.errors import expect
from mtp_plugin.hosts.embedded.resolved_config import resolve_max_seq_len
from mtp_plugin.speculative.drafting.draft_vocab import resolve_draft_vocab

TOKENS_PER_BLOCK = 32
PREFILL_TOKENS, CPU_PREFILL_TOKENS = 8192, 1024
"""Target rows of a step at most."""
LEAST_STEADY_STEPS = 3


def executor_config(
    subject: Subject, case: E2ECase, options: E2EOptions, synthetic: Synthetic | None
) -> dict[str, Any]:
    """A config with room for the whole batch at once."""
    length = options.input_tokens + options.output_tokens
    blocks = case.batch * -(-length // TOKENS_PER_BLOCK)
    on_device = subject.device.type == "cuda"
    prefill = PREFILL_TOKENS if on_device else CPU_PREFILL_TOKENS
    config: dict[str, Any] = {
        "model": subject.path if options.text else f"{subject.name}, ids only",
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
        verifications = verifications_of(options.kinds)
        if len(verifications) > 1:
            speculative["mtp"]["verification"] = verifications
        config["speculative_config"] = speculative
    return config


def check_case(
    subject: Subject, case: E2ECase, options: E2EOptions, synthetic: Synthetic | None
) -> None:
    """What the model's sizes say of a case.

    Raises:
        MTPPluginError: no executor can run it, or it ends before there is a step to time.
    """
    facts = subject.model.facts
    config = parse_config(executor_config(subject, case, options, synthetic))
    config = config.resolve(facts.num_mtp_layers)
    resolve_max_seq_len(config, facts.max_position_embeddings)
    resolve_draft_vocab(options.draft_vocab, facts.vocab_size)
    tokens, rows = options.output_tokens, case.k + 1
    short = LEAST_STEADY_STEPS - steady_tokens(tokens, rows)
    expect(
        short <= 0,
        BenchmarkError,
        f"--osl: expected at least {tokens + short} tokens, of which {LEAST_STEADY_STEPS} steps "
        f"only generate, got {tokens}",
    )
