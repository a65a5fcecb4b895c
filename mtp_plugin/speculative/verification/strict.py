"""Strict verification: a draft stands while it is the target's own first choice."""

from __future__ import annotations

from typing_extensions import override

from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.ops.acceptance import AcceptanceRules
from mtp_plugin.speculative.verification.contract import VerificationInputs, VerificationMode


class StrictVerification(VerificationMode):
    """What judges every row that no other mode claims.

    Of greedy requests ``verification: coupled`` is this.
    """

    name = "strict"
    verification = "coupled"

    @override
    def verify(
        self, inputs: VerificationInputs, rules: AcceptanceRules, *, backend: Backend
    ) -> AcceptanceRules:
        return rules
