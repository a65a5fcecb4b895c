"""The public names for writing a drafter or a host engine, all in one module.

A drafter is a `CustomDrafter`, see integration/examples/lookup.py. One with state, layers or rules
of its own is a `SpeculativePlugin` that builds `SpeculativePieces`, see integration/examples/ngram.
"""

from mtp_plugin.config import SpeculativeDecodingMode
from mtp_plugin.errors import ConfigError
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.step import Accepted, StepLayout
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.states import FinishReason, RequestState
from mtp_plugin.requests.stopping import StopRule
from mtp_plugin.speculative.draft_length.controller import DraftState
from mtp_plugin.speculative.drafting import (
    CustomDrafter,
    make_verification_inputs,
    propose_drafts,
)
from mtp_plugin.speculative.host import (
    DecodingOptions,
    HostStep,
    PlainAttentionMetadata,
    PlainBatch,
    PlainRequest,
    RequestFacts,
    SpecRequest,
)
from mtp_plugin.speculative.metadata import MTPSpecMetadata
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
    register_drafter,
    register_plugin,
    unregister_drafter,
    unregister_plugin,
)
from mtp_plugin.speculative.sampler import MTPSampler, SamplerHooks
from mtp_plugin.speculative.state import SlotStateManager
from mtp_plugin.speculative.step_output import StepOutput, StepResult
from mtp_plugin.speculative.verification import (
    CustomVerification,
    StrictVerification,
    VerificationInputs,
    VerificationMode,
    Verifier,
    custom_verifications,
    register_verification,
    unregister_verification,
)

__all__ = [
    "ENTRY_POINT_GROUP",
    "NO_SPECULATION",
    "Accepted",
    "Backend",
    "ConfigError",
    "CustomDrafter",
    "CustomVerification",
    "DecodingOptions",
    "DraftPlan",
    "DraftState",
    "FinishReason",
    "HostFacts",
    "HostStep",
    "MTPPlugin",
    "MTPSampler",
    "MTPSpecMetadata",
    "NoSpeculationPlugin",
    "PlainAttentionMetadata",
    "PlainBatch",
    "PlainRequest",
    "ReplayCheck",
    "RequestFacts",
    "RequestState",
    "SamplerHooks",
    "SamplingParams",
    "SlotStateManager",
    "SpecRequest",
    "SpeculativeDecodingMode",
    "SpeculativePieces",
    "SpeculativePlugin",
    "StepLayout",
    "StepOutput",
    "StepResult",
    "StopRule",
    "StrictVerification",
    "VerificationInputs",
    "VerificationMode",
    "Verifier",
    "custom_verifications",
    "find_plugin",
    "make_verification_inputs",
    "propose_drafts",
    "register_drafter",
    "register_plugin",
    "register_verification",
    "unregister_drafter",
    "unregister_plugin",
    "unregister_verification",
]
