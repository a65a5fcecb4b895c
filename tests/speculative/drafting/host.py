"""One step's inputs, and a draft layer that records what it sees."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from mtp_plugin.config import SpeculativeDecodingMode
from mtp_plugin.requests.states import CUDA_GRAPH_DUMMY_REQUEST_ID
from mtp_plugin.speculative.metadata import MTPSpecMetadata
from mtp_plugin.speculative.state import MTPHiddenStatesManager
from tests.speculative.drafting import example
from tests.speculative.drafting.example import VOCAB
from tests.speculative.plain_host import KVAttention, LimitedAttention, int32

H = 2
HIGHEST = 200
"""The highest legal position."""


# --- requests ---


@dataclass
class Prompt:
    """Rows [start, end) of a prompt; the target's token after them counts if they end it."""

    tokens: list[int]
    start: int = 0
    end: int | None = None
    choice: int | None = 1

    def __post_init__(self) -> None:
        if self.end is None:
            self.end = len(self.tokens)

    @property
    def is_final(self) -> bool:
        return self.end == len(self.tokens)

    @property
    def run(self) -> list[int]:
        return [self.choice] if self.is_final and self.choice is not None else []

    @property
    def text(self) -> list[int]:
        """Up to the token after the chunk."""
        return self.tokens[: self.end] + (self.run if self.is_final else [self.tokens[self.end]])

    @property
    def past(self) -> list[int]:
        return self.tokens[: self.start]

    @property
    def length(self) -> int:
        return self.end


@dataclass
class Turn:
    """A generation: its text (the newest token has no state yet), drafts, target's choices."""

    tokens: list[int]
    drafts: list[int]
    target: list[int | None]
    draft_len: int | None = None

    @property
    def present(self) -> list[int]:
        return self.drafts if self.draft_len is None else self.drafts[: self.draft_len]

    @property
    def inputs(self) -> list[int]:
        absent = [0] * (len(self.drafts) - len(self.present))
        return [self.tokens[-1], *self.present, *absent]

    @property
    def run(self) -> list[int]:
        return example.run_of(self.present, self.target)

    @property
    def text(self) -> list[int]:
        return self.tokens + self.run

    @property
    def past(self) -> list[int]:
        return self.tokens[:-1]

    @property
    def length(self) -> int:
        """L."""
        return len(self.tokens) - 1


def states_of(tokens: list[int], positions: list[int]) -> torch.Tensor:
    names = [example.target_state(t, p) for t, p in zip(tokens, positions, strict=True)]
    return number_states(torch.tensor(names, dtype=torch.float32))


def number_states(numbers: torch.Tensor) -> torch.Tensor:
    """A state is its number and the negative of it."""
    return torch.stack([numbers, -numbers], dim=1)


