"""One draft pass -> the inputs of the next."""

from mtp_plugin.speculative.ops.draft.door import (
    draft_argmax,
    local_top1,
    merge_top1,
    place_drafts,
    place_last_states,
    propose,
    propose_edited,
)

__all__ = [
    "draft_argmax",
    "local_top1",
    "merge_top1",
    "place_drafts",
    "place_last_states",
    "propose",
    "propose_edited",
]
