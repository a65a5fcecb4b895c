"""Which drafts stand -> what the next forward reads."""

from mtp_plugin.hosts.megatron.ops.next_forward.door import prepare_next_forward_pass

__all__ = ["prepare_next_forward_pass"]
