"""Strict verification: a draft is accepted if it is the target token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from typing_extensions import override

from mtp_plugin.ops.acceptance import AcceptanceRules
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.sampling import DRAFT_COLUMNS, DraftedBy, VerifiedBy
from mtp_plugin.requests.columns import Number
from mtp_plugin.speculative.host import DecodingOptions, RequestFacts
from mtp_plugin.speculative.verification.method_choice import MethodChoice
from mtp_plugin.speculative.verification.mode import VerificationInputs, VerificationMode
from mtp_plugin.verifications import codes, custom_codes


class StrictVerification(VerificationMode):
    """Accepts a draft if it equals the target token: greedy requests, and those with ``coupled``.

    These are all rows that no other mode verifies. Its slot-table columns hold each request's
    verification method and kind of drafts.
    """

    name = "strict"
    verifications = ("coupled",)
    columns = DRAFT_COLUMNS
    reads_tokens = False
    reads_rows = False
    reads_method = True
    served_options = frozenset({"verification", "draft_sampling"})

    def __init__(self, options: DecodingOptions, device: torch.device) -> None:
        super().__init__(options, device)
        self.method_choice = MethodChoice(options.mtp)
        self.codes = {**codes(), **custom_codes()}

    @cached_property
    @override
    def methods(self) -> frozenset[str]:
        return super().methods & {*self.method_choice.mtp.verifications}

    @classmethod
    @override
    def is_enabled(cls, options: DecodingOptions) -> bool:
        return not options.mtp.is_synthetic

    @override
    def verify(
        self, inputs: VerificationInputs, rules: AcceptanceRules, *, backend: Backend
    ) -> AcceptanceRules:
        return rules

    @override
    def refusals(self, requested: Mapping[str, Any]) -> Iterable[str]:
        return self.method_choice.refusals(requested)

    @override
    def slot_values(self, facts: RequestFacts, tokens: Sequence[int]) -> Mapping[str, Number]:
        verified_by, drafted_by = self.method_choice.resolve(facts.options)
        return {
            # a method without a code is that of all requests
            "verification": self.codes.get(verified_by, VerifiedBy.COUPLED),
            "draft_sampling": DraftedBy[drafted_by.upper()],
        }
