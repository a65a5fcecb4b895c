"""The plugin's own options beside a host's config file."""

from __future__ import annotations

from mtp_plugin.config import MTPPluginOptions

VARIABLE = "TRTLLM_MTP_PLUGIN_CONFIG"


def read_side_file() -> MTPPluginOptions | None:
    """Placeholder until the reader is there."""
    return None
