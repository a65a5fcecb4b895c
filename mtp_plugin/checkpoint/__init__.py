"""Checkpoints, read from JSON files and safetensors headers: no weights are loaded, no torch is
needed.

The embedded executor refuses a checkpoint with these messages, and every `doctor` prints them.
"""

from mtp_plugin.checkpoint.check import (
    FLOATING,
    IN_VLLM,
    Checkpoint,
    InVllm,
    Problem,
    describe,
    is_quantized,
    read_checkpoint,
    thinking_tags,
    vllm_command_of,
)
from mtp_plugin.checkpoint.families import FAMILIES, SEPARATE_DRAFTERS

__all__ = [
    "FAMILIES",
    "FLOATING",
    "IN_VLLM",
    "SEPARATE_DRAFTERS",
    "Checkpoint",
    "InVllm",
    "Problem",
    "describe",
    "is_quantized",
    "read_checkpoint",
    "thinking_tags",
    "vllm_command_of",
]
