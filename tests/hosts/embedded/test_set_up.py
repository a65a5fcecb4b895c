"""What an executor refuses when it is built, and that the message says where and why."""

from __future__ import annotations

import re

import pytest
import torch

from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.errors import ConfigError, MetadataError
from mtp_plugin.hosts.embedded import LLM, SamplingParams, build
from mtp_plugin.plugin import MTPPlugin, register_plugin, unregister_plugin
from mtp_plugin.speculative.drafting.attention_loop import draft_loop
from mtp_plugin.speculative.state import SlotStateManager
from tests.speculative.plain_host import KVAttention


class Renamed(MTPPlugin):
    """MTP under another name, whose K the config does not know."""

    decoding_type = "RENAMED"

    def plan(self, config, num_mtp_layers):  # noqa: ARG002
        return super().plan(MTPDecodingConfig(max_draft_len=3), num_mtp_layers)


def test_the_budget_holds_a_full_batch_of_any_plugin(harness):
    register_plugin(Renamed())
    try:
        with pytest.raises(ConfigError, match=r"times the 4 rows of a generation, which is 16"):
            LLM(
                {
                    "model": harness.path,
                    "max_batch_size": 4,
                    "max_num_tokens": 4,
                    "speculative_config": {"decoding_type": "RENAMED"},
                },
                model=harness.model,
            )
    finally:
        unregister_plugin("RENAMED")


def test_memory_besides_the_weights_is_reported(harness):
    lines: list[str] = []
    config = {
        "model": harness.path,
        "device": harness.host["device"],
        "dtype": "float32",
        "max_batch_size": 2,
        "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 4096},
        "speculative_config": {"decoding_type": "MTP", "max_draft_len": 3},
    }
    with LLM(config, model=harness.model, on_progress=lines.append) as llm:
        line = next(text for text in lines if text.startswith("memory: "))
        llm.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4))
        manager = llm.pieces.manager
        slots, size = manager.sentinel_slot + 1, manager.bytes_per_slot()
        assert slots == 3 * 2 + 3
        assert line == (
            f"memory: KV cache {llm.pools.num_bytes() / 2**20:.1f} MiB (1024 blocks of 4 tokens), "
            f"MTP state {slots * size / 2**20:.1f} MiB ({slots} slots of {size} bytes), "
            f"logits processing {manager.logits_allocator.num_bytes / 2**20:.1f} MiB"
        )
    assert lines[-1] == "ready"


def test_the_kv_cache_is_sized_after_everything_else(harness, monkeypatch: pytest.MonkeyPatch):
    """By the memory that is left: pools of requests and draft probabilities are there by then."""
    managers: list[SlotStateManager] = []
    make, size = SlotStateManager.__init__, build.num_kv_blocks

    def made(self, *arguments, **options):
        make(self, *arguments, **options)
        managers.append(self)

    def sized(*arguments, **options):
        (manager,) = managers
        assert manager.logits_allocator.num_bytes > 0
        assert manager.draft_probs is not None
        managers.clear()
        return size(*arguments, **options)

    monkeypatch.setattr(SlotStateManager, "__init__", made)
    monkeypatch.setattr(build, "num_kv_blocks", sized)
    with harness.llm(mtp={"verification": "rejection", "draft_sampling": "plain"}):
        assert managers == []


def test_errors_of_a_file_name_it(harness, tmp_path):
    path = tmp_path / "long.yaml"
    path.write_text(f"model: {harness.path}\nmax_seq_len: 640000\n")
    with pytest.raises(ConfigError, match=re.escape(f"{path}: max_seq_len: 640000 is above")):
        LLM(path, model=harness.model)


def test_a_draft_loop_that_cannot_open_leaves_no_trace():
    attention = KVAttention([4, 4], 0, [9, 9])
    attention.reads_cached_token_counts = True
    attention.kv_cache_params.num_cached_tokens_per_seq = [5, 5, 5]
    with pytest.raises(MetadataError, match="expected 2, got 3"), draft_loop(attention):
        pass
    attention.kv_cache_params.num_cached_tokens_per_seq = [5, 5]
    with draft_loop(attention) as loop:
        loop.feed_window(torch.tensor([1, 2], dtype=torch.int32), 4, 4)
    assert attention.kv_lens_cuda.tolist() == [9, 9]


def test_absent_drafts_are_not_counted_as_drafted(harness):
    """Two new tokens leave room for no draft after the second one."""
    for no_overlap in (True, False):
        llm = harness.llm(k=3, disable_overlap_scheduler=no_overlap)
        output = llm.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2, ignore_eos=True))[0]
        assert output.acceptance.steps == 1
        assert output.acceptance.num_drafted <= 1
