"""MTP checkpoints on top of transformers: the family table, checks, loading, fused layers."""

from __future__ import annotations

from mtp_plugin.hosts.embedded.models.config_reader import CheckedConfig, read_config
from mtp_plugin.hosts.embedded.models.families import (
    FAMILIES,
    NOT_RUNNABLE,
    DraftTraits,
    ModelFacts,
    MTPFamily,
    TensorNames,
    family_of,
)
from mtp_plugin.hosts.embedded.models.fused_model import (
    FusedModel,
    FusedMTPLayer,
    FusionReport,
    fuse,
)
from mtp_plugin.hosts.embedded.models.loader import LoadedModel, load_model
from mtp_plugin.hosts.embedded.models.mtp_layer import MTPLayer, TransformersAttention
from mtp_plugin.hosts.embedded.models.preflight import Preflight, check_declared, preflight
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
    "TensorNames",
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
