"""KV blocks as the host counts them, sequence slots, and the managers in their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.contract_host.requests import COMPLETE, CONTEXT_INIT, IN_PROGRESS, LlmRequest


class KVCacheManager:
    """Tokens and blocks per sequence: a step adds one and its drafts, and is rewound after it.

    Args:
        num_blocks, block_size: of the pool; one extra block takes writes of what has no block.
        num_extra_kv_tokens: that every sequence has besides.
        reuses_blocks: whole blocks of prompts serve prompts that begin alike.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_extra_kv_tokens: int, *, reuses_blocks: bool
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_extra_kv_tokens = num_extra_kv_tokens
        self.reuses_blocks = reuses_blocks
        self.num_tokens: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.hits: dict[int, int] = {}
        self.kept: dict[tuple[int, ...], int] = {}
        """A whole prefix of blocks -> its last block."""
        self._free = list(range(num_blocks))

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    def prepare_resources(self, scheduled_batch: Any) -> None:
        for request in scheduled_batch.context_requests:
            if request.request_id not in self.tables:
                self._add_sequence(request)
        for request in scheduled_batch.generation_requests:
            if not request.is_dummy:
                self._resize(request.request_id, 1 + len(request.py_draft_tokens))

    def update_resources(self, scheduled_batch: Any) -> None:
        """Take back the rows of rejected drafts of generations that go on."""
        for request in scheduled_batch.generation_requests:
            is_gone = request.state in (COMPLETE, CONTEXT_INIT)
            if not is_gone and request.request_id in self.tables:
                assert 0 <= request.py_rewind_len <= self.num_tokens[request.request_id]
                self._resize(request.request_id, -request.py_rewind_len)

    def free_resources(self, request: LlmRequest) -> None:
        table = self.tables.pop(request.request_id, [])
        if self.reuses_blocks and not request.is_dummy and request.context_remaining_length <= 0:
            tokens = request.get_tokens(0)
            for place in range((len(tokens) - 1) // self.block_size):
                self.kept.setdefault(tuple(tokens[: (place + 1) * self.block_size]), table[place])
        self._free += [block for block in table if block not in self.kept.values()]
        self.num_tokens.pop(request.request_id, None)

    def add_dummy_requests(
        self, request_ids: Sequence[int], draft_len: int, *, is_gen: bool = True
    ) -> list[LlmRequest]:
        """Sequences of ones, which the caller frees as any other."""
        made = []
        for request_id in request_ids:
            request = LlmRequest(request_id, [1] * (1 + draft_len), 1)
            if is_gen:
                request.state = IN_PROGRESS
                request.py_prompt_len = request.context_current_position = draft_len
                request.py_draft_tokens = [1] * draft_len
            self.num_tokens[request_id], self.tables[request_id] = 0, []
            self._resize(request_id, 1 + 2 * draft_len)
            made.append(request)
        return made

    def shutdown(self) -> None:
        self.tables.clear()

    def _add_sequence(self, request: LlmRequest) -> None:
        table: list[int] = []
        if self.reuses_blocks:
            # the last token is always read
            tokens = request.get_tokens(0)
            for end in range(self.block_size, request.py_prompt_len, self.block_size):
                if tuple(tokens[:end]) not in self.kept:
                    break
                table.append(self.kept[tuple(tokens[:end])])
            hit = self.hits[request.request_id] = len(table) * self.block_size
            # the chunk that was scheduled begins after it
            request.context_chunk_size -= hit - request.context_current_position
            request.context_current_position = request.prepopulated_prompt_len = hit
        self.num_tokens[request.request_id], self.tables[request.request_id] = 0, table
        self._resize(request.request_id, request.py_prompt_len)

    def _resize(self, request_id: int, count: int) -> None:
        self.num_tokens[request_id] += count
        tokens, table = self.num_tokens[request_id] + self.num_extra_kv_tokens, self.tables
        num_blocks = -(-tokens // self.block_size)
        while len(table[request_id]) < num_blocks:
            table[request_id].append(self._free.pop())
        while len(table[request_id]) > num_blocks:
            self._free.append(table[request_id].pop())


class SeqSlotManager:
    """``py_seq_slot`` for every request that has none; a freed request keeps its stale number.

    The slot that was freed last comes first.
    """

    def __init__(self, num_slots: int) -> None:
        self.slots: dict[int, int] = {}
        self._free = list(range(num_slots))

    def prepare_resources(self, scheduled_batch: Any) -> None:
        for request in scheduled_batch.all_requests():
            if request.py_seq_slot is None:
                assert request.request_id not in self.slots, "a request was added twice"
                request.py_seq_slot = self.slots[request.request_id] = self._free.pop()

    def free_resources(self, request: LlmRequest) -> None:
        if request.request_id in self.slots:
            self._free.append(self.slots.pop(request.request_id))

    def shutdown(self) -> None:
        self._free += self.slots.values()
        self.slots.clear()


class ResourceManager:
    """Managers by name: they prepare in order and free against it.

    The plugin's manager comes first, so that no request has a sequence slot when it prepares.
    """

    def __init__(self, managers: dict[str, Any]) -> None:
        self.resource_managers = managers

    def get_resource_manager(self, name: str) -> Any:
        return self.resource_managers.get(name)

    def prepare_resources(self, scheduled_batch: Any) -> None:
        for manager in self.resource_managers.values():
            manager.prepare_resources(scheduled_batch)

    def update_resources(self, scheduled_batch: Any) -> None:
        for manager in self.resource_managers.values():
            if hasattr(manager, "update_resources"):
                manager.update_resources(scheduled_batch)

    def free_resources(self, request: LlmRequest) -> None:
        for manager in reversed(list(self.resource_managers.values())):
            manager.free_resources(request)

    def shutdown(self) -> None:
        for manager in self.resource_managers.values():
            manager.shutdown()
