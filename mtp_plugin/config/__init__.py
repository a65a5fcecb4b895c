"""The YAML file and `MTPDecodingConfig`: what the user wrote, frozen, one line per mistake.

Keys are TensorRT-LLM's LLM arguments (names of its 1.3 line); options of our own live under
``speculative_config.mtp``. What a checkpoint says is kept apart: nothing here is ever written to.
"""

from __future__ import annotations

from mtp_plugin.config.llm import CudaGraphConfig, KVCacheConfig, KvCacheConfig, LLMConfig
from mtp_plugin.config.loading import (
    json_schema,
    load_config,
    load_plugin_options,
    parse_config,
    path_of,
)
from mtp_plugin.config.mode import SpeculativeDecodingMode
from mtp_plugin.config.mtp import MTPPluginOptions
from mtp_plugin.config.speculative import MTPDecodingConfig, OtherDecodingConfig
from mtp_plugin.config.values import MAX_DRAFT_LEN

__all__ = [
    "MAX_DRAFT_LEN",
    "CudaGraphConfig",
    "KVCacheConfig",
    "KvCacheConfig",
    "LLMConfig",
    "MTPDecodingConfig",
    "MTPPluginOptions",
    "OtherDecodingConfig",
    "SpeculativeDecodingMode",
    "json_schema",
    "load_config",
    "load_plugin_options",
    "parse_config",
    "path_of",
]
