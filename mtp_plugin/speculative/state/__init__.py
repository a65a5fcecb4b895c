"""What is kept per request across steps: the slot table, and vanilla's past pairs."""

from mtp_plugin.speculative.state.manager import MTPHiddenStatesManager, SlotStateManager
from mtp_plugin.speculative.state.slot_table import SlotTable

__all__ = ["MTPHiddenStatesManager", "SlotStateManager", "SlotTable"]
