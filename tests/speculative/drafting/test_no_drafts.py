"""NoDraftsWorker: decoding without drafts, through the same interface."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mtp_plugin.config import SpeculativeDecodingMode
from mtp_plugin.speculative.drafting import NoDraftsWorker
from tests.speculative.drafting.contract import ExpectedPasses, WorkerContract
from tests.speculative.drafting.host import Prompt, Step, Turn


class TestPlain(WorkerContract):
    draft_lens = (0,)
    mode = SpeculativeDecodingMode.NONE

    def make(self, k: int, **options: Any) -> NoDraftsWorker:
        return NoDraftsWorker(
            SimpleNamespace(max_draft_len=k, mtp=options.pop("mtp", None)), device="cpu", **options
        )

    def num_layers(self, k: int) -> int:  # noqa: ARG002 - none, whatever K
        return 0

    def num_selections(self, k: int) -> int:  # noqa: ARG002 - no layer
        return 0

    def expected_passes(self, step: Step, request: Prompt | Turn) -> ExpectedPasses:  # noqa: ARG002 - no pass
        return []
