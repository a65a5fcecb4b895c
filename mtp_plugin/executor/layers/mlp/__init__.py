"""The gated activation of a feed-forward layer whose two projections come as one product."""

from mtp_plugin.executor.layers.mlp.door import silu_mul

__all__ = ["silu_mul"]
