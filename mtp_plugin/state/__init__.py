"""Request -> slot -> pool rows."""

from mtp_plugin.state.manager import MTPHiddenStatesManager
from mtp_plugin.state.slots import SlotManager

__all__ = ["MTPHiddenStatesManager", "SlotManager"]
