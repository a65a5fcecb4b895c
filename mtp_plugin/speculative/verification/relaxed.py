"""Relaxed verification: while a request thinks, a draft may be as good as the first choice."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from mtp_plugin.kernels.backend import Backend
from mtp_plugin.requests.stop_ids import MAX_STOP_IDS, NO_STOP, TOO_MANY_STOPS, stop_ids_of
from mtp_plugin.requests.thinking import thinking_after, thinking_tokens_of
from mtp_plugin.speculative.host import read_slots
from mtp_plugin.speculative.metrics.acceptance import Label
from mtp_plugin.speculative.ops.acceptance import AcceptanceRules, RelaxedRule, Verdict
from mtp_plugin.speculative.step import StepLayout
from mtp_plugin.speculative.verification.contract import (
    ModeOptions,
    SlotColumn,
    VerificationInputs,
    VerificationMode,
)

_logger = logging.getLogger("mtp_plugin")


class RelaxedVerification(VerificationMode):
    """Takes drafts among the ``relaxed_topk`` best, within ``relaxed_delta`` of the best one.

    It claims the rows of thinking requests. Its pools: ``mtp_relaxed_delta_pool`` (the delta in
    force: 0 outside the thinking phase; a host that writes another is obeyed), ``thinking_pool``
    (follows it), ``relaxed_topk_pool`` and ``relaxed_limit_pool`` (the request's own), and
    ``stop_ids_pool`` (ids accepted only as first choice, read where the host sets no
    ``row_parameters``). A request with more stop ids than a row holds is accepted strictly there,
    which is logged.
    """

    name = "relaxed"

    def __init__(self, options: ModeOptions) -> None:
        super().__init__(options)
        self.topk, self.delta = self._limits(options.config)
        self.thinking_tokens = thinking_tokens_of(options.config, options.thinking_tokens)
        """(begin, end) ids."""
        self.columns = (
            SlotColumn("mtp_relaxed_delta_pool", torch.float32, 0.0),
            SlotColumn("thinking_pool", torch.int8, 0),
            SlotColumn("relaxed_topk_pool", torch.int32, self.topk),
            SlotColumn("relaxed_limit_pool", torch.float32, self.delta),
            SlotColumn("stop_ids_pool", torch.int32, NO_STOP, MAX_STOP_IDS),
        )
        self._told_of_stop_ids = False

    @classmethod
    @override
    def is_enabled(cls, config: Any) -> bool:
        return bool(getattr(config, "use_relaxed_acceptance_for_thinking", False))

    @classmethod
    @override
    def label(cls, config: Any, max_draft_len: int) -> Label | None:
        topk, delta = cls._limits(config)
        return Label(
            name=cls.name,
            settings=f"top {topk}, delta {delta:g}",
            note="while a request thinks, drafts near the first choice stand too; texts may differ",
        )

    @staticmethod
    def _limits(config: Any) -> tuple[int, float]:
        topk, delta = getattr(config, "relaxed_topk", 1), getattr(config, "relaxed_delta", 0.0)
        return int(topk), float(delta)

    # ---- a step -----------------------------------------------------------------------------

    @override
    def verify(
        self,
        layout: StepLayout,
        inputs: VerificationInputs,
        rules: AcceptanceRules,
        *,
        backend: Backend,
    ) -> AcceptanceRules:
        manager, slots = read_slots(inputs.spec_metadata, layout)
        thinking, limit = self._phase(manager, slots)
        if inputs.scans_prompts and inputs.input_ids is not None:
            thinking = self._scan_prompts(layout, inputs.input_ids, thinking)
        topk = manager.relaxed_topk_pool[slots]
        if inputs.parameters is not None:
            stop_ids = inputs.parameters.stop_ids
        else:
            stop_ids = manager.stop_ids_pool[slots]
            topk = topk.masked_fill(stop_ids[:, 0] == TOO_MANY_STOPS, 1)
        begin, end = self.thinking_tokens
        rule = RelaxedRule(
            thinking=thinking,
            topk=topk,
            delta=limit,
            stop_ids=stop_ids,
            begin_token=begin,
            end_token=end,
        )
        return replace(rules, relaxed=rule)

    @override
    def settle(
        self,
        layout: StepLayout,
        inputs: VerificationInputs,
        rules: AcceptanceRules,
        verdict: Verdict,
    ) -> None:
        rule, thinking = rules.relaxed, verdict.thinking
        if rule is None or thinking is None:
            return
        manager, slots = read_slots(inputs.spec_metadata, layout)
        manager.thinking_pool[slots] = thinking.to(torch.int8)
        manager.mtp_relaxed_delta_pool[slots] = torch.where(thinking, rule.delta, 0.0)

    @staticmethod
    def _phase(manager: Any, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which requests think [R] bool, and the delta that each has or would have [R] float32.

        The delta in force says so, whoever wrote it: 0 ends the phase, anything above begins it.
        """
        limit = manager.relaxed_limit_pool[slots]
        in_force = manager.mtp_relaxed_delta_pool[slots]
        begins = in_force > 0
        # without a delta of its own a phase shows in the other pool alone
        unseen = (manager.thinking_pool[slots] > 0) & (limit == 0)
        return begins | unseen, torch.where(begins, in_force, limit)

    def _scan_prompts(
        self, layout: StepLayout, input_ids: torch.Tensor, thinking: torch.Tensor
    ) -> torch.Tensor:
        """The phase of each context after its prompt rows: the last thinking token counts."""
        num_contexts, num_rows = layout.num_contexts, layout.num_ctx_tokens
        if num_contexts == 0:
            return thinking
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
        contexts = torch.where((begin < 0) & (end < 0), thinking[:num_contexts], begin > end)
        return torch.cat([contexts, thinking[num_contexts:]])

    # ---- a request --------------------------------------------------------------------------

    @override
    def slot_values(self, request: Any) -> Mapping[str, float | Sequence[float]]:
        is_relaxed = getattr(request, "py_relaxed_acceptance", True)
        topk, limit = (self.topk, self.delta) if is_relaxed else (1, 0.0)
        # a preempted request starts over with its emitted tokens as part of the prompt
        thinking = thinking_after(request.get_tokens(0), *self.thinking_tokens)
        return {
            "mtp_relaxed_delta_pool": limit if thinking else 0.0,
            "thinking_pool": int(thinking),
            "relaxed_topk_pool": topk,
            "relaxed_limit_pool": limit,
            "stop_ids_pool": self._stop_ids(request),
        }

    def _stop_ids(self, request: Any) -> list[int]:
        stops = stop_ids_of(request)
        if len(stops) <= MAX_STOP_IDS:
            return stops
        if not self._told_of_stop_ids:
            self._told_of_stop_ids = True
            _logger.warning(
                "request %s has %d stop ids, and relaxed acceptance keeps %d of a request: where "
                "the host sets no row_parameters, requests with more are accepted strictly",
                request.request_id,
                len(stops),
                MAX_STOP_IDS,
            )
        return [TOO_MANY_STOPS]
