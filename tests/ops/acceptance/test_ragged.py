"""Acceptance where a generation has as many rows of logits as drafts and one more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mtp_plugin.ops.acceptance import AcceptanceRules, accept
from mtp_plugin.ops.backend import Backend
from tests.ops.acceptance.cases import (
    layout_of,
)
from tests.ops.acceptance.random_cases import make_case
from tests.ops.letters import ids, rows_with_top
from tests.ops.on_device import DEVICE, vector

BACKENDS = pytest.mark.parametrize("backend", Backend)


@BACKENDS
def test_ragged_rows_as_vllm_has_them(backend: Backend) -> None:
    """Requests with 2, 0, 1 and 0 drafts, of which the last has no valid target; padded drafts."""
    cu_num_logits = vector([0, 3, 4, 6, 7], torch.int32)
    drafts = vector([ids("uv"), [-1, -1], ids("b."), ids("zz")], torch.int32)
    target = "uxy" + "q" + "bn" + "."
    for choices in (None, vector([*ids(target[:6]), -1], torch.int32)):
        accepted = accept(
            layout_of(0, 4, 2),
            rows_with_top(target).to(DEVICE),
            drafts,
            AcceptanceRules(choices=choices),
            draft_lens=cu_num_logits[1:] - cu_num_logits[:-1] - 1,
            first_rows=cu_num_logits[:-1],
            backend=backend,
        )
        assert accepted.tokens.tolist() == [ids("ux."), ids("q.."), ids("bn."), ids("...")]
        assert accepted.num_accepted.tolist() == [2, 1, 2, 0]
        assert accepted.status.tolist() == [0, 0, 0, 1]


@BACKENDS
@pytest.mark.parametrize("rows", [0, 2])
def test_ragged_rows_of_no_request(backend: Backend, rows: int) -> None:
    case = make_case(3, num_generations=0, k=2, vocab=7)
    logits = torch.zeros(rows, 7, device=DEVICE)
    none = vector([], torch.int32)
    case = replace(case, logits=logits, options={"draft_lens": none}, first_rows=none)
    for kind in ("strict", "relaxed", "forced"):
        assert case.accept(kind, backend).accepted.tokens.shape == (0, 3)
