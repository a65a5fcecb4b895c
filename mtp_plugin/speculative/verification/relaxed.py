"""Relaxed verification: while a request thinks, drafts close to the argmax are accepted too."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from mtp_plugin.errors import ConfigError, MetadataError
from mtp_plugin.ops.acceptance import AcceptanceRules, RelaxedRule
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.step import SlotRows
from mtp_plugin.requests.columns import Number, SlotColumn
from mtp_plugin.requests.options import is_greedy
from mtp_plugin.requests.stopping import MAX_STOP_IDS
from mtp_plugin.requests.thinking import NO_TOKEN, expect_thinking_tokens, thinking_after
from mtp_plugin.speculative.host import DecodingOptions, RequestFacts
from mtp_plugin.speculative.metrics.acceptance import Label
from mtp_plugin.speculative.verification.mode import (
    DELTA_POOL,
    VerificationInputs,
    VerificationMode,
)

_logger = logging.getLogger("mtp_plugin")


class RelaxedVerification(VerificationMode):
    """Accept drafts among the ``relaxed_topk`` most probable tokens of a row, if their probability
    is at most ``relaxed_delta`` below the highest.

    Applies to greedy requests in their thinking phase; sampled and forced tokens are never relaxed.
    Stop ids, also ignored ones, are accepted only as the argmax. A request with more of them than
    fit a slot, or with ``ignore_eos`` and ``min_tokens``, is verified strictly, which is logged
    once.

    Columns: ``mtp_relaxed_delta_pool`` (the delta in force, 0 outside the thinking phase; a host
    engine may write it), ``thinking`` (follows it), ``relaxed_topk`` and ``relaxed_limit`` (options
    of the request, or of the config).
    """

    name = "relaxed"
    reads_rows = False
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
            note="drafts close to the argmax are accepted while a request thinks; not lossless",
        )

    @classmethod
    @override
    def check(cls, options: DecodingOptions) -> None:
        end = options.thinking_end
        if end is None or end.end_token == NO_TOKEN or end.end_token in end.end:
            return
        raise ConfigError(
            f"mtp.thinking_end: expected the token that ends thinking, {end.end_token}, among its "
            f"ids with use_relaxed_acceptance_for_thinking, got {list(end.end)}; later tokens "
            f"would be relaxed too"
        )

    @classmethod
    @override
    def changes_text(cls, options: DecodingOptions, requested: Mapping[str, Any]) -> bool:
        topk = requested.get("relaxed_topk", options.relaxed_topk)
        if not requested.get("relaxed_acceptance", True) or topk == 1:
            return False
        is_strict = requested.get("ignore_eos", False) and requested.get("min_tokens", 0) > 0
        return is_greedy(requested) and not is_strict

    @override
    def verify(
        self, inputs: VerificationInputs, rules: AcceptanceRules, *, backend: Backend
    ) -> AcceptanceRules:
        slots, delta = inputs.expect_slots(), inputs.delta_in_force
        if delta is None:
            raise MetadataError(
                f"relaxed acceptance: expected the manager's {DELTA_POOL}, got None"
            )
        rule = RelaxedRule(slots, delta, *self.thinking_tokens)
        if inputs.prompt_ids is not None and inputs.layout.num_contexts > 0:
            self._scan_prompts(inputs, inputs.prompt_ids, rule)
        return replace(rules, relaxed=rule)

    def follow_phase(
        self,
        tokens: torch.Tensor,
        is_output: torch.Tensor,
        slots: SlotRows,
        delta_in_force: torch.Tensor,
    ) -> None:
        """Update the phase of requests after a step that the verifier did not run.

        Args:
            tokens: [R] integer, one of each request. is_output: [R] bool; False: no output token.
            slots: of the requests. delta_in_force: [S] float32.
        """
        begin, end = self.thinking_tokens
        rule = RelaxedRule(slots, delta_in_force, begin, end)
        requests = slice(0, tokens.shape[0])
        thinking, _ = rule.phase(requests)
        thinking = (thinking | (is_output & (tokens == begin))) & ~(is_output & (tokens == end))
        rule.set_phase(requests, thinking, slots.read("relaxed_limit", requests))

    def _scan_prompts(
        self, inputs: VerificationInputs, input_ids: torch.Tensor, rule: RelaxedRule
    ) -> None:
        """Set the phase of each context by the last thinking token of its prompt rows, if any."""
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
                f"a request has {number} stop ids, and relaxed acceptance serves at most "
                f"{MAX_STOP_IDS}; requests with more are verified strictly",
            )
        elif facts.stop.ignored_ids and facts.stop.min_tokens > 0:
            # a slot holds only stop ids that min_tokens masks
            is_relaxed = False
            self._warn_once(
                "ignored stop ids",
                "a request has ignore_eos and min_tokens; such requests are verified strictly",
            )
        topk, limit = 1, 0.0
        if is_relaxed:
            topk = facts.options.get("relaxed_topk", self.topk)
            limit = facts.options.get("relaxed_delta", self.delta)
        # a preempted request starts over with its output as part of the prompt
        thinking = thinking_after(tokens, *self.thinking_tokens)
        return {
            DELTA_POOL: limit if thinking else 0.0,
            "thinking": int(thinking),
            "relaxed_topk": topk,
            "relaxed_limit": limit,
        }

    def _warn_once(self, reason: str, message: str) -> None:
        """Log why a request is verified strictly, for the first request with this reason."""
        if reason not in self._warned:
            self._warned.add(reason)
            _logger.warning(message)
