"""Root-mean-square norms, with the residual added in front or two halves joined behind."""

from mtp_plugin.executor.layers.norm.door import add_rms_norm, join_norms, rms_norm

__all__ = ["add_rms_norm", "join_norms", "rms_norm"]
