"""One draft pass -> the inputs of the next."""

from mtp_plugin.ops.draft_step.reference import (
    draft_argmax,
    propose,
    shift_ids,
    shift_states,
)

__all__ = ["draft_argmax", "propose", "shift_ids", "shift_states"]
