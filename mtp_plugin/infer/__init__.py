"""Non-speculative decoding (the reference for lossless tests) and minimal speculative decoding."""

from __future__ import annotations

from mtp_plugin.infer.decoding import Continuation, Decoded, decode
from mtp_plugin.infer.inferencer import (
    BasicInferencer,
    DecodeOutput,
    Inferencer,
    PrefillOutput,
)
from mtp_plugin.infer.kv_cache import DynamicKVCache, KVCache, KVState
from mtp_plugin.infer.language_model import LanguageModel, TransformersLanguageModel
from mtp_plugin.infer.logprobs import ReferenceLogprobs
from mtp_plugin.infer.mtp_head import MTPDrafter, MTPModel, MTPTarget
from mtp_plugin.infer.noise import Role
from mtp_plugin.infer.sample_strategy import (
    GreedySampleStrategy,
    RandomSampleStrategy,
    RequestSampleStrategy,
    SampleStrategy,
)
from mtp_plugin.infer.sampling_rule import SamplingRule
from mtp_plugin.infer.speculation import (
    Draft,
    Drafter,
    Scorer,
    Speculated,
    coupled,
    rejection,
    speculative_decode,
)
from mtp_plugin.infer.thinking import Thinking

__all__ = [
    "BasicInferencer",
    "Continuation",
    "DecodeOutput",
    "Decoded",
    "Draft",
    "Drafter",
    "DynamicKVCache",
    "GreedySampleStrategy",
    "Inferencer",
    "KVCache",
    "KVState",
    "LanguageModel",
    "MTPDrafter",
    "MTPModel",
    "MTPTarget",
    "PrefillOutput",
    "RandomSampleStrategy",
    "ReferenceLogprobs",
    "RequestSampleStrategy",
    "Role",
    "SampleStrategy",
    "SamplingRule",
    "Scorer",
    "Speculated",
    "Thinking",
    "TransformersLanguageModel",
    "coupled",
    "decode",
    "rejection",
    "speculative_decode",
]
