"""Which drafts stand -> what the next forward reads; the kernel is in ``launch``."""

from mtp_plugin.hosts.megatron.ops.next_forward.reference import prepare_next_forward_pass

__all__ = ["prepare_next_forward_pass"]
