"""Adapter that installs the plugin in TensorRT-LLM's PyExecutor.

:func:`install` wraps the factory functions with which TensorRT-LLM builds the components of
speculative decoding; for MTP configs they return the plugin's components. The API versions 1.2,
1.3a and 1.3b are detected by their signatures. The adapter follows TensorRT-LLM's public source; it
has not been run inside the real package.
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
"""Parent of the folder to pass to ``--custom_module_dirs``."""
SITECUSTOMIZE = Path(__file__).parent / "sitecustomize"
"""Folder to add to ``PYTHONPATH``; takes effect with ``TRTLLM_MTP_PLUGIN=1``."""

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
    if name == "MTPDecodingConfig":  # a subclass of TensorRT-LLM's class: built on first use
        from mtp_plugin.hosts.tensorrt_llm.config import decoding_config_class

        return decoding_config_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
