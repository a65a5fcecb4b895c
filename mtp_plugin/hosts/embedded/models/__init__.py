"""MTP checkpoints on top of transformers: configs, loading, fused layers, tokenizers."""

from __future__ import annotations

from mtp_plugin.checkpoint.families import NOT_RUNNABLE, DraftTraits, MTPFamily, family_of
from mtp_plugin.checkpoint.families import RUNNABLE as FAMILIES
from mtp_plugin.hosts.embedded.models.config_reader import CheckedConfig, ModelFacts, read_config
from mtp_plugin.hosts.embedded.models.fused_model import (
    FusedModel,
    FusedMTPLayer,
    FusionReport,
    fuse,
)
from mtp_plugin.hosts.embedded.models.loader import (
    LoadedModel,
    Preflight,
    check_declared,
    load_model,
    preflight,
)
from mtp_plugin.hosts.embedded.models.mtp_layer import MTPLayer, TransformersAttention
from mtp_plugin.hosts.embedded.models.tokenizer_files import read_tokenizer, unread_tokenizer

__all__ = [
    "FAMILIES",
    "NOT_RUNNABLE",
    "CheckedConfig",
    "DraftTraits",
    "FusedMTPLayer",
    "FusedModel",
    "FusionReport",
    "LoadedModel",
    "MTPFamily",
    "MTPLayer",
    "ModelFacts",
    "Preflight",
    "TransformersAttention",
    "check_declared",
    "family_of",
    "fuse",
    "load_model",
    "preflight",
    "read_config",
    "read_tokenizer",
    "unread_tokenizer",
]
