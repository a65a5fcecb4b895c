"""A whole host of one line over the tiny trained model, for tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtp_plugin.hosts.embedded.models import LoadedModel
from tests.contract_host.behaviours import user_config
from tests.contract_host.engine import KV, SPEC, ModelEngine, warm_up
from tests.contract_host.kv_cache import KVCacheManager, ResourceManager, SeqSlotManager
from tests.contract_host.line_rules import LINES
from tests.contract_host.loop import SEQ_SLOTS, PyExecutor
from tests.contract_host.pieces import Factories, Sizes, installed_factories
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
        return self.engine.pieces.manager

    def generate(self, requests: list[LlmRequest]) -> list[list[int]]:
        """Outputs of requests that are there together."""
        for request in requests:
            self.executor.add(request)
        self.executor.run()
        assert all(request.is_finished for request in requests)
        return [request.output for request in requests]

    def assert_drained(self) -> None:
        """No slot and no KV block is left, but those of the permanent dummies."""
        dummies = set(self.engine._dummies)
        assert set(self.kv_cache.tables) == dummies, "KV blocks were not freed"
        held = sum(len(table) for table in self.kv_cache.tables.values())
        assert self.kv_cache.num_free_blocks == self.kv_cache.num_blocks - held
        assert not self.seq_slots.slot_manager.slot_mapping, "sequence slots were not freed"
        slots = set(self.manager.slot_manager.slot_mapping)
        assert slots <= dummies, f"the manager keeps slots of {slots - dummies}"


def make_host(
    line_name: str,
    model: LoadedModel,
    *,
    vanilla: bool,
    overlap: bool,
    k: int = 3,
    batch: int = 4,
    max_seq_len: int = 256,
    num_seq_slots: int | None = None,
    num_blocks: int = 200,
    block_size: int = 8,
    padded_sizes: tuple[int, ...] = (),
    reuses_blocks: bool = False,
    flash_mla: bool = False,
    attention_dp: bool = False,
    extra_kv_tokens: int | None = None,
    config: dict[str, Any] | None = None,
    factories: Factories | None = None,
    warms_up: bool = True,
    **loop: Any,
) -> Host:
    """A warm host: engine, managers in the host's order, and the loop."""
    line = LINES[line_name]
    if factories is None:
        factories = installed_factories(line)
    spec_config = user_config(
        line, k, use_mtp_vanilla=vanilla, modes=factories.classes.modes, **(config or {})
    )
    kv_cache = KVCacheManager(
        num_blocks,
        block_size,
        num_extra_kv_tokens=k - 1 if extra_kv_tokens is None else extra_kv_tokens,
        reuses_blocks=reuses_blocks,
    )
    slots = batch if num_seq_slots is None else num_seq_slots
    sizes = Sizes(batch, 1024, max_seq_len, slots)
    engine = ModelEngine(
        line,
        model,
        spec_config,
        sizes,
        kv_cache,
        factories,
        num_mtp_layers=k if vanilla else 1,
        padded_sizes=padded_sizes,
        flash_mla=flash_mla,
        attention_dp=attention_dp,
    )
    seq_slots = SeqSlotManager(slots)
    managers = {SEQ_SLOTS: seq_slots, KV: kv_cache}
    if engine.pieces.manager is not None:
        managers = {SPEC: engine.pieces.manager, **managers}
    resources = ResourceManager(managers)
    if warms_up:
        warm_up(engine, resources)
        # the executor that measured memory shuts its managers down; the pieces' one lives on
        resources.shutdown()
    executor = PyExecutor(engine, resources, overlap=overlap, attention_dp=attention_dp, **loop)
    return Host(executor, engine, kv_cache, seq_slots)
