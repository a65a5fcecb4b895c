"""Target logits -> accepted tokens: one file a mode, their registry, and a worker's set of them."""

from mtp_plugin.speculative.verification.draft_rules import DraftPass
from mtp_plugin.speculative.verification.mode import VerificationInputs, VerificationMode
from mtp_plugin.speculative.verification.registry import (
    BUILT,
    MODES,
    changes_text,
    check_modes,
    label_of,
    make_modes,
    most_draft_probs,
    refusals,
)
from mtp_plugin.speculative.verification.rejection import RejectionVerification
from mtp_plugin.speculative.verification.relaxed import RelaxedVerification
from mtp_plugin.speculative.verification.strict import StrictVerification
from mtp_plugin.speculative.verification.verifier import Verifier

__all__ = [
    "BUILT",
    "MODES",
    "DraftPass",
    "RejectionVerification",
    "RelaxedVerification",
    "StrictVerification",
    "VerificationInputs",
    "VerificationMode",
    "Verifier",
    "changes_text",
    "check_modes",
    "label_of",
    "make_modes",
    "most_draft_probs",
    "refusals",
]
