"""MTP checkpoints on top of transformers: the family table, checks, loading, fused layers."""

from __future__ import annotations

from .facts import ModelFacts, read_facts
from .families import FAMILIES, NOT_RUNNABLE, DraftTraits, MTPFamily, TensorNames, family_of
from .fused import FusedModel, FusionReport, fuse
from .loader import LoadedModel, load_model
from .mtp_layer import MTPLayer, TransformersAttention
from .preflight import Preflight, preflight
from .random_model import random_model
from .testing import write_random_checkpoint

__all__ = [
    "FAMILIES",
    "NOT_RUNNABLE",
    "DraftTraits",
    "FusedModel",
    "FusionReport",
    "LoadedModel",
    "MTPFamily",
    "MTPLayer",
    "ModelFacts",
    "Preflight",
    "TensorNames",
    "TransformersAttention",
    "family_of",
    "fuse",
    "load_model",
    "preflight",
    "random_model",
    "read_facts",
    "write_random_checkpoint",
]
