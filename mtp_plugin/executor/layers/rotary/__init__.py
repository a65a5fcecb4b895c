"""The rotary embedding of queries and keys where they lie, with the norm of each head in front."""

from mtp_plugin.executor.layers.rotary.contract import Angles, HeadLayout, HeadNorms
from mtp_plugin.executor.layers.rotary.door import rotate

__all__ = ["Angles", "HeadLayout", "HeadNorms", "rotate"]
