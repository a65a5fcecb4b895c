"""For ``--custom_module_dirs``: importing it installs the plugin and registers its models."""

from mtp_plugin.hosts.tensorrt_llm.models import REGISTERED

__all__ = ["REGISTERED"]
