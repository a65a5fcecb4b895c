"""How another way to speculate or another engine plugs in: pieces, registry, requests' facts."""

from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.states import FinishReason, RequestState
from mtp_plugin.requests.stopping import StopRule
from mtp_plugin.speculative.draft_length.draft_state import DraftState
from mtp_plugin.speculative.host import (
    PlainAttentionMetadata,
    PlainBatch,
    PlainRequest,
    RequestFacts,
    SpecRequest,
)
from mtp_plugin.speculative.plugin import (
    ENTRY_POINT_GROUP,
    NO_SPECULATION,
    DraftPlan,
    HostFacts,
    MTPPlugin,
    NoSpeculationPlugin,
    ReplayCheck,
    SpeculativePieces,
    SpeculativePlugin,
    find_plugin,
    register_plugin,
    unregister_plugin,
)
from mtp_plugin.speculative.step import StepResult

__all__ = [
    "ENTRY_POINT_GROUP",
    "NO_SPECULATION",
    "DraftPlan",
    "DraftState",
    "FinishReason",
    "HostFacts",
    "MTPPlugin",
    "NoSpeculationPlugin",
    "PlainAttentionMetadata",
    "PlainBatch",
    "PlainRequest",
    "ReplayCheck",
    "RequestFacts",
    "RequestState",
    "SamplingParams",
    "SpecRequest",
    "SpeculativePieces",
    "SpeculativePlugin",
    "StepResult",
    "StopRule",
    "find_plugin",
    "register_plugin",
    "unregister_plugin",
]
