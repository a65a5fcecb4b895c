"""Rows of logits: which request and token they belong to, and how they are processed.

A *row* is one of the [N, V] rows of logits of a step. Context requests have one row each; then each
generation request has K+1 consecutive rows, of which row i follows its first i draft tokens.
:class:`LogitRows` maps rows to requests and to the absolute index of the token that a row samples.

Per-request options are read on the device from the slot table. What does not fit a slot lies in the
pools of `LogitsProcessorState`, one row per request that needs it. Every op that reads logits
processes them where it loads them, in this order:

1. NaN becomes -inf.
2. The logit bias is added.
3. Tokens that are not allowed become -inf (``allowed_token_ids``, ``bad_token_ids``).
4. The repetition penalty scales tokens seen in prompt or output; presence and frequency penalties
   are subtracted from tokens of the output. Draft tokens before the row count as output.

Two rules depend on the tokens just before a row; `ops.logit_mask` applies them to the rows that
verify drafts, and a draft mask (`DraftMask`) to the drafts:

5. Tokens that would complete a bad word are disallowed.
6. Stop ids are disallowed before ``min_tokens``, unless no allowed token would remain.

A thinking budget (:class:`ThinkingRule`) forces single tokens: after the budget is spent, the
tokens of the end-of-thinking sequence follow one by one.

Modules: ``rows``, ``processing`` (steps 1 to 6 in torch) and ``thinking``; the ``*_triton`` modules
have the same steps for kernels.
"""

from mtp_plugin.ops.logit_rows.processing import (
    LOGITS_PROCESSING_OPTIONS,
    apply_penalties,
    disallowed_tokens,
    early_stops,
    process_logits,
    update_draft_mask,
)
from mtp_plugin.ops.logit_rows.rows import LogitRows
from mtp_plugin.ops.logit_rows.thinking import ThinkingRule, ThinkingState
from mtp_plugin.requests.options import GREEDY_BELOW

__all__ = [
    "GREEDY_BELOW",
    "LOGITS_PROCESSING_OPTIONS",
    "LogitRows",
    "ThinkingRule",
    "ThinkingState",
    "apply_penalties",
    "disallowed_tokens",
    "early_stops",
    "process_logits",
    "update_draft_mask",
]
