"""The workers: one step on the device, which verifies drafts and makes the next ones."""

from mtp_plugin.speculative.drafting.custom import (
    CustomDrafter,
    CustomDraftWorker,
    propose_drafts,
)
from mtp_plugin.speculative.drafting.eagle import MTPEagleWorker
from mtp_plugin.speculative.drafting.forward_inputs import make_verification_inputs
from mtp_plugin.speculative.drafting.no_drafts import NoDraftsWorker
from mtp_plugin.speculative.drafting.vanilla import MTPWorker
from mtp_plugin.speculative.drafting.worker import SpecWorker

__all__ = [
    "CustomDraftWorker",
    "CustomDrafter",
    "MTPEagleWorker",
    "MTPWorker",
    "NoDraftsWorker",
    "SpecWorker",
    "make_verification_inputs",
    "propose_drafts",
]
