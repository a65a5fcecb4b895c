"""Request -> slot -> pool rows."""

from mtp_plugin.speculative.state.draft_len import read_draft_len
from mtp_plugin.speculative.state.manager import MTPHiddenStatesManager

__all__ = ["MTPHiddenStatesManager", "read_draft_len"]
