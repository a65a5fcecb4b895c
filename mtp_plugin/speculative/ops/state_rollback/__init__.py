"""Accepted drafts -> recurrent state moved back."""

from mtp_plugin.speculative.ops.state_rollback.door import mamba_state_selective_copy

__all__ = ["mamba_state_selective_copy"]
