"""Tokens that are copied to the host before their step has drafted."""

from __future__ import annotations

import torch

from mtp_plugin.ops.step import Accepted
from mtp_plugin.requests.logprobs import ENTRY_WIDTH
from mtp_plugin.speculative.verified_tokens import VerifiedTokens


def accepted() -> Accepted:
    return Accepted(
        tokens=torch.tensor([[7, -1, -1], [8, 9, -1], [0, -1, -1]], dtype=torch.int32),
        num_accepted=torch.tensor([1, 2, 0], dtype=torch.int32),
        status=torch.tensor([0, 0, 1], dtype=torch.int32),
    )


def test_tokens_of_the_requests() -> None:
    copied = VerifiedTokens.record(accepted(), None).to_host(None, 3, with_logprobs=True)
    assert copied.at([0, 1, 2]) == [([7], [], 0), ([8, 9], [], 0), ([], [], 1)]
    assert copied.at([1]) == [([8, 9], [], 0)]
    assert copied.at([]) == []
    assert copied.log_probs is None


def test_rows_in_the_order_of_the_batch() -> None:
    entries = torch.arange(3 * 3 * ENTRY_WIDTH, dtype=torch.int32).reshape(3, 3, ENTRY_WIDTH)
    verified = VerifiedTokens.record(accepted(), entries, torch.tensor([1, 0, 2]))
    copied = verified.to_host(None, 2, with_logprobs=True)
    assert copied.at([0, 1]) == [([8, 9], [], 0), ([7], [], 0)]
    assert torch.equal(copied.log_probs, entries[[1, 0]])
    assert verified.to_host(None, 2, with_logprobs=False).log_probs is None


def test_copies_keep_their_values_when_the_next_step_overwrites_the_tensors() -> None:
    verified = VerifiedTokens.record(accepted(), None)
    copied = verified.to_host(None, 2, with_logprobs=False)
    verified.rows.fill_(-5)
    assert copied.at([0, 1]) == [([7], [], 0), ([8, 9], [], 0)]
