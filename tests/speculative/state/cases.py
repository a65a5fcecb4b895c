"""Requests, batches and managers for the tests of this folder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.speculative.state import MTPHiddenStatesManager
from tests.speculative import plain_host

BEGIN, END = 90, 91
RELAXED = MTPDecodingConfig(
    max_draft_len=2,
    use_relaxed_acceptance_for_thinking=True,
    relaxed_topk=5,
    relaxed_delta=0.25,
    begin_thinking_phase_token=BEGIN,
    end_thinking_phase_token=END,
)


class Request(plain_host.Request):
    """A request, by default on its first chunk."""

    def __init__(self, request_id: int, tokens: list[int] | None = None, **fields: Any) -> None:
        first = fields.pop("is_first_context_chunk", True)
        super().__init__(request_id, tokens or [1], **fields)
        self.context_current_position = 0 if first else 1


def batch(*contexts: Request) -> SimpleNamespace:
    return SimpleNamespace(context_requests=list(contexts), generation_requests=[])


def make(config: Any = None, max_num_requests: int = 2, **options: Any) -> MTPHiddenStatesManager:
    config = config or MTPDecodingConfig(max_draft_len=2)
    return MTPHiddenStatesManager(config, torch.float32, 4, max_num_requests, **options)


def soil(manager: MTPHiddenStatesManager) -> None:
    """Fill table and pools with values that must never be read."""
    manager.mtp_past_hidden_states_pool.fill_(torch.nan)
    manager.mtp_past_tokens_pool.fill_(-777)
    manager.table.rows.fill_(777)
