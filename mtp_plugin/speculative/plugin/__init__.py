"""The interface of speculative-decoding plugins, its implementations, and their registry."""

from mtp_plugin.speculative.plugin.contract import (
    DraftPlan,
    HostFacts,
    ReplayCheck,
    SpeculativePieces,
    SpeculativePlugin,
)
from mtp_plugin.speculative.plugin.mtp import MTPPlugin
from mtp_plugin.speculative.plugin.none import NO_SPECULATION, NoSpeculationPlugin
from mtp_plugin.speculative.plugin.registry import (
    ENTRY_POINT_GROUP,
    build_pieces,
    find_plugin,
    make_plan,
    register_drafter,
    register_plugin,
    unregister_drafter,
    unregister_plugin,
)

__all__ = [
    "ENTRY_POINT_GROUP",
    "NO_SPECULATION",
    "DraftPlan",
    "HostFacts",
    "MTPPlugin",
    "NoSpeculationPlugin",
    "ReplayCheck",
    "SpeculativePieces",
    "SpeculativePlugin",
    "build_pieces",
    "find_plugin",
    "make_plan",
    "register_drafter",
    "register_plugin",
    "unregister_drafter",
    "unregister_plugin",
]
