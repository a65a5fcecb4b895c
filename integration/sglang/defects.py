"""Planted defects, which the proof has to find: entry point of SGLang's plugins."""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "MTP_PLUGIN_PROOF_DEFECT"


def register() -> None:
    """Plant the defect that the variable names, in every process of an engine."""
    defect = os.environ.get(VARIABLE)
    if defect:
        DEFECTS[defect]()


def _wrong_position() -> None:
    """Verify every row with the noise of the next position."""
    from mtp_plugin.speculative.rows.row_ops import RowOps

    verify = RowOps.verify_uniform

    def verify_late(self: RowOps, logits: Any, drafts: Any, positions: Any, *slots: Any) -> Any:
        return verify(self, logits, drafts, positions + 1, *slots)

    RowOps.verify_uniform = verify_late  # type: ignore[method-assign, assignment]


def _stale_row() -> None:
    """Leave the row of a slot as its first request wrote it."""
    from mtp_plugin.hosts.sglang.engine import Engine
    from mtp_plugin.hosts.sglang.requests import slot_of

    stage, written = Engine.stage, set()

    def stage_once(self: Engine, req: Any) -> None:
        if slot_of(req) not in written:
            stage(self, req)
        written.add(slot_of(req))

    Engine.stage = stage_once  # type: ignore[method-assign]


DEFECTS = {"wrong_position": _wrong_position, "stale_row": _stale_row}
