"""Required memory is available, or is refused with both numbers before it is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from integration.random_models import write_random_checkpoint
from mtp_plugin.config import LLMConfig
from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.embedded import LLM, build, memory
from mtp_plugin.hosts.embedded.attention import HeadShape
from mtp_plugin.hosts.embedded.cuda_graphs import GRAPH_BYTES, graph_bytes
from mtp_plugin.hosts.embedded.kv_cache import sizing
from mtp_plugin.hosts.embedded.memory import shortage_named, token_bytes
from mtp_plugin.hosts.embedded.models import FAMILIES
from mtp_plugin.hosts.embedded.resolved_config import resolve_config
from mtp_plugin.hosts.embedded.row_table import StepShape
from mtp_plugin.speculative.state import SlotStateManager
from mtp_plugin.tools.terminal import doctor

GIB = 2**30
MTP = {"decoding_type": "MTP", "max_draft_len": 2}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("memory") / "checkpoint", "mimo")


@pytest.fixture
def four_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    for place, name in (
        (build, "available_bytes"),
        (doctor, "available_bytes"),
        (memory, "available_host_bytes"),
    ):
        monkeypatch.setattr(place, name, lambda *_: 4 * GIB)


# of the checkpoint: 2 layers of 2 KV heads of 16, and an MTP layer like them; 512 ids
CASES = [
    (
        {"kv_cache_config": {"max_tokens": 10**8}},
        "kv_cache_config.max_tokens: 100000000 tokens in blocks of 32 take 71.5 GiB, 4.0 GiB are "
        "available on cpu",
    ),
    (
        {"kv_cache_config": {"tokens_per_block": 10**9}},
        "kv_cache_config.tokens_per_block: a block of 1000000000 tokens and the one for padding "
        "take 1430.5 GiB, 2.0 GiB are available for the KV cache on cpu",
    ),
    (
        {"max_batch_size": 10**9, "max_num_tokens": 10**10, "max_seq_len": 64},
        "max_batch_size: 1000000000 requests of up to 64 tokens take at least 14144.9 GiB, 4.0 GiB "
        "are available on cpu",
    ),
    (
        {
            "max_batch_size": 2 * 10**5,
            "max_num_tokens": 10**7,
            "max_seq_len": 64,
            "kv_cache_config": {"max_tokens": 5 * 10**6},
        },
        "max_batch_size: 200000 requests of up to 64 tokens take at least 2.8 GiB next to a KV "
        "cache of 3.6 GiB, 4.0 GiB are available on cpu",
    ),
]


@pytest.mark.parametrize(("options", "message"), CASES)
@pytest.mark.usefixtures("four_gib")
def test_what_memory_cannot_hold_is_refused(path: Path, options: dict, message: str) -> None:
    """By the doctor in the same words, from the checkpoint's files alone."""
    config = {"model": str(path), "device": "cpu", "speculative_config": MTP, **options}
    with pytest.raises(ConfigError) as refused:
        LLM(config)
    assert str(refused.value) == message
    problems = doctor.examine(doctor.LLMConfig.model_validate(config)).problems
    assert [problem.split(" take ")[0] for problem in problems] == [message.split(" take ")[0]]


