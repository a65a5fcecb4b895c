"""Per-request state that persists across steps: the slot table and pools of past hidden states."""

from mtp_plugin.speculative.state.hidden_states import MTPHiddenStatesManager
from mtp_plugin.speculative.state.manager import SlotStateManager
from mtp_plugin.speculative.state.slot_table import SlotTable

__all__ = ["MTPHiddenStatesManager", "SlotStateManager", "SlotTable"]
