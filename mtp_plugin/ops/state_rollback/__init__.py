"""Accepted drafts -> recurrent state moved back; the kernel is in ``launch``."""

from mtp_plugin.ops.state_rollback.reference import mamba_state_selective_copy

__all__ = ["mamba_state_selective_copy"]
