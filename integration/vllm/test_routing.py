"""The share of experts that rows have in common, by the tables that engines read."""

from __future__ import annotations

import pytest
import torch

from integration.shapes import SHAPES, vllm_config
from integration.vllm.auto_draft_len import is_as_configured
from integration.vllm.draft_lengths import ACCEPTANCE, expected_length
from integration.vllm.routing import MOST_CHAIN, MOST_ROWS, NUM_TABLES, Routing, sample_experts

EXPERTS, TOP_K = 128, 8


def routed(routing: Routing, rows: int, per_request: int | None) -> torch.Tensor:
    """Return ids [steps, rows, top_k]."""
    logits = torch.zeros(rows, EXPERTS)
    steps = [routing.route(logits, TOP_K, per_request) for _ in range(200)]
    assert all(torch.equal(weights.sum(1), torch.ones(rows)) for weights, _ in steps)
    return torch.stack([ids for _, ids in steps])


def shares(ids: torch.Tensor) -> torch.Tensor:
    """Return the share of experts of each row, but the first, that the row before uses too."""
    same = ids[:, 1:, :, None] == ids[:, :-1, None, :]
    return same.any(-1).float().mean(dim=(0, 2))


@pytest.mark.parametrize(("name", "share"), [("third", 1 / 3), ("random", TOP_K / EXPERTS)])
def test_rows_of_a_request_share_experts(name: str, share: float) -> None:
    torch.manual_seed(0)
    ids = routed(Routing(name), rows=32, per_request=4)
    assert ids.shape == (200, 32, TOP_K)
    assert ids.dtype == torch.int32
    assert all(len(set(row)) == TOP_K for row in ids[0].tolist())
    found = shares(ids).tolist()
    of_requests = [value for row, value in enumerate(found, 1) if row % 4]
    between = [value for row, value in enumerate(found, 1) if not row % 4]
    assert sum(of_requests) / len(of_requests) == pytest.approx(share, abs=0.02)
    assert sum(between) / len(between) == pytest.approx(TOP_K / EXPERTS, abs=0.02)
    # every expert is as probable as any other
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    assert counts.min() > 0.6 * counts.float().mean()
    assert counts.max() < 1.5 * counts.float().mean()


def test_prompts_are_one_chain_and_read_one_table() -> None:
    routing = Routing("third")
    for rows, per_request in ((MOST_ROWS + 8, 8), (30, 4), (7, None)):
        found = shares(routed(routing, rows, per_request))
        assert found.mean() == pytest.approx(1 / 3, abs=0.03)
    assert len(routing.tables) == 1
    with pytest.raises(ValueError, match="routing: expected at most 16384 rows, got 16385"):
        routing.route(torch.zeros(MOST_CHAIN + 1, EXPERTS), TOP_K, None)


def test_another_routing_is_written_into_the_same_memory() -> None:
    routing = Routing("random")
    with torch.inference_mode():
        routed(routing, 8, 8)
    (table,) = routing.tables.values()
    address = table[0].data_ptr()
    routing.change("third")
    assert routing.tables[8, 8, TOP_K, EXPERTS][0].data_ptr() == address
    assert shares(routed(routing, 8, 8)).mean() == pytest.approx(1 / 3, abs=0.05)


@pytest.mark.parametrize(("experts", "share"), [(12, None), (16, 1 / 3)])
def test_impossible_shares_are_refused(experts: int, share: float | None) -> None:
    with pytest.raises(ValueError, match="expected a multiple of 8 experts and a share of at"):
        sample_experts((NUM_TABLES, 4, TOP_K), 4, experts, share)


def test_experts_of_the_sparse_shape_are_29_gigabytes() -> None:
    sizes = SHAPES["sparse"]
    expert = 3 * sizes["hidden_size"] * sizes["moe_intermediate_size"]
    assert 2 * 24 * 128 * expert / 1e9 == pytest.approx(29.0, abs=0.02)
    assert vllm_config("sparse")["first_k_dense_replace"] == 0


def test_standard_error_of_an_acceptance_length() -> None:
    """One draft: accepted or not."""
    length, error = expected_length(1, 1780)
    assert length == 1.78
    assert error == pytest.approx((0.78 * 0.22 / 1000) ** 0.5)
    assert expected_length(7)[0] == pytest.approx(1 + sum(ACCEPTANCE))


def test_steps_must_give_the_tokens_of_the_configured_acceptance() -> None:
    tokens = round(8 * expected_length(3)[0])
    assert is_as_configured([(3, 0.01, tokens)] * 50, size=8)
    assert not is_as_configured([(3, 0.01, 8)] * 50, size=8)  # no draft is accepted
    assert is_as_configured([(0, 0.01, 8)] * 50, size=8)
