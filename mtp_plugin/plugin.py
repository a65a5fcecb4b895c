"""How another way to speculate plugs in: the contract of its pieces, and the registry."""

from mtp_plugin.speculative.plugin import *  # noqa: F403
from mtp_plugin.speculative.plugin import __all__ as __all__
