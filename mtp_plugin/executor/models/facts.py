"""What a checkpoint says about itself in its JSON files."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a checkpoint. Nobody writes into them, and they hold nothing a user chose."""

    model_type: str
    architecture: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    num_mtp_layers: int
    """Number of MTP layers the config declares (D)."""
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    """From generation_config.json, else from config.json; empty where neither says."""
    dtype: torch.dtype
    """The dtype the config names; float32 where it names none."""
