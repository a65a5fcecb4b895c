"""Accepted drafts -> recurrent state moved back; the kernel is in ``launch``."""

from mtp_plugin.speculative.ops.state_rollback.reference import mamba_state_selective_copy

__all__ = ["mamba_state_selective_copy"]
