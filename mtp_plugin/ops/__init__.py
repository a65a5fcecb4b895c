"""Seeded, batch-invariant operations of speculative decoding.

Each has a torch reference and Triton kernels. The names below are the public interface of the
library, which README.md in this folder documents with examples. They are imported lazily, so that
``import mtp_plugin.ops`` loads nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtp_plugin.ops.acceptance import AcceptanceRules as AcceptanceRules
    from mtp_plugin.ops.acceptance import RelaxedRule as RelaxedRule
    from mtp_plugin.ops.acceptance import accept as accept
    from mtp_plugin.ops.backend import Backend as Backend
    from mtp_plugin.ops.draft_inputs import DraftKVLengths as DraftKVLengths
    from mtp_plugin.ops.draft_inputs import DraftWindows as DraftWindows
    from mtp_plugin.ops.draft_inputs import History as History
    from mtp_plugin.ops.draft_inputs import TargetRows as TargetRows
    from mtp_plugin.ops.draft_inputs import advance_and_build_inputs as advance_and_build_inputs
    from mtp_plugin.ops.draft_inputs import build_reused_inputs as build_reused_inputs
    from mtp_plugin.ops.logit_mask import mask_disallowed_tokens as mask_disallowed_tokens
    from mtp_plugin.ops.logit_rows import LogitRows as LogitRows
    from mtp_plugin.ops.logit_rows import ThinkingRule as ThinkingRule
    from mtp_plugin.ops.logits_processor_state import LogitsProcessorState as LogitsProcessorState
    from mtp_plugin.ops.logprobs import LogprobEntries as LogprobEntries
    from mtp_plugin.ops.logprobs import compute_logprobs as compute_logprobs
    from mtp_plugin.ops.lookup import look_up_drafts as look_up_drafts
    from mtp_plugin.ops.row_sums import RowSums as RowSums
    from mtp_plugin.ops.sampling import TRUNCATION_SIZE as TRUNCATION_SIZE
    from mtp_plugin.ops.sampling import DraftedBy as DraftedBy
    from mtp_plugin.ops.sampling import ProposedDrafts as ProposedDrafts
    from mtp_plugin.ops.sampling import RejectionResult as RejectionResult
    from mtp_plugin.ops.sampling import TargetSamples as TargetSamples
    from mtp_plugin.ops.sampling import VerifiedBy as VerifiedBy
    from mtp_plugin.ops.sampling import keep_draft_probs as keep_draft_probs
    from mtp_plugin.ops.sampling import processed_scores as processed_scores
    from mtp_plugin.ops.sampling import rejection_sample as rejection_sample
    from mtp_plugin.ops.sampling import sample_tokens as sample_tokens
    from mtp_plugin.ops.slot_table import OPS_COLUMNS as OPS_COLUMNS
    from mtp_plugin.ops.slot_table import build_slot_rows as build_slot_rows
    from mtp_plugin.ops.state_rollback import (
        mamba_state_selective_copy as mamba_state_selective_copy,
    )
    from mtp_plugin.ops.step import Accepted as Accepted
    from mtp_plugin.ops.step import DrafterInputs as DrafterInputs
    from mtp_plugin.ops.step import SlotRows as SlotRows
    from mtp_plugin.ops.step import StepLayout as StepLayout
    from mtp_plugin.ops.thinking_budget import force_thinking_end as force_thinking_end
    from mtp_plugin.ops.thinking_budget import update_thinking_state as update_thinking_state
    from mtp_plugin.ops.token_history import update_token_history as update_token_history
    from mtp_plugin.requests.thinking import ThinkingEnd as ThinkingEnd

_MODULES = {
    "AcceptanceRules": "mtp_plugin.ops.acceptance",
    "Accepted": "mtp_plugin.ops.step",
    "Backend": "mtp_plugin.ops.backend",
    "DraftKVLengths": "mtp_plugin.ops.draft_inputs",
    "DraftWindows": "mtp_plugin.ops.draft_inputs",
    "DraftedBy": "mtp_plugin.ops.sampling",
    "DrafterInputs": "mtp_plugin.ops.step",
    "History": "mtp_plugin.ops.draft_inputs",
    "LogitRows": "mtp_plugin.ops.logit_rows",
    "LogitsProcessorState": "mtp_plugin.ops.logits_processor_state",
    "LogprobEntries": "mtp_plugin.ops.logprobs",
    "OPS_COLUMNS": "mtp_plugin.ops.slot_table",
    "ProposedDrafts": "mtp_plugin.ops.sampling",
    "RejectionResult": "mtp_plugin.ops.sampling",
    "RelaxedRule": "mtp_plugin.ops.acceptance",
    "RowSums": "mtp_plugin.ops.row_sums",
    "SlotRows": "mtp_plugin.ops.step",
    "StepLayout": "mtp_plugin.ops.step",
    "TRUNCATION_SIZE": "mtp_plugin.ops.sampling",
    "TargetRows": "mtp_plugin.ops.draft_inputs",
    "TargetSamples": "mtp_plugin.ops.sampling",
    "ThinkingEnd": "mtp_plugin.requests.thinking",
    "ThinkingRule": "mtp_plugin.ops.logit_rows",
    "VerifiedBy": "mtp_plugin.ops.sampling",
    "accept": "mtp_plugin.ops.acceptance",
    "advance_and_build_inputs": "mtp_plugin.ops.draft_inputs",
    "build_reused_inputs": "mtp_plugin.ops.draft_inputs",
    "build_slot_rows": "mtp_plugin.ops.slot_table",
    "compute_logprobs": "mtp_plugin.ops.logprobs",
    "force_thinking_end": "mtp_plugin.ops.thinking_budget",
    "keep_draft_probs": "mtp_plugin.ops.sampling",
    "look_up_drafts": "mtp_plugin.ops.lookup",
    "mamba_state_selective_copy": "mtp_plugin.ops.state_rollback",
    "mask_disallowed_tokens": "mtp_plugin.ops.logit_mask",
    "processed_scores": "mtp_plugin.ops.sampling",
    "rejection_sample": "mtp_plugin.ops.sampling",
    "sample_tokens": "mtp_plugin.ops.sampling",
    "update_thinking_state": "mtp_plugin.ops.thinking_budget",
    "update_token_history": "mtp_plugin.ops.token_history",
}

__all__ = [
    "OPS_COLUMNS",
    "TRUNCATION_SIZE",
    "AcceptanceRules",
    "Accepted",
    "Backend",
    "DraftKVLengths",
    "DraftWindows",
    "DraftedBy",
    "DrafterInputs",
    "History",
    "LogitRows",
    "LogitsProcessorState",
    "LogprobEntries",
    "ProposedDrafts",
    "RejectionResult",
    "RelaxedRule",
    "RowSums",
    "SlotRows",
    "StepLayout",
    "TargetRows",
    "TargetSamples",
    "ThinkingEnd",
    "ThinkingRule",
    "VerifiedBy",
    "accept",
    "advance_and_build_inputs",
    "build_reused_inputs",
    "build_slot_rows",
    "compute_logprobs",
    "force_thinking_end",
    "keep_draft_probs",
    "look_up_drafts",
    "mamba_state_selective_copy",
    "mask_disallowed_tokens",
    "processed_scores",
    "rejection_sample",
    "sample_tokens",
    "update_thinking_state",
    "update_token_history",
]

if not TYPE_CHECKING:  # a checker reads the imports above

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
