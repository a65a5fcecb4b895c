"""Request -> slot -> pool rows."""

from mtp_plugin.state.draft_len import read_draft_len
from mtp_plugin.state.manager import MTPHiddenStatesManager
from mtp_plugin.state.slots import SlotManager

__all__ = ["MTPHiddenStatesManager", "SlotManager", "read_draft_len"]