@pytest.mark.usefixtures("four_gib")
def test_a_refusal_takes_no_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded or allocated before."""
    monkeypatch.setattr(build, "load_model", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(SlotStateManager, "__init__", lambda *_, **__: pytest.fail("allocated"))
    config = {"model": str(path), "device": "cpu", "speculative_config": MTP}
    for batch_size in (5 * 10**5, 10**15):
        large = {"max_batch_size": batch_size, "max_num_tokens": 4 * batch_size}
        with pytest.raises(ConfigError, match=f"^max_batch_size: {batch_size} requests of up to"):
            LLM({**config, **large})


PLANS = [
    None,
    {**MTP, "use_mtp_vanilla": True},
    {**MTP, "mtp": {"verification": "rejection"}},
]


@pytest.mark.parametrize("speculative", PLANS)
def test_requests_take_what_they_are_said_to(tmp_path: Path, speculative: dict | None) -> None:
    """Each of many, and little else: slots of padding and warm-up, and columns of modes."""
    path = write_random_checkpoint(tmp_path / "checkpoint", "glm4_moe", num_mtp_layers=2)

    def taken(batch_size: int) -> tuple[int, int]:
        config = LLMConfig(
            model=str(path),
            device="cpu",
            max_batch_size=batch_size,
            max_num_tokens=10 * batch_size,
            kv_cache_config={"max_tokens": 64},
            speculative_config=speculative,
        )
        with LLM(config) as llm:
            manager, store = llm.pieces.manager, llm.pieces.sampler.store
            kept = manager.num_rows * manager.bytes_per_slot() + manager.logits_allocator.num_bytes
            kept += 0 if manager.draft_probs is None else manager.draft_probs.nbytes
            table = llm.executor.engine._table
            facts, plan = llm.model.facts, llm.pieces.plan
            resolved = resolve_config(llm.config, facts, str)
            on_device, on_host = memory.request_bytes(resolved, torch.float32)
            logits = plan.step_rows * facts.vocab_size * 4
            rows = [table._device_rows, *table._host_rows]
            return (
                kept + store.rows.nbytes + sum(row.nbytes for row in rows),
                on_device + on_host - logits - memory._HOST_BYTES,
            )

    (few, each), (many, same) = taken(8), taken(40)
    assert each == same
    assert 0 <= (many - few) // 32 - each <= 3 * 4 * 8


@pytest.mark.usefixtures("four_gib")
def test_the_doctor_leaves_the_weights_out(path: Path) -> None:
    config = {"model": str(path), "device": "cpu", "kv_cache_config": {"max_tokens": 3200}}
    found = dict(doctor.examine(doctor.LLMConfig.model_validate(config)).findings)
    assert found["KV cache"] == "100 blocks, 1.6 MiB of 4.0 GiB available"


@pytest.mark.parametrize(("family", "vanilla"), [("glm4_moe", True), ("deepseek_v3", False)])
def test_rows_take_what_they_are_said_to(tmp_path: Path, family: str, vanilla: bool) -> None:
    """Pools are there once the executor is, before any step."""
    declared = 3 if FAMILIES[family].count_key else FAMILIES[family].default_count
    layers = declared if vanilla else 1
    path = write_random_checkpoint(tmp_path / "checkpoint", family, num_mtp_layers=declared)
    config = {
        "model": str(path),
        "device": "cpu",
        "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 64},
        "speculative_config": {**MTP, "max_draft_len": declared, "use_mtp_vanilla": vanilla},
    }
    with LLM(config) as llm:
        heads = HeadShape.of(llm.model.target.config)
        each = token_bytes(heads, torch.float32, llm.model.facts.num_hidden_layers + layers)
        assert llm.pools.num_rows == 68
        assert llm.pools.num_bytes() == 68 * each


BLOCK = 32 * 1024
"""Bytes of a block of 32 tokens."""


def blocks(available: int | None, device: str = "cpu", reserved: int = 0, **options) -> int:
    """The blocks of a cache that the file does not ask for."""
    config = doctor.LLMConfig(model="x", max_batch_size=10**6, max_num_tokens=10**7, **options)
    gpu = {"total": 100 * BLOCK, "reserved": reserved * BLOCK} if device == "cuda" else {}
    sizes = {"max_seq_len": 3200, "token_bytes": 1024, "available": available, **gpu}
    return sizing.num_kv_blocks(config, torch.device(device), **sizes)


def test_the_cache_takes_no_more_than_there_is() -> None:
    """The block for padding counts."""
    assert blocks(10 * BLOCK) == 9
    assert blocks(2 * BLOCK) == 1
    assert blocks(None) == blocks(2**60) == sizing.CPU_KV_BYTES // BLOCK - 1
    with pytest.raises(ConfigError, match=r"take 0\.1 MiB, 0\.1 MiB are available"):
        blocks(2 * BLOCK - 1)


def test_gpu_memory_utilization_is_a_share_of_the_whole_device() -> None:
    assert blocks(80 * BLOCK, "cuda") == 80 * 9 // 10 - 1
    assert blocks(80 * BLOCK, "cuda", gpu_memory_utilization=0.5) == 50 - 20 - 1  # 20 are in use
    with pytest.raises(ConfigError, match="are available for the KV cache"):
        blocks(50 * BLOCK, "cuda", gpu_memory_utilization=0.5)


def test_cache_leaves_memory_for_graphs() -> None:
    assert blocks(80 * BLOCK, "cuda", 8) == 80 - 8 - 1  # the tenth that the cache leaves anyway
    assert blocks(80 * BLOCK, "cuda", 20) == 80 - 20 - 1
    assert blocks(80 * BLOCK, "cuda", 20, gpu_memory_utilization=0.9) == 90 - 20 - 20 - 1
    for options in ({}, {"gpu_memory_utilization": 0.5}):
        with pytest.raises(ConfigError, match=r"0\.0 MiB are available for the KV cache"):
            blocks(80 * BLOCK, "cuda", 100, **options)


def test_graphs_share_the_memory_of_the_largest_step() -> None:
    small, large = StepShape((), 1, 3), StepShape((), 64, 3)
    of_large = graph_bytes([large], vocab_size=1000, hidden_size=64)
    assert graph_bytes([], vocab_size=1000, hidden_size=64) == 0
    assert graph_bytes([small], vocab_size=1000, hidden_size=64) < of_large
    both = graph_bytes([small, large], vocab_size=1000, hidden_size=64)
    assert both == of_large + GRAPH_BYTES
    prompts = StepShape((2048,), 64, 3)
    assert graph_bytes([prompts], vocab_size=1000, hidden_size=64) > of_large


# --- what there is ---


def test_available_is_what_system_and_group_leave(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert sizing.available_host_bytes(tmp_path) is None
    write("proc/meminfo", "MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:    4096 kB\n")
    assert sizing.available_host_bytes(tmp_path) == 4096 * 1024
    write("sys/fs/cgroup/memory.max", "max\n")
    write("sys/fs/cgroup/memory.current", "1000\n")
    assert sizing.available_host_bytes(tmp_path) == 4096 * 1024
    write("sys/fs/cgroup/memory.max", "3000\n")
    assert sizing.available_host_bytes(tmp_path) == 2000
    write("sys/fs/cgroup/memory.current", "3001\n")
    assert sizing.available_host_bytes(tmp_path) == 0


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . can't allocate memory: you tried"),
    ],
)
def test_a_failed_allocation_is_named(error: Exception) -> None:
    message = r"^max_batch_size: the state does not fit into memory: "
    with pytest.raises(ConfigError, match=message), shortage_named("max_batch_size", "the state"):
        raise error


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match=r"^shape$"), shortage_named("x", "y"):
        raise RuntimeError("shape")
