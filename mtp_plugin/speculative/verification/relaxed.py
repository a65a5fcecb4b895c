"""Relaxed verification: while a request thinks, a draft may be as good as the first choice."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from mtp_plugin.errors import ConfigError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.requests.columns import Number, SlotColumn
from mtp_plugin.requests.options import is_greedy
from mtp_plugin.requests.stopping import MAX_STOP_IDS
from mtp_plugin.requests.thinking import NO_TOKEN, expect_thinking_tokens, thinking_after
from mtp_plugin.speculative.host import DecodingOptions, RequestFacts
from mtp_plugin.speculative.metrics.acceptance import Label
from mtp_plugin.speculative.ops.acceptance import AcceptanceRules, RelaxedRule
from mtp_plugin.speculative.verification.mode import VerificationInputs, VerificationMode

_logger = logging.getLogger("mtp_plugin")

DELTA_POOL = "mtp_relaxed_delta_pool"


class RelaxedVerification(VerificationMode):
    """Takes drafts among the ``relaxed_topk`` best, within ``relaxed_delta`` of the best one.

    It claims the rows of thinking requests that are greedy; what is drawn or forced is never
    relaxed. Its columns: ``mtp_relaxed_delta_pool`` (the delta in force: 0 outside the thinking
    phase; a host that writes another is obeyed), ``thinking`` (follows it), ``relaxed_topk`` and
    ``relaxed_limit`` (the request's own, or the config's).
    Ids that end a request, or are ignored, are accepted only as first choice; a request with more
    of them than a slot has room for is never relaxed, which is logged, nor is one that ignores
    some beside ``min_tokens``.
    """

    name = "relaxed"
    served_options = frozenset({"relaxed_topk", "relaxed_delta"})

    def __init__(self, options: DecodingOptions, device: torch.device) -> None:
        super().__init__(options, device)
        self.topk, self.delta = options.relaxed_topk, options.relaxed_delta
        expect_thinking_tokens(*options.thinking_tokens)
        self.thinking_tokens = options.thinking_tokens
        """(begin, end) ids."""
        self.columns = [
            SlotColumn(DELTA_POOL, float, 0.0, is_pool=True),
            SlotColumn("thinking", int),
            SlotColumn("relaxed_topk", int, self.topk),
            SlotColumn("relaxed_limit", float, self.delta),
        ]
        self._warned: set[str] = set()

    @classmethod
    @override
    def is_enabled(cls, options: DecodingOptions) -> bool:
        return options.use_relaxed_acceptance_for_thinking

    @classmethod
    @override
    def label(cls, options: DecodingOptions) -> Label | None:
        settings = f"top {options.relaxed_topk}, delta {options.relaxed_delta:g}"
        return Label(
            name=cls.name,
            settings=settings,
            note="while a request thinks, drafts near the first choice stand too; texts may differ",
        )

    @classmethod
    @override
    def check(cls, options: DecodingOptions) -> None:
        end = options.thinking_end
        if end is None or end.end_token == NO_TOKEN or end.end_token in end.end:
            return
        raise ConfigError(
            f"mtp.thinking_end: expected the token that ends thinking, {end.end_token}, among its "
            f"ids beside use_relaxed_acceptance_for_thinking, got {list(end.end)}: what follows "
            f"would stay relaxed"
        )

    @classmethod
    @override
    def changes_text(cls, options: DecodingOptions, asked: Mapping[str, Any]) -> bool:
        topk = asked.get("relaxed_topk", options.relaxed_topk)
        if not asked.get("relaxed_acceptance", True) or topk == 1:
            return False
        is_strict = asked.get("ignore_eos", False) and asked.get("min_tokens", 0) > 0
        return is_greedy(asked) and not is_strict

    @override
    def verify(
        self, inputs: VerificationInputs, rules: AcceptanceRules, *, backend: Backend
    ) -> AcceptanceRules:
        slots = inputs.step.expect_slots()
        begin, end = self.thinking_tokens
        rule = RelaxedRule(
            slots=slots,
            delta_in_force=inputs.step.manager.mtp_relaxed_delta_pool,
            begin_token=begin,
            end_token=end,
        )
        tells_nothing = inputs.step.next_prompt_tokens is None
        if tells_nothing and inputs.input_ids is not None and inputs.layout.num_contexts:
            self._scan_prompts(inputs, inputs.input_ids, rule)
        return replace(rules, relaxed=rule)

    def _scan_prompts(
        self, inputs: VerificationInputs, input_ids: torch.Tensor, rule: RelaxedRule
    ) -> None:
        """Put each context in the phase behind its prompt rows: the last thinking token counts."""
        layout = inputs.layout
        num_contexts, num_rows = layout.num_contexts, layout.num_ctx_tokens
        rows = torch.arange(num_rows, device=input_ids.device)
        lens = layout.context_lens.to(torch.int64)
        owner = torch.searchsorted(lens.cumsum(0), rows, right=True)
        ids = input_ids[:num_rows]
        last = []
        for token in self.thinking_tokens:
            where = torch.where(ids == token, rows, -1)
            none = torch.full((num_contexts,), -1, dtype=rows.dtype, device=rows.device)
            last.append(none.scatter_reduce(0, owner, where, reduce="amax"))
        begin, end = last
        contexts = slice(0, num_contexts)
        thinking, delta = rule.phase(contexts)
        rule.set_phase(contexts, torch.where((begin < 0) & (end < 0), thinking, begin > end), delta)

    @override
    def slot_values(self, facts: RequestFacts, tokens: Sequence[int]) -> Mapping[str, Number]:
        is_relaxed = facts.options.get("relaxed_acceptance", True)
        if facts.stop.slot_ids is None:
            is_relaxed = False
            number = len({*facts.stop.device_ids, *facts.stop.ignored_ids})
            self._warn_once(
                "stop ids",
                f"request {facts.request_id} has {number} stop ids, and relaxed acceptance knows "
                f"{MAX_STOP_IDS} of a request: those with more are accepted strictly",
            )
        elif facts.stop.ignored_ids and facts.stop.min_tokens > 0:
            # the slot has no place for ids that are not held back
            is_relaxed = False
            self._warn_once(
                "ignored ends",
                f"request {facts.request_id} has ignore_eos beside min_tokens: such requests are "
                f"accepted strictly",
            )
        topk, limit = 1, 0.0
        if is_relaxed:
            topk = facts.options.get("relaxed_topk", self.topk)
            limit = facts.options.get("relaxed_delta", self.delta)
        # a preempted request starts over with its emitted tokens as part of the prompt
        thinking = thinking_after(tokens, *self.thinking_tokens)
        return {
            DELTA_POOL: limit if thinking else 0.0,
            "thinking": int(thinking),
            "relaxed_topk": topk,
            "relaxed_limit": limit,
        }

    def _warn_once(self, reason: str, why: str) -> None:
        """Log why a request is never relaxed, of the first one that has this reason."""
        if reason not in self._warned:
            self._warned.add(reason)
            _logger.warning(why)
