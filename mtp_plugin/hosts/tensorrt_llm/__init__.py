"""The plugin inside TensorRT-LLM's own PyExecutor.

:func:`install` wraps the functions with which TensorRT-LLM builds the pieces of speculative
decoding; MTP configs get ours from then on. Lines 1.2, 1.3a and 1.3b are told apart by their
signatures. Written against public text: none of it has run inside the real package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtp_plugin.errors import HostError
from mtp_plugin.hosts.tensorrt_llm.installation import (
    Status,
    install,
    is_installed,
    status,
    uninstall,
)

CUSTOM_MODULES = Path(__file__).parent / "custom_modules"
"""Holds the folder for ``--custom_module_dirs``."""
SITECUSTOMIZE = Path(__file__).parent / "sitecustomize"
"""The folder for ``PYTHONPATH``; works with ``TRTLLM_MTP_PLUGIN=1``."""

__all__ = [
    "HostError",
    "MTPDecodingConfig",
    "Status",
    "install",
    "is_installed",
    "status",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name == "MTPDecodingConfig":  # a subclass of the host's, once there is a host
        from mtp_plugin.hosts.tensorrt_llm.config import decoding_config_class

        return decoding_config_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