@dataclass
class Step:
    """One step's inputs, laid out flat: prompts, turns, then rows of padding."""

    k: int
    prompts: list[Prompt] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    attention: Any = LimitedAttention
    padding: int = 0
    slots: list[int] | None = None  # of the requests; default: in order
    num_slots: int = 12
    look_ahead: bool = True  # the host engine sets next_prompt_tokens
    mode: SpeculativeDecodingMode = SpeculativeDecodingMode.MTP
    draft_window: str = "exact"

    def __post_init__(self) -> None:
        k, width = self.k, self.k + 1
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int | None] = []
        for prompt in self.prompts:
            ids += prompt.tokens[prompt.start : prompt.end]
            positions += range(prompt.start, prompt.end)
            rows.append(prompt.choice)
        for turn in self.turns:
            ids += turn.inputs
            positions += [min(turn.length + i, HIGHEST) for i in range(width)]
            rows += turn.target
        ids += [0] * width * self.padding
        positions += [1 + i for i in range(width)] * self.padding
        rows += [0] * width * self.padding
        self.input_ids = int32(ids)
        self.position_ids = torch.tensor([positions])
        self.hidden_states = states_of(ids, positions)
        self.logits = torch.full((len(rows), VOCAB), -torch.inf)
        for row, choice in enumerate(rows):
            if choice is not None:
                self.logits[row] = -100.0
                self.logits[row, choice] = 0.0
        self.attn = self._attention()
        self.manager = self._manager() if k > 0 else None
        self.spec = self._spec()

    @property
    def requests(self) -> list[Prompt | Turn]:
        return [*self.prompts, *self.turns]

    def _attention(self) -> Any:
        generations = len(self.turns) + self.padding
        chunks = [p.end - p.start for p in self.prompts]
        seq_lens = chunks + [self.k + 1] * generations
        kv_lens = [p.end for p in self.prompts] + [t.length + self.k + 1 for t in self.turns]
        kv_lens += [self.k + 2] * self.padding
        if issubclass(self.attention, KVAttention):
            return self.attention(seq_lens, len(self.prompts), kv_lens)
        return self.attention(seq_lens, len(self.prompts))

    def _manager(self) -> MTPHiddenStatesManager:
        config = SimpleNamespace(max_draft_len=self.k)
        manager = MTPHiddenStatesManager(config, torch.float32, H, self.num_slots, device="cpu")
        self.slots = self.slots or list(range(len(self.requests)))
        manager.mtp_past_tokens_pool.fill_(-777)
        manager.mtp_past_hidden_states_pool.fill_(torch.nan)
        for request_id, (request, slot) in enumerate(zip(self.requests, self.slots, strict=True)):
            manager.slot_manager.free_slots.remove(slot)
            manager.slot_manager.slot_mapping[request_id] = slot
            past = list(enumerate(request.past))[-self.k :]
            manager.mtp_past_tokens_pool[slot] = 0
            manager.mtp_past_hidden_states_pool[slot] = 0
            if past:
                manager.mtp_past_tokens_pool[slot, -len(past) :] = int32([t for _, t in past])
                manager.mtp_past_hidden_states_pool[slot, -len(past) :] = states_of(
                    [t for _, t in past], [p for p, _ in past]
                )
        if self.padding:
            # what padding rows leave there is finite
            manager.mtp_past_tokens_pool[-1] = 0
            manager.mtp_past_hidden_states_pool[-1] = 0
        return manager

    def _spec(self) -> MTPSpecMetadata:
        spec = MTPSpecMetadata(
            max_num_requests=self.num_slots,
            max_draft_len=self.k,
            spec_dec_mode=self.mode,
            mtp_hidden_states_manager=self.manager,
            max_position=HIGHEST,
            draft_window=self.draft_window,
            device=torch.device("cpu"),
        )
        spec.num_generations = len(self.turns) + self.padding
        spec.num_tokens = len(self.input_ids)
        drafts = [d for turn in self.turns for d in turn.drafts] + [0] * self.k * self.padding
        spec.draft_tokens = int32(drafts)
        if self.padding or any(turn.draft_len is not None for turn in self.turns):
            lens = [self.k if t.draft_len is None else t.draft_len for t in self.turns]
            spec.draft_lens = int32(lens + [0] * self.padding)
        if self.look_ahead:
            spec.next_prompt_tokens = int32(
                [-1 if p.is_final else p.tokens[p.end] for p in self.prompts]
            )
        ids = list(range(len(self.requests)))
        spec.request_ids = ids + [CUDA_GRAPH_DUMMY_REQUEST_ID] * self.padding
        self.attn.request_ids = list(spec.request_ids)
        spec.prepare()
        return spec

    def inputs(self) -> dict[str, Any]:
        """Arguments of a worker's `forward` without its layers."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "hidden_states": self.hidden_states,
            "logits": self.logits,
            "lm_head": None,
            "embed_tokens": None,
            "attn_metadata": self.attn,
            "spec_metadata": self.spec,
        }


# --- draft layers ---


@dataclass
class Seen:
    """What one call of a layer saw."""

    depth: int
    ids: list[int]
    positions: list[int]
    states: list[float]
    seq_lens: list[int]
    host_seq_lens: list[int]
    kv_lens: list[int] | None
    write_limit: list[int] | None
    num_contexts: int
    types: list[int] | None
    extra: dict[str, Any]


class ScriptedLayer:
    """The example's arithmetic on tensors; records its inputs."""

    def __init__(self, depth: int = 0, seen: list[Seen] | None = None) -> None:
        self.depth = depth
        self.seen = [] if seen is None else seen

    def __call__(
        self,
        *,
        embed_tokens: Any,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        attn_metadata: Any,
        all_rank_num_tokens: list[int] | None = None,
        **extra: Any,
    ) -> torch.Tensor:
        if all_rank_num_tokens is not None:
            extra["all_rank_num_tokens"] = all_rank_num_tokens
        assert embed_tokens is None
        assert position_ids.shape == (1, len(input_ids))
        assert hidden_states.shape == (len(input_ids), H)
        self._note(input_ids, position_ids, hidden_states, attn_metadata, extra)
        numbers = 5 * input_ids + 7 * position_ids[0] + 3 * hidden_states[:, 0] + 11 * self.depth
        return number_states(numbers.remainder(241))

    def shared_head(
        self, hidden: torch.Tensor, lm_head: Any, attn_metadata: Any, return_all: bool = False
    ) -> torch.Tensor:
        assert lm_head is None
        if not return_all:
            hidden = hidden[attn_metadata.seq_lens_cuda.long().cumsum(0) - 1]
        # a dead request's numbers may be anything, its proposal must still be a token
        choice = hidden[:, 0].nan_to_num().remainder(VOCAB).long()
        return torch.nn.functional.one_hot(choice, VOCAB).float()

    def _note(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
        attn: Any,
        extra: dict[str, Any],
    ) -> None:
        def values(name: str) -> list[int] | None:
            tensor = getattr(attn, name, None)
            return None if tensor is None else tensor.tolist()

        self.seen.append(
            Seen(
                self.depth,
                ids.tolist(),
                positions[0].tolist(),
                states[:, 0].tolist(),
                attn.seq_lens_cuda.tolist(),
                attn._seq_lens.tolist(),
                values("kv_lens_cuda"),
                values("kv_write_limit"),
                attn.num_contexts,
                values("host_request_types"),
                extra,
            )
        )


class SelectingLayer(ScriptedLayer):
    """Returns only the rows that are read; records how many were requested."""

    takes_output_rows = True

    def __call__(self, *, output_rows: torch.Tensor | None = None, **inputs: Any) -> torch.Tensor:
        states = super().__call__(**inputs)
        if output_rows is None:
            return states
        self.seen[-1].extra["output_rows"] = len(output_rows)
        return states[output_rows]


class ReturningLayer(ScriptedLayer):
    """Gives its very input back."""

    def __call__(self, *, hidden_states: torch.Tensor, **inputs: Any) -> torch.Tensor:
        super().__call__(hidden_states=hidden_states, **inputs)
        return hidden_states


class BrokenLayer(ScriptedLayer):
    """Raises at its n-th call."""

    def __init__(self, at_call: int) -> None:
        super().__init__()
        self.at_call = at_call

    def __call__(self, **inputs: Any) -> torch.Tensor:
        result = super().__call__(**inputs)
        if len(self.seen) == self.at_call:
            raise RuntimeError("the layer broke")
        return result
