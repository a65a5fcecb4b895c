"""Seeded, batch-invariant operations of speculative decoding.

Each has a torch reference and Triton kernels. The names below are the public interface of the
library, which README.md in this folder documents with examples. They are imported lazily, so that
``import mtp_plugin.ops`` loads nothing else.
"""

from typing import TYPE_CHECKING

from mtp_plugin.lazy_imports import lazy_names

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
    from mtp_plugin.ops.penalties import penalize_logits as penalize_logits
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

_NAMES = {
    ".requests.thinking": "ThinkingEnd",
    "acceptance": "AcceptanceRules RelaxedRule accept",
    "backend": "Backend",
    "draft_inputs": "DraftKVLengths DraftWindows History TargetRows advance_and_build_inputs "
    "build_reused_inputs",
    "logit_mask": "mask_disallowed_tokens",
    "logit_rows": "LogitRows ThinkingRule",
    "logits_processor_state": "LogitsProcessorState",
    "logprobs": "LogprobEntries compute_logprobs",
    "lookup": "look_up_drafts",
    "penalties": "penalize_logits",
    "row_sums": "RowSums",
    "sampling": "DraftedBy ProposedDrafts RejectionResult TRUNCATION_SIZE TargetSamples VerifiedBy "
    "keep_draft_probs processed_scores rejection_sample sample_tokens",
    "slot_table": "OPS_COLUMNS build_slot_rows",
    "state_rollback": "mamba_state_selective_copy",
    "step": "Accepted DrafterInputs SlotRows StepLayout",
    "thinking_budget": "force_thinking_end update_thinking_state",
    "token_history": "update_token_history",
}
__all__ = " ".join(_NAMES.values()).split()

if not TYPE_CHECKING:  # a checker reads the imports above
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
