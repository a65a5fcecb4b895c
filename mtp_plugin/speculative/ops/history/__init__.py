"""Accepted tokens -> advanced per-slot history."""

from mtp_plugin.speculative.ops.history.reference import advance_history

__all__ = ["advance_history"]
