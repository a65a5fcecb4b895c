"""Small random checkpoints, loaded once, and executors over them."""

from __future__ import annotations

import dataclasses
import random

import pytest

from mtp_plugin.executor import LLM
from mtp_plugin.models import load_model, write_random_checkpoint
from tests.executor.oracles import Oracle

VOCAB = 128


class Bed:
    """One checkpoint: its path, a model for oracles and one for the executor."""

    def __init__(self, path, num_mtp_layers: int) -> None:
        self.path = str(path)
        self.oracle_model = load_model(self.path, num_mtp_layers=num_mtp_layers)
        self.model = load_model(self.path, num_mtp_layers=num_mtp_layers)

    def llm(self, *, k: int = 3, vanilla: bool = False, mtp=None, tokenizer=None, **options) -> LLM:
        """An executor; ``k=0`` decodes without speculation."""
        llm_options = {
            name: options.pop(name) for name in ("chunk_policy", "kv_fill") if name in options
        }
        speculative = None
        if k > 0:
            speculative = {
                "decoding_type": "MTP",
                "max_draft_len": k,
                "use_mtp_vanilla": vanilla,
                "mtp": {"check_metadata": True, **(mtp or {})},
                **options.pop("speculative", {}),
            }
        cache = {"tokens_per_block": 4, "max_tokens": 1024}
        cache.update(options.pop("kv_cache_config", {}))
        config = {
            "model": self.path,
            "max_batch_size": 8,
            "max_num_tokens": 256,
            "max_seq_len": 128,
            "kv_cache_config": cache,
            "speculative_config": speculative,
            **options,
        }
        return LLM(config, model=self.model, tokenizer=tokenizer, **llm_options)


@pytest.fixture(scope="session")
def bed(tmp_path_factory) -> Bed:
    """Three MTP layers whose drafts are often, not always, right."""
    path = tmp_path_factory.mktemp("echo")
    write_random_checkpoint(
        path,
        "glm4_moe",
        num_mtp_layers=3,
        seed=3,
        echo_draft=True,
        residual_scale=0.4,
        vocab_size=VOCAB,
    )
    return Bed(path, 3)


@pytest.fixture(scope="session")
def mla_bed(tmp_path_factory) -> Bed:
    """Latent attention, three MTP layers."""
    path = tmp_path_factory.mktemp("mla")
    write_random_checkpoint(
        path,
        "deepseek_v3",
        num_mtp_layers=3,
        seed=4,
        echo_draft=True,
        residual_scale=0.4,
        vocab_size=VOCAB,
    )
    return Bed(path, 3)


@pytest.fixture
def prompts() -> list[list[int]]:
    """Mixed lengths, 1 to 33 tokens."""
    dice = random.Random(5)
    return [[dice.randrange(VOCAB) for _ in range(n)] for n in (1, 2, 3, 5, 9, 17, 33, 4)]


def wrap_worker(llm: LLM, wrap) -> None:
    """Put ``wrap(worker)`` in the worker's place."""
    engine = llm.executor.engine
    engine.pieces = dataclasses.replace(engine.pieces, worker=wrap(engine.pieces.worker))


def assert_drained(llm: LLM) -> None:
    """Every slot and block was given back."""
    assert llm.blocks.num_free_blocks == llm.blocks.num_blocks
    assert not llm.seq_slots.slots.slot_mapping
    manager = llm.pieces.manager
    if manager is not None:
        assert not manager.slot_manager.slot_mapping
        assert len(set(manager.slot_manager.free_slots)) == manager.slot_manager.max_num_requests


@pytest.fixture(scope="session")
def target(bed) -> Oracle:
    """The target of ``bed`` alone."""
    return Oracle(bed.oracle_model, 1, vanilla=False)
