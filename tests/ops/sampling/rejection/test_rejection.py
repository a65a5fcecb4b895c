"""Rejection sampling: the example is exact; torch and the kernels follow it."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.sampling import (
    STEP_COLUMN,
    TRUNCATION_SIZE,
    ProposedDrafts,
    TargetSamples,
    VerifiedBy,
    keep_draft_probs,
    rejection_sample,
    sample_tokens,
)
from mtp_plugin.ops.sampling import rejection_triton as launch
from mtp_plugin.ops.step import SlotRows
from tests import near_ties
from tests.integration_bench.test_step_launches import Launches
from tests.op_arguments import check_arguments
from tests.ops.on_device import DEVICE, forbid_launches, vector
from tests.ops.sampling.margins import CLOSE, RARE
from tests.ops.sampling.rejection import example
from tests.ops.sampling.rejection.cases import Batch
from tests.ops.slots import column, on_copy, slot_rows

VOCAB, K = 3, 2


def random_shares(rng: random.Random, number: int) -> list[float]:
    weights = [rng.choice((0.0, 0.2, 1.0, rng.random())) for _ in range(number)]
    weights[rng.randrange(number)] += 0.3
    return [weight / sum(weights) for weight in weights]


def all_on(token: int) -> list[float]:
    return [float(each == token) for each in range(VOCAB)]


@pytest.mark.parametrize("number", [1, K])
@pytest.mark.parametrize("forces", [False, True])
@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_example_has_the_target_distribution(
    seed: int, by_block: bool, forces: bool, number: int
) -> None:
    """Sum over all drafts, accepted prefixes, next tokens, and continuations by the target."""
    rng = random.Random(seed)
    texts = [text for n in range(K + 1) for text in itertools.product(range(VOCAB), repeat=n)]
    p = {text: random_shares(rng, VOCAB) for text in texts}
    q = {text: random_shares(rng, VOCAB) for text in texts if len(text) < K}
    forced = dict.fromkeys(texts, -1)
    if forces:
        forced = {text: rng.choice((-1, rng.randrange(VOCAB))) for text in texts}
    result = {text: p[text] if only < 0 else all_on(only) for text, only in forced.items()}
    emitted: dict[tuple[int, ...], float] = defaultdict(float)
    for drafts in itertools.product(range(VOCAB), repeat=K):
        weight = math.prod(q[drafts[:i]][drafts[i]] for i in range(K))
        if weight == 0:
            continue
        rows, of_drafts = example.forced_shares(
            [p[drafts[:i]] for i in range(K + 1)],
            [q[drafts[:i]] for i in range(K)],
            drafts,
            [forced[drafts[:i]] for i in range(K + 1)],
        )
        there = drafts[:number]
        chances = example.chances(rows, of_drafts, there, by_block=by_block)
        for matches, chance in enumerate(chances):
            following = example.shares_after(rows, of_drafts, there, matches, by_block=by_block)
            for token, share in enumerate(following):
                start = (*there[:matches], token)
                for more in itertools.product(range(VOCAB), repeat=K + 1 - len(start)):
                    text = (*start, *more)
                    rest = math.prod(result[text[:i]][text[i]] for i in range(len(start), K + 1))
                    emitted[text] += weight * chance * share * rest
    for text in itertools.product(range(VOCAB), repeat=K + 1):
        expected = math.prod(result[text[:i]][text[i]] for i in range(K + 1))
        assert emitted[text] == pytest.approx(expected, abs=1e-12)


class Followed:
    """Counts generations that torch or a kernel decides in another way than the example does: each
    must be a near tie, and they must be rare."""

    def __init__(self) -> None:
        self.generations: Counter[str] = Counter()

    def compare(self, batch: Batch, backend: Backend) -> None:
        """Compare all results of a batch; rows that are not verified keep their target tokens."""
        drafts, pool = batch.drafted(Backend.TORCH)
        verdict, _ = batch.verify(drafts, pool, backend)
        expected = batch.target_tokens(drafts, backend)
        for generation, result in enumerate(batch.example(drafts, pool)):
            matches = int(verdict.num_accepted[generation])
            if result is None:
                assert matches == -1
                continue
            self.generations["all"] += 1
            place = batch.rows.num_contexts + generation * batch.rows.width + matches
            token = int(verdict.tokens[place])
            expected[place] = token
            if (matches, token) != (result.matches, result.token):
                assert result.margin < CLOSE, (generation, matches, token, result)
                self.generations["differ"] += 1
        assert torch.equal(verdict.tokens, expected)

    def check(self, least: int) -> None:
        near_ties.count(
            "drafts verified by rejection", self.generations["differ"], self.generations["all"]
        )
        assert self.generations["all"] >= least
        assert self.generations["differ"] <= max(1, RARE * self.generations["all"])


def small_batch(seed: int, *, generations: int, vocabs: Sequence[int] = (3, 6, 9)) -> Batch:
    """One of few ids, in which some drafts are absent, and of some rows ids are forced."""
    rng = random.Random(seed)
    return Batch.of(
        1000 + seed,
        rng.choice(vocabs),
        generations=generations,
        draft_len=rng.choice((1, 2, 3, 4)),
        cut=rng.random() < 0.2,
        forced=rng.random() < 0.25,
    )


@pytest.mark.parametrize(
    ("backend", "batches", "generations"), [(Backend.TORCH, 40, 10), (Backend.TRITON, 6, 5)]
)
def test_every_decision_equals_the_example(
    backend: Backend, batches: int, generations: int
) -> None:
    """With the same noise: number of accepted drafts and the token after them."""
    followed = Followed()
    for seed in range(batches):
        followed.compare(small_batch(seed, generations=generations), backend)
    followed.check(batches * generations // 2)


@pytest.mark.gpu
@pytest.mark.parametrize("vocabs", [(3, 6, 9), (130, 700)], ids=str)
def test_every_decision_of_the_kernels_equals_the_example(vocabs: tuple[int, ...]) -> None:
    followed = Followed()
    for seed in range(40):
        followed.compare(small_batch(seed, generations=20, vocabs=vocabs), Backend.TRITON)
    followed.check(400)


BATCHES = [
    pytest.param(Batch.of(seed, **options), id=f"{seed}-{options['vocab']}")
    for seed, options in enumerate(
        [
            {"vocab": 5, "generations": 6},
            {"vocab": 5, "draft_len": 1, "contexts": 0, "cut": True},
            {"vocab": 33, "generations": 4, "gap": 3},
            {"vocab": 33, "contexts": 3, "draft_len": 4, "generations": 3, "cut": True},
            {"vocab": 20, "generations": 12, "contexts": 0, "lens": False},
            {"vocab": 6, "generations": 12, "contexts": 0, "edits": True},
            {"vocab": 70, "generations": 4, "edits": True, "contexts": 0, "cut": True},
            {"vocab": 130, "generations": 4, "lens": False, "dtype": torch.bfloat16},
            {"vocab": 2500, "generations": 2, "contexts": 0, "draft_len": 2},
            {"vocab": 7, "generations": 12, "contexts": 2, "forced": True},
            {"vocab": 40, "generations": 6, "edits": True, "draft_len": 4, "forced": True},
            {"vocab": 2500, "generations": 2, "gap": 2, "lens": False, "forced": True},
        ]
    )
]


@pytest.mark.parametrize("batch", BATCHES)
def test_kernels_follow_torch(batch: Batch) -> None:
    drafts, pool = batch.drafted(Backend.TORCH)
    result, kept = batch.drafted(Backend.TRITON)
    assert torch.equal(result, drafts)
    assert not kept[-1].any()  # torch writes there, and it is not read
    torch.testing.assert_close(kept[:-1], pool[:-1], rtol=1e-5, atol=1e-7)
    for probs in (pool,) if batch.vocab > 5 else (pool, None):
        expected, steps = batch.verify(drafts, probs, Backend.TORCH)
        verdict, after = batch.verify(drafts, probs, Backend.TRITON)
        assert torch.equal(verdict.num_accepted, expected.num_accepted)
        assert torch.equal(verdict.tokens, expected.tokens)
        assert torch.equal(after, steps)


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("batch", BATCHES[::3])
def test_without_block_verification_results_are_the_same(batch: Batch, backend: Backend) -> None:
    drafts, pool = batch.drafted(Backend.TORCH)
    alone = batch.without_block()
    result, steps = alone.verify(drafts, pool, backend)
    expected, after = replace(alone, by_block=True).verify(drafts, pool, Backend.TORCH)
    assert torch.equal(result.num_accepted, expected.num_accepted)
    assert torch.equal(result.tokens, expected.tokens)
    assert torch.equal(steps, after)


@pytest.mark.parametrize("by_block", [False, True])
def test_kernels_are_specialized_for_block_verification(
    by_block: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []

    def recorded(kernel: Any) -> Any:
        class Launched:
            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                def run(*arguments: Any, **constants: Any) -> None:
                    launched.append(constants["HAS_BLOCK"])
                    kernel[grid](*arguments, **constants)

                return run

        return Launched()

    batch = Batch.of(1, 9).without_block()
    drafts, pool = batch.drafted(Backend.TORCH)
    for name in ("rejection_scan_kernel", "rejection_finish_kernel"):
        monkeypatch.setattr(launch, name, recorded(getattr(launch, name)))
    replace(batch, by_block=by_block).verify(drafts, pool, Backend.TRITON)
    assert launched == [by_block] * 2


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("code", [max(VerifiedBy) + 1, VerifiedBy.BLOCK])
def test_requests_with_other_methods_are_unchanged(backend: Backend, code: int) -> None:
    """For any other code, and for block verification where it is not enabled."""
    batch = replace(Batch.of(4, 20, generations=8, contexts=0), by_block=code != VerifiedBy.BLOCK)
    drafts, pool = batch.drafted(Backend.TORCH)
    slots = on_copy(batch.slots)
    column(slots, "verification").fill_(int(code))
    verdict, _ = replace(batch, slots=slots).verify(drafts, pool, backend)
    assert (verdict.num_accepted == -1).all()
    assert torch.equal(verdict.tokens, batch.target_tokens(drafts, Backend.TORCH))


def check_kept(kept: torch.Tensor, expected: torch.Tensor) -> None:
    """Probabilities [S, K, V] are the expected ones, but for ids at the edge of a cut.

    Of a batch `AT_EDGES` of them may stay on one side alone, one of a row, and each must be there
    the least likely of those that stay, or the next.
    """
    on_one_side = (kept > 0) != (expected > 0)
    assert int(on_one_side.sum()) <= AT_EDGES
    for slot, place, token in on_one_side.nonzero().tolist():
        row = torch.maximum(kept[slot, place], expected[slot, place])
        assert int(on_one_side[slot, place].sum()) == 1
        assert int(((row > 0) & (row < row[token])).sum()) <= 1
    same = torch.where(on_one_side, kept, expected)
    torch.testing.assert_close(kept, same, rtol=1e-4, atol=1e-7)


AT_EDGES = 3


@pytest.mark.gpu
@pytest.mark.parametrize("forced", [False, True], ids=["free", "forced"])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_kernels_follow_torch_with_real_vocabularies(cut: bool, forced: bool) -> None:
    """Except for near ties of tests, scores and thresholds, which are rare."""
    seeds = [n for n in range(36) if (n % 3 == 0, n % 4 == 1) == (cut, forced)]
    for seed in seeds[:3]:
        batch = Batch.of(seed, 50_000, generations=16, contexts=2, cut=cut, forced=forced)
        drafts, pool = batch.drafted(Backend.TORCH)
        _, kept = batch.drafted(Backend.TRITON)
        check_kept(kept[:-1], pool[:-1])
        expected, _ = batch.verify(drafts, pool, Backend.TORCH)
        verdict, _ = batch.verify(drafts, pool, Backend.TRITON)
        assert (verdict.num_accepted != expected.num_accepted).sum() <= 1
        assert (verdict.tokens != expected.tokens).sum() <= 1


def arguments() -> dict[str, Any]:
    """Of a batch with every verification method."""
    batch = Batch.of(40, 20, generations=5, contexts=2)
    drafts, pool = batch.drafted(Backend.TORCH)
    truncation = torch.empty(len(batch.logits), TRUNCATION_SIZE, device=DEVICE)
    choices = sample_tokens(
        batch.logits, batch.rows, batch.slots, truncation=truncation, backend=Backend.TORCH
    )
    return {
        "logits": batch.logits,
        "positions": batch.rows.positions,
        "table": batch.slots.table,
        "slot_ids": batch.slots.slot_ids,
        "drafts": ProposedDrafts(drafts[2:].reshape(-1), pool, batch.draft_lens),
        "target": TargetSamples(choices, truncation, batch.forced_ids(drafts[2:])),
    }


COLUMNS_OF_BATCH = Batch.of(40, 20, generations=5, contexts=2).slots.columns


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")
@pytest.mark.parametrize("mode", [VerifiedBy.REJECTION, VerifiedBy.BLOCK])
def test_rejection_sampling_takes_two_launches(
    mode: VerifiedBy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other launches fill or copy anything."""
    given = arguments()
    slots = SlotRows(given.pop("table"), given.pop("slot_ids"), COLUMNS_OF_BATCH)
    column(slots, "verification").fill_(int(mode))
    given["rows"] = LogitRows(2, 4, given.pop("positions"))
    given["by_block"] = mode is VerifiedBy.BLOCK
    with Launches(monkeypatch) as launches:
        rejection_sample(slots=slots, **given, backend=Backend.TRITON)
    assert launches.counts == {"rejection_scan": 1, "rejection_finish": 1}


