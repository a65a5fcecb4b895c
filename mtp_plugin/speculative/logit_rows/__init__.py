"""Rows of logits: whose they are, for which token, and as what they are read."""

from mtp_plugin.requests.options import GREEDY_BELOW
from mtp_plugin.speculative.logit_rows.bans import ban_next, banned
from mtp_plugin.speculative.logit_rows.contract import DrawnRows
from mtp_plugin.speculative.logit_rows.edits import EDITED_OPTIONS, edited
from mtp_plugin.speculative.logit_rows.thinking import ThinkingRule, ThinkingState

__all__ = [
    "EDITED_OPTIONS",
    "GREEDY_BELOW",
    "DrawnRows",
    "ThinkingRule",
    "ThinkingState",
    "ban_next",
    "banned",
    "edited",
]
