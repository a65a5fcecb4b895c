"""One draft pass -> the inputs of the next."""

from mtp_plugin.ops.draft_step.reference import (
    draft_argmax,
    local_top1,
    merge_top1,
    place_last_states,
    propose,
)

__all__ = ["draft_argmax", "local_top1", "merge_top1", "place_last_states", "propose"]
