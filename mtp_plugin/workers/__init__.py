"""One step on the device: accept, advance history, draft."""

from mtp_plugin.workers.base import SpecWorker
from mtp_plugin.workers.eagle import MTPEagleWorker
from mtp_plugin.workers.plain import PlainWorker
from mtp_plugin.workers.vanilla import MTPWorker

__all__ = ["MTPEagleWorker", "MTPWorker", "PlainWorker", "SpecWorker"]
