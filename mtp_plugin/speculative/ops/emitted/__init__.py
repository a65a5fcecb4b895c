"""Emitted tokens -> what slots and pools know of a request's text."""

from mtp_plugin.speculative.ops.emitted.door import note_emitted

__all__ = ["note_emitted"]
