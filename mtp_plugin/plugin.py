"""How another way to speculate plugs in: the contract of its pieces, and the registry."""

from mtp_plugin.speculative.plugin import (
    ENTRY_POINT_GROUP,
    NO_SPECULATION,
    DraftPlan,
    HostFacts,
    MTPPlugin,
    NoSpeculationPlugin,
    SpeculativePieces,
    SpeculativePlugin,
    find_plugin,
    register_plugin,
    unregister_plugin,
)

__all__ = [
    "ENTRY_POINT_GROUP",
    "NO_SPECULATION",
    "DraftPlan",
    "HostFacts",
    "MTPPlugin",
    "NoSpeculationPlugin",
    "SpeculativePieces",
    "SpeculativePlugin",
    "find_plugin",
    "register_plugin",
    "unregister_plugin",
]
