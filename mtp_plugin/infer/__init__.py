"""Target-only decoding: the simplest correct decoder, and the oracle of losslessness."""

from __future__ import annotations

from mtp_plugin.infer.greedy import greedy_decode
from mtp_plugin.infer.inferencer import (
    BasicInferencer,
    ChunkwiseInferencer,
    DecodeOutput,
    Inferencer,
    PrefillOutput,
)
from mtp_plugin.infer.kv_cache import DynamicKVCache, KVCache, KVState
from mtp_plugin.infer.language_model import LanguageModel, TransformersLanguageModel
from mtp_plugin.infer.sample_strategy import (
    GreedySampleStrategy,
    MultinomialSampleStrategy,
    SampleStrategy,
)

__all__ = [
    "BasicInferencer",
    "ChunkwiseInferencer",
    "DecodeOutput",
    "DynamicKVCache",
    "GreedySampleStrategy",
    "Inferencer",
    "KVCache",
    "KVState",
    "LanguageModel",
    "MultinomialSampleStrategy",
    "PrefillOutput",
    "SampleStrategy",
    "TransformersLanguageModel",
    "greedy_decode",
]
