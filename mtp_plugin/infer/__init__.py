"""Target-only decoding: the simplest correct decoder, and the oracle of losslessness."""

from __future__ import annotations

from mtp_plugin.infer.decoding import Continuation, Decoded, decode, greedy_decode
from mtp_plugin.infer.inferencer import (
    BasicInferencer,
    DecodeOutput,
    Inferencer,
    PrefillOutput,
)
from mtp_plugin.infer.kv_cache import DynamicKVCache, KVCache, KVState
from mtp_plugin.infer.language_model import LanguageModel, TransformersLanguageModel
from mtp_plugin.infer.logprobs import Logprobs
from mtp_plugin.infer.sample_strategy import (
    GreedySampleStrategy,
    RequestSampleStrategy,
    SampleStrategy,
)
from mtp_plugin.infer.sampling_rule import SamplingRule
from mtp_plugin.infer.thinking import Thinking

__all__ = [
    "BasicInferencer",
    "Continuation",
    "DecodeOutput",
    "Decoded",
    "DynamicKVCache",
    "GreedySampleStrategy",
    "Inferencer",
    "KVCache",
    "KVState",
    "LanguageModel",
    "Logprobs",
    "PrefillOutput",
    "RequestSampleStrategy",
    "SampleStrategy",
    "SamplingRule",
    "Thinking",
    "TransformersLanguageModel",
    "decode",
    "greedy_decode",
]
