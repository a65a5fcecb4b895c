"""KV blocks as the host counts them, sequence slots, and the managers in their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.contract_host.behaviours import BaseResourceManager, LlmRequestState, SlotManager
from tests.contract_host.requests import LlmRequest, draft_length


class KVCacheManager(BaseResourceManager):
    """Tokens and blocks per sequence: a step adds one and its drafts, and is rewound after it.

    Args:
        num_blocks, block_size: of the pool; one extra block takes writes of what has no block.
        num_extra_kv_tokens: that every sequence has besides.
        reuses_blocks: whole blocks of finished and running prompts serve prompts that begin alike.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_extra_kv_tokens: int = 0,
        reuses_blocks: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_extra_kv_tokens = num_extra_kv_tokens
        self.reuses_blocks = reuses_blocks
        self.num_tokens: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.hits: dict[int, int] = {}
        self._holders = [0] * num_blocks  # sequences and, where blocks are reused, the tree
        self._tree: dict[tuple[int, ...], int] = {}  # a whole prefix of blocks -> its last block
        self._free = list(range(num_blocks))

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds; those of the tree alone can be taken back."""
        return len(self._free) + sum(self._holders[block] == 1 for block in self._tree.values())

    def blocks_for(self, num_tokens: int) -> int:
        return -(-(num_tokens + self.num_extra_kv_tokens) // self.block_size)

    def table(self, request_id: int) -> list[int]:
        return self.tables[request_id]

    def missing_blocks(self, request: LlmRequest, new_tokens: int) -> int:
        """Blocks that the request needs besides for so many more tokens."""
        held = len(self.tables.get(request.request_id, ()))
        count = self.num_tokens.get(request.request_id, 0)
        return max(0, self.blocks_for(count + new_tokens) - held)

    # ---- as a resource manager ----

    def get_max_resource_count(self) -> int:
        return self.num_blocks

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        return self.blocks_for(request.py_orig_prompt_len + request.py_max_new_tokens)

    def prepare_resources(self, scheduled_batch: Any) -> None:
        for request in scheduled_batch.context_requests:
            if request.request_id not in self.tables:
                self._add_sequence(request)
        for request in scheduled_batch.generation_requests:
            if not request.is_dummy:
                self._grow(request.request_id, 1 + draft_length(request))

    def update_resources(self, scheduled_batch: Any) -> None:
        """Take back the rows of rejected drafts of generations that go on."""
        for request in scheduled_batch.generation_requests:
            gone = (LlmRequestState.GENERATION_COMPLETE, LlmRequestState.CONTEXT_INIT)
            if request.state not in gone and request.request_id in self.tables:
                assert 0 <= request.py_rewind_len <= self.num_tokens[request.request_id]
                self.num_tokens[request.request_id] -= request.py_rewind_len
                self._shrink(request.request_id)

    def free_resources(self, request: LlmRequest) -> None:
        if request.request_id not in self.tables:
            return
        if self.reuses_blocks and not request.is_dummy:
            self._keep(request)
        for block in self.tables.pop(request.request_id):
            self._release(block)
        del self.num_tokens[request.request_id]

    def add_dummy_requests(
        self, request_ids: Sequence[int], draft_len: int = 0, *, is_gen: bool = True
    ) -> list[LlmRequest]:
        """Sequences of ones, which the caller frees as any other."""
        made = []
        for request_id in request_ids:
            request = LlmRequest(request_id, [1] * (1 + draft_len), 1)
            if is_gen:
                request.state = LlmRequestState.GENERATION_IN_PROGRESS
                request.prompt_len = request.py_prompt_len = draft_len
                request.context_current_position = draft_len
                request.py_draft_tokens = [1] * draft_len
            self.num_tokens[request_id] = 0
            self.tables[request_id] = []
            self._grow(request_id, 1 + 2 * draft_len)
            made.append(request)
        return made

    def shutdown(self) -> None:
        self.tables.clear()

    # ---- blocks ----

    def _add_sequence(self, request: LlmRequest) -> None:
        table: list[int] = []
        if self.reuses_blocks:
            table = self._found(request)
            hit = len(table) * self.block_size
            self.hits[request.request_id] = hit
            # the chunk that was scheduled begins after it
            request.context_chunk_size -= hit - request.context_current_position
            request.context_current_position = request.prepopulated_prompt_len = hit
        for block in table:
            self._holders[block] += 1
        self.tables[request.request_id] = table
        self.num_tokens[request.request_id] = 0
        self._grow(request.request_id, request.prompt_len)

    def _found(self, request: LlmRequest) -> list[int]:
        """Blocks that hold the beginning of a prompt; its last token is always read."""
        tokens, table = request.get_tokens(0)[: request.prompt_len], []
        for end in range(self.block_size, request.prompt_len, self.block_size):
            block = self._tree.get(tuple(tokens[:end]))
            if block is None:
                break
            table.append(block)
        return table

    def _keep(self, request: LlmRequest) -> None:
        """Whole blocks of what was read stay in the tree."""
        tokens = request.get_tokens(0)
        read = len(tokens) - 1 if request.context_remaining_length <= 0 else 0
        for place in range(read // self.block_size):
            key = tuple(tokens[: (place + 1) * self.block_size])
            if key not in self._tree:
                self._tree[key] = block = self.tables[request.request_id][place]
                self._holders[block] += 1

    def _grow(self, request_id: int, count: int) -> None:
        self.num_tokens[request_id] += count
        table = self.tables[request_id]
        while len(table) < self.blocks_for(self.num_tokens[request_id]):
            table.append(self._take())

    def _shrink(self, request_id: int) -> None:
        table = self.tables[request_id]
        while len(table) > self.blocks_for(self.num_tokens[request_id]):
            self._release(table.pop())

    def _take(self) -> int:
        if not self._free:
            # the longest prefix that only the tree holds
            for key in sorted(self._tree, key=len, reverse=True):
                if self._holders[self._tree[key]] == 1:
                    self._release(self._tree.pop(key))
                    break
        assert self._free, "no KV block is left: the scheduler counted wrong"
        block = self._free.pop()
        self._holders[block] += 1
        return block

    def _release(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block] == 0:
            self._free.append(block)


class SeqSlotManager(BaseResourceManager):
    """``py_seq_slot`` for every request that has none; a freed request keeps its stale number."""

    def __init__(self, num_slots: int) -> None:
        self.slot_manager = SlotManager(num_slots)

    def get_max_resource_count(self) -> int:
        return self.slot_manager.max_num_requests

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:  # noqa: ARG002
        return 1

    def prepare_resources(self, scheduled_batch: Any) -> None:
        for request in scheduled_batch.all_requests():
            if request.py_seq_slot is None:
                request.py_seq_slot = self.slot_manager.add_slot(request.request_id)

    def free_resources(self, request: LlmRequest) -> None:
        self.slot_manager.remove_slot(request.request_id)

    def shutdown(self) -> None:
        self.slot_manager.shutdown()


class ResourceManager:
    """Managers by name: they prepare in order and free against it.

    The pieces' manager comes first, so that no request has a sequence slot when it prepares.
    """

    def __init__(self, managers: dict[str, Any]) -> None:
        self.resource_managers = managers

    def get_resource_manager(self, name: str) -> Any:
        return self.resource_managers.get(name)

    def prepare_resources(self, scheduled_batch: Any) -> None:
        for manager in self.resource_managers.values():
            if hasattr(manager, "prepare_resources"):
                manager.prepare_resources(scheduled_batch)

    def update_resources(self, scheduled_batch: Any) -> None:
        for manager in self.resource_managers.values():
            if hasattr(manager, "update_resources"):
                manager.update_resources(scheduled_batch)

    def free_resources(self, request: LlmRequest) -> None:
        for manager in reversed(list(self.resource_managers.values())):
            if hasattr(manager, "free_resources"):
                manager.free_resources(request)

    def shutdown(self) -> None:
        for manager in self.resource_managers.values():
            manager.shutdown()
