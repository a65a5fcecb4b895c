"""A whole host of one line over the tiny trained model, for tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtp_plugin.hosts.embedded.models import LoadedModel
from tests.contract_host.behaviours import host_classes, user_config
from tests.contract_host.engine import SPEC, ModelEngine, warm_up
from tests.contract_host.installed import Sizes
from tests.contract_host.kv_cache import KVCacheManager, ResourceManager, SeqSlotManager
from tests.contract_host.line_rules import LINES
from tests.contract_host.loop import PyExecutor
from tests.contract_host.requests import LlmRequest


@dataclass
class Host:
    """An executor, and what it was built of."""

    executor: PyExecutor
    engine: ModelEngine
    kv_cache: KVCacheManager
    seq_slots: SeqSlotManager

    @property
    def manager(self) -> Any:
        return self.engine.components.manager

    def generate(self, requests: list[LlmRequest]) -> list[list[int]]:
        """Outputs of requests that are there together."""
        for request in requests:
            self.executor.add(request)
        self.executor.run()
        assert all(request.is_finished for request in requests)
        return [request.output for request in requests]

    def assert_drained(self) -> None:
        """No slot and no KV block is left, but those of the permanent dummies."""
        dummies = set(self.engine.dummies)
        assert set(self.kv_cache.tables) == dummies, "KV blocks were not freed"
        held = sum(len(table) for table in self.kv_cache.tables.values())
        assert self.kv_cache.num_used_blocks == held
        assert not self.seq_slots.slots, "sequence slots were not freed"
        slots = set(self.manager.slot_manager.slot_mapping)
        assert slots <= dummies, f"the manager keeps slots of {slots - dummies}"


def make_host(
    line_name: str,
    model: LoadedModel,
    *,
    vanilla: bool = False,
    overlap: bool = True,
    k: int = 3,
    batch: int = 4,
    num_seq_slots: int | None = None,
    num_blocks: int = 200,
    block_size: int = 8,
    padded_sizes: tuple[int, ...] = (),
    reuses_blocks: bool = False,
    attention_dp: bool = False,
    extra_kv_tokens: int | None = None,
    warms_up: bool = False,
    **loop: Any,
) -> Host:
    """A host: engine, managers in the host's order, and the loop."""
    line = LINES[line_name]
    extra = k - 1 if extra_kv_tokens is None else extra_kv_tokens
    kv_cache = KVCacheManager(num_blocks, block_size, extra, reuses_blocks=reuses_blocks)
    sizes = Sizes(batch, 1024, 256, batch if num_seq_slots is None else num_seq_slots)
    engine = ModelEngine(
        line,
        model,
        user_config(line, k, use_mtp_vanilla=vanilla, modes=host_classes(line).modes),
        sizes,
        kv_cache,
        num_mtp_layers=k if vanilla else 1,
        padded_sizes=padded_sizes,
        attention_dp=attention_dp,
    )
    seq_slots = SeqSlotManager(sizes.num_seq_slots)
    managers = {SPEC: engine.components.manager, "slots": seq_slots, "kv_cache": kv_cache}
    resources = ResourceManager(managers)
    if warms_up:
        warm_up(engine, resources)
        # the executor that measured memory shuts its managers down; the plugin's one lives on
        resources.shutdown()
    executor = PyExecutor(engine, resources, overlap=overlap, attention_dp=attention_dp, **loop)
    return Host(executor, engine, kv_cache, seq_slots)
