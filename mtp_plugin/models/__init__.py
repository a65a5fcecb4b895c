"""MTP checkpoints on top of transformers: the family table, checks, and loading."""

from __future__ import annotations

from .facts import ModelFacts, read_facts
from .families import FAMILIES, NOT_RUNNABLE, DraftTraits, MTPFamily, TensorNames, family_of
from .loader import LoadedModel, load_model
from .mtp_layer import MTPLayer, TransformersAttention
from .preflight import Preflight, preflight
from .testing import write_random_checkpoint

__all__ = [
    "FAMILIES",
    "NOT_RUNNABLE",
    "DraftTraits",
    "LoadedModel",
    "MTPFamily",
    "MTPLayer",
    "ModelFacts",
    "Preflight",
    "TensorNames",
    "TransformersAttention",
    "family_of",
    "load_model",
    "preflight",
    "read_facts",
    "write_random_checkpoint",
]