@pytest.mark.parametrize("backend", Backend)
def test_arguments(backend: Backend) -> None:
    def verify(
        positions: torch.Tensor, table: torch.Tensor, slot_ids: torch.Tensor, **others: Any
    ) -> list[torch.Tensor]:
        slots = SlotRows(table, slot_ids, COLUMNS_OF_BATCH)
        result = rejection_sample(rows=LogitRows(2, 4, positions), slots=slots, **others)
        return [result.num_accepted, result.tokens]

    refused = {
        "logits": "row-contiguous",
        "table": "row-contiguous",
        "drafts.probs": "expected contiguous",
        "target.truncation": "expected contiguous",
    }
    free = {
        "table: shorter",
        "slot_ids: shorter",
        "drafts.probs: shorter",
        "drafts.tokens: dimensions",
    }
    check_arguments(verify, arguments(), refused=refused, free=free, backend=backend)


@pytest.mark.parametrize("backend", Backend)
def test_arguments_of_keep_draft_probs(backend: Backend) -> None:
    def kept(
        positions: torch.Tensor, table: torch.Tensor, slot_ids: torch.Tensor, **others: Any
    ) -> torch.Tensor:
        slots = SlotRows(table, slot_ids, COLUMNS_OF_BATCH)
        keep_draft_probs(rows=LogitRows(0, 1, positions, column=1), slots=slots, **others)
        return others["draft_probs"][:-1]

    given = arguments()
    given = {
        **{name: given[name] for name in ("positions", "table", "slot_ids")},
        "draft_probs": given["drafts"].probs,
        "logits": given["logits"][:7, :12].contiguous(),
        "truncation": torch.tensor([2.0, 1.5, 7.0, 3.0], device=DEVICE).repeat(7, 1),
        "vocab_ids": vector(range(3, 15), torch.int32),
    }
    refused = {
        "logits": "row-contiguous",
        "table": "row-contiguous",
        "draft_probs": "expected contiguous",
        "truncation": "expected contiguous",
        "vocab_ids": "contiguous torch.int32",
    }
    free = {"table: shorter", "slot_ids: shorter", "draft_probs: shorter"}
    check_arguments(kept, given, refused=refused, free=free, backend=backend)


def test_slots_without_steps_are_refused() -> None:
    given = arguments()
    slots = slot_rows([{}] * 7)
    del given["table"], given["slot_ids"]
    rows = LogitRows(2, 4, given.pop("positions"))
    with pytest.raises(TensorContractError, match=f"columns .*{STEP_COLUMN.name} too"):
        rejection_sample(rows=rows, slots=slots, backend=Backend.TORCH, **given)


@pytest.mark.parametrize("backend", Backend)
def test_steps_without_generations_launch_nothing(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_launches(monkeypatch, launch)
    batch = Batch.of(3, 9, contexts=2, generations=0)
    choices = vector([1, 2], torch.int32)
    truncation = torch.zeros(2, TRUNCATION_SIZE, device=DEVICE)
    none = torch.empty(0, dtype=torch.int32, device=DEVICE)
    expected = rejection_sample(
        batch.logits,
        batch.rows,
        batch.slots,
        ProposedDrafts(none),
        TargetSamples(choices, truncation),
        backend=backend,
    )
    assert expected.num_accepted.numel() == 0
    assert torch.equal(expected.tokens, choices)
