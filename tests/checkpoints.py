"""Checkpoints that several places draft with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from integration.random_models import write_random_checkpoint


def write_echo_checkpoint(path: Path, **options: Any) -> None:
    """Random, with three MTP layers whose drafts are often right; ``options`` of its config."""
    write_random_checkpoint(
        path,
        "glm4_moe",
        num_mtp_layers=3,
        seed=3,
        echo_draft=True,
        residual_scale=0.4,
        **options,
    )
