"""Plain decoding: the simplest correct decoder, and the oracle of losslessness."""

from __future__ import annotations

from .greedy import greedy_decode
from .inferencer import (
    BasicInferencer,
    ChunkwiseInferencer,
    DecodeOutput,
    Inferencer,
    PrefillOutput,
)
from .kv_cache import DynamicKVCache, KVCache, KVState
from .language_model import LanguageModel, TransformersLanguageModel
from .sample_strategy import GreedySampleStrategy, MultinomialSampleStrategy, SampleStrategy

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
