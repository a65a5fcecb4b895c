"""A step's results -> the sampler's store, by sequence slot; the kernel is in ``launch``."""

from mtp_plugin.speculative.ops.sampler_store.reference import store_results

__all__ = ["store_results"]
