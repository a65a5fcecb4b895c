"""Checkpoints, read from JSON files and safetensors headers: no weights are loaded, no torch is
needed.

The embedded executor refuses a checkpoint with these messages, and every `doctor` prints them.
"""

from mtp_plugin.checkpoint.check import (
    Checkpoint,
    describe,
    read_checkpoint,
    thinking_options,
    vllm_command_of,
    write_report,
)
from mtp_plugin.checkpoint.families import DSPARK, FAMILIES, SEPARATE_DRAFTERS
from mtp_plugin.checkpoint.problems import IN_VLLM, InVllm, Problem
from mtp_plugin.checkpoint.tensor_names import FLOATING, is_quantized

__all__ = [
    "DSPARK",
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
    "thinking_options",
    "vllm_command_of",
    "write_report",
]
