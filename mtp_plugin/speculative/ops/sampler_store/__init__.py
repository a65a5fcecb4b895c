"""A step's results -> the sampler's store, by sequence slot."""

from mtp_plugin.speculative.ops.sampler_store.door import store_results

__all__ = ["store_results"]
