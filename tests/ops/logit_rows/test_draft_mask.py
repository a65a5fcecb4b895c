"""Draft masks, pass by pass of a draft loop: example, torch and Triton agree."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.draft import propose_processed, write_drafts
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.logits_processor_state import DraftMask
from mtp_plugin.ops.step import Accepted, DraftOutput, SlotRows
from mtp_plugin.ops.token_history import update_token_history
from mtp_plugin.requests.options import MAX_BAD_WORD_LEN, MAX_BAD_WORDS
from mtp_plugin.requests.stopping import MAX_STOP_IDS
from tests.op_arguments import check_arguments
from tests.ops.logit_mask.test_logit_mask import word_of
from tests.ops.logits_processing import example
from tests.ops.logits_processing.example import LogitsOptions, Place
from tests.ops.logits_processing.pools import bits_of, ids_in, pools_of
from tests.ops.on_device import DEVICE, INDEX_DTYPES, vector
from tests.ops.slots import column, on_copy, slot_rows

KEPT = MAX_STOP_IDS + MAX_BAD_WORDS


def random_options(rng: random.Random, vocab: int, few: list[int]) -> LogitsOptions:
    """Of one request; some allow all ids, and some have no row."""
    recent = [rng.choice(few) for _ in range(rng.choice((0, 1, 5, 16)))]
    stops = [rng.choice((rng.randrange(vocab), vocab)) for _ in range(rng.randrange(6))]
    words = None
    if rng.random() < 0.8:
        text = [*recent, *(rng.choice(few) for _ in range(6))]
        words = [word_of(rng, vocab, text) for _ in range(rng.choice((1, 2, 8, 64)))]
    some = {*few, *stops, *(word[-1] for word in words or ()), rng.randrange(vocab)}
    allowed = rng.choice((range(vocab), range(vocab), some, None))
    if allowed is not None:
        allowed = {token for token in allowed if token < vocab}
    return LogitsOptions(
        allowed=allowed,
        words=words,
        recent=recent,
        stops=stops,
        prompt_len=rng.randrange(1, 8),
        min_tokens=rng.choice((0, rng.randrange(12), 2**31 - 1)),
    )


@dataclass(frozen=True)
class Batch:
    """Requests whose drafts have disallowed tokens."""

    options: list[LogitsOptions]
    slots: SlotRows
    positions: list[int]

    @classmethod
    def of(cls, seed: int, requests: int, vocab: int) -> Batch:
        rng = random.Random(seed)
        few = [rng.randrange(vocab) for _ in range(3)]
        options = [random_options(rng, vocab, few) for _ in range(requests)]
        pools, columns = pools_of(options, vocab, rng)
        hidden = torch.full((len(pools.allowed) + 1, KEPT), -1, dtype=torch.int32)
        values = [
            {
                "prompt_len": option.prompt_len,
                "min_tokens": option.min_tokens,
                "stop_ids": option.stops,
                "recent": [-1] * (MAX_BAD_WORD_LEN - len(option.recent)) + list(option.recent),
                **rows,
            }
            for option, rows in zip(options, columns, strict=True)
        ]
        draft_mask = DraftMask(pools.allowed.clone(), hidden.to(DEVICE))
        slots = replace(slot_rows(values, seed=seed, gap=2), pools=pools, draft_mask=draft_mask)
        return cls(options, slots, [rng.randrange(14) for _ in range(requests)])

    def copy(self) -> Batch:
        """With a table and a draft mask of its own."""
        draft_mask = self.slots.draft_mask
        assert draft_mask is not None
        mine = DraftMask(draft_mask.allowed.clone(), draft_mask.masked_ids.clone())
        return replace(self, slots=replace(on_copy(self.slots), draft_mask=mine))

    def after(self, runs: list[list[int]]) -> list[LogitsOptions]:
        """The requests with what they emitted."""
        pairs = zip(self.options, runs, strict=True)
        return [
            replace(option, recent=[*option.recent, *run][-MAX_BAD_WORD_LEN:])
            for option, run in pairs
        ]

    def check(
        self, options: list[LogitsOptions], indices: list[int], before: list[list[int]]
    ) -> int:
        """What every row of drafts' ids holds; how many ids are banned."""
        draft_mask, pools = self.slots.draft_mask, self.slots.pools
        assert draft_mask is not None
        assert pools is not None
        number = 0
        for request, (option, index, drafts) in enumerate(
            zip(options, indices, before, strict=True)
        ):
            if option.allowed is None:
                continue
            row = int(column(self.slots, "allowed_row")[int(self.slots.slot_ids[request])])
            banned = example.banned(Place(option, index, tuple(drafts))) & set(option.allowed)
            assert ids_in(draft_mask.allowed[row, :-1]) == set(option.allowed) - banned
            hidden = [token for token in draft_mask.masked_ids[row].tolist() if token >= 0]
            assert sorted(hidden) == sorted(banned)
            assert int(draft_mask.allowed[row, -1]) == len(set(option.allowed))
            number += len(banned)
        return number


def accepted_of(runs: list[list[int]], width: int) -> Accepted:
    tokens = [[*run, *[-1] * (width - len(run))] for run in runs]
    counts = vector(map(len, runs), torch.int32)
    rows = torch.tensor(tokens, dtype=torch.int32, device=DEVICE).reshape(len(runs), width)
    return Accepted(rows, counts, torch.zeros_like(counts))


@pytest.mark.parametrize("backend", Backend)
def test_example_torch_and_triton_agree(backend: Backend) -> None:
    banned = 0

    @settings(max_examples=16 if backend is Backend.TORCH else 6)
    @given(
        seed=st.integers(0, 2**31),
        requests=st.integers(1, 4),
        vocab=st.sampled_from((1, 2, 31, 32, 33, 100)),
        k=st.integers(1, 4),
        steps=st.integers(1, 3),
        index_dtype=st.sampled_from(INDEX_DTYPES),
    )
    def agree(seed: int, requests: int, vocab: int, k: int, steps: int, index_dtype) -> None:
        nonlocal banned
        rng = random.Random(seed + 1)
        batch = Batch.of(seed, requests, vocab)
        pools, before = batch.slots.pools, batch.slots.draft_mask
        assert pools is not None
        assert before is not None
        outside = before.allowed.clone()
        options, positions = batch.options, batch.positions
        for _ in range(steps):
            ids = [*(options[0].recent or [0]), rng.randrange(vocab)]
            runs = [[rng.choice(ids) for _ in range(rng.randrange(k + 2))] for _ in options]
            options = replace(batch, options=options).after(runs)
            accepted = accepted_of(runs, k + 1)
            given_positions = vector(positions, index_dtype)
            update_token_history(accepted, batch.slots, given_positions, backend=backend)
            first = [at + len(run) + 1 for at, run in zip(positions, runs, strict=True)]
            drafts: list[list[int]] = [[] for _ in options]
            banned += batch.check(options, first, drafts)
            held = torch.full((requests, k), -7, dtype=torch.int32, device=DEVICE)
            following = torch.zeros(requests, k + 1, dtype=torch.int32, device=DEVICE)
            rows = LogitRows(0, 1, given_positions, accepted.num_accepted, 0, held)
            for number in range(k):
                sampled = [rng.choice(ids) for _ in options]
                place = DraftOutput(held, following, number)
                next_rows = replace(rows, column=number + 1) if number + 1 < k else None
                write_drafts(
                    vector(sampled, torch.int32), place, next_rows, batch.slots, backend=backend
                )
                if next_rows is None:
                    break
                drafts = [[*some, one] for some, one in zip(drafts, sampled, strict=True)]
                indices = [index + number + 1 for index in first]
                banned += batch.check(options, indices, drafts)
            positions = [index - 1 for index in first]
        assert torch.equal(pools.allowed, outside)
        mine = column(batch.slots, "allowed_row")[batch.slots.slot_ids[:requests]].tolist()
        others = [row for row in range(len(outside)) if row not in mine]
        assert torch.equal(before.allowed[others], outside[others])

    agree()
    assert banned > 40


def one_request(**options: object) -> Batch:
    option = LogitsOptions(prompt_len=2, **options)  # type: ignore[arg-type]
    pools, columns = pools_of([option], 40, random.Random(0))
    hidden = torch.full((len(pools.allowed) + 1, KEPT), -1, dtype=torch.int32, device=DEVICE)
    values = {"prompt_len": 2, "min_tokens": option.min_tokens, "stop_ids": option.stops}
    slots = slot_rows([{**values, "recent": [-1] * MAX_BAD_WORD_LEN, **columns[0]}])
    return Batch(
        [option],
        replace(slots, pools=pools, draft_mask=DraftMask(pools.allowed.clone(), hidden)),
        [5],
    )


@pytest.mark.parametrize("backend", Backend)
def test_without_further_drafts_no_mask_is_updated(backend: Backend) -> None:
    batch = one_request(allowed=range(40), words=[(3,)])
    draft_mask = batch.slots.draft_mask
    assert draft_mask is not None
    update_token_history(accepted_of([[1]], 1), batch.slots, backend=backend)
    assert bool((draft_mask.masked_ids == -1).all())
    update_token_history(accepted_of([[1]], 1), batch.slots, vector([5]), backend=backend)
    assert draft_mask.masked_ids[draft_mask.masked_ids >= 0].tolist() == [3]


@pytest.mark.parametrize(("min_tokens", "masked"), [(6, []), (7, [9])])
@pytest.mark.parametrize("backend", Backend)
def test_stop_ids_are_masked_up_to_min_tokens(
    backend: Backend, min_tokens: int, masked: list[int]
) -> None:
    """Two tokens follow position 5, so the draft has index 8: the 7th token after the prompt."""
    batch = one_request(allowed=range(40), stops=[9], min_tokens=min_tokens)
    update_token_history(accepted_of([[1, 2]], 3), batch.slots, vector([5]), backend=backend)
    draft_mask = batch.slots.draft_mask
    assert draft_mask is not None
    assert draft_mask.masked_ids[draft_mask.masked_ids >= 0].tolist() == masked


@pytest.mark.parametrize("backend", Backend)
def test_arguments(backend: Backend) -> None:
    given_batch = Batch.of(3, 4, 40)
    refused = {"slots.table": "row-contiguous", "accepted.tokens": "row-contiguous"}
    for name in ("bias", "allowed", "counts", "seen", "words"):
        refused[f"slots.pools.{name}"] = f"pools.{name}"
    for name in ("allowed", "masked_ids"):
        refused[f"slots.draft_mask.{name}"] = f"draft mask, {name}"
    pools = given_batch.slots.pools
    assert pools is not None
    finite = replace(pools, bias=pools.bias.nan_to_num(nan=0.25))
    slots = replace(given_batch.slots, pools=finite)
    arguments = {
        "accepted": accepted_of([[1], [2, 3], [], [4]], 2),
        "slots": slots,
        "positions": vector(given_batch.positions),
    }
    names = [name for name in refused if "." in name and name != "accepted.tokens"]
    free = {f"{name}: shorter" for name in (*names, "slots.slot_ids")} | {"accepted.status"}
    check_arguments(update_token_history, arguments, refused=refused, free=free, backend=backend)

    def placed(drafts: torch.Tensor, held: torch.Tensor, next_rows: LogitRows, slots: SlotRows):
        following = torch.zeros(4, 4, dtype=torch.int32, device=DEVICE)
        rows = replace(next_rows, drafts=held)
        write_drafts(drafts, DraftOutput(held, following, 1), rows, slots, backend=backend)
        return following

    refused.pop("accepted.tokens")
    refused["held"] = "row-contiguous"
    arguments = {
        "drafts": vector([4, 5, 6, 7], torch.int32),
        "held": torch.arange(12, dtype=torch.int32, device=DEVICE).reshape(4, 3),
        "next_rows": LogitRows(0, 1, vector(given_batch.positions), vector([1, 0, 2, 1]), 2),
        "slots": slots,
    }
    # `held` is passed separately: the rows have no drafts of their own
    free |= {f"held: {kind}" for kind in ("type", "dimensions", "list")}  # named drafts there
    check_arguments(placed, arguments, refused=refused, free=free)


@pytest.mark.parametrize("backend", Backend)
def test_rows_of_other_drafts_are_refused(backend: Backend) -> None:
    slots = Batch.of(3, 2, 40).slots
    held = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    following = torch.zeros(2, 4, dtype=torch.int32, device=DEVICE)
    place, drafts = DraftOutput(held, following, 0), vector([1, 2], torch.int32)
    for rows in (
        LogitRows(0, 1, vector([3, 4]), column=0, drafts=held),
        LogitRows(0, 2, vector([3, 4]), column=1, drafts=held),
        LogitRows(0, 1, vector([3, 4, 5]), column=1),
    ):
        with pytest.raises(TensorContractError, match="following rows: expected 2 of width 1 and"):
            write_drafts(drafts, place, rows, slots, backend=backend)


def test_bits_of_all_ids() -> None:
    """The sign's bit too, which int32 shifts to."""
    assert ids_in(bits_of(range(64), 2)) == set(range(64))


@pytest.mark.parametrize("backend", Backend)
def test_greedy_drafts_have_the_same_mask(backend: Backend) -> None:
    """As equal sampled drafts; no draft is a disallowed token."""
    checked = 0
    for seed in range(20 if backend is Backend.TORCH else 8):
        rng = random.Random(seed)
        requests, vocab, k = rng.randint(1, 4), rng.choice((2, 33, 100)), 4
        mine = Batch.of(seed, requests, vocab)
        result = mine.copy()
        positions = vector(mine.positions, torch.int64)
        drafts = torch.full((requests, k), -1, dtype=torch.int32, device=DEVICE)
        following = torch.full((requests, k + 1), -1, dtype=torch.int32, device=DEVICE)
        noise = torch.Generator().manual_seed(seed)
        for number in range(k):
            place = DraftOutput(drafts, following, number)
            rows = LogitRows(0, 1, positions, None, number, drafts)
            next_rows = replace(rows, column=number + 1) if number + 1 < k else None
            logits = torch.randn(requests, vocab, generator=noise).to(DEVICE)
            propose_processed(logits, place, rows, mine.slots, next_rows, backend=backend)
            write_drafts(drafts[:, number].clone(), place, next_rows, result.slots, backend=backend)
            for name in ("allowed", "masked_ids"):
                found, expected = (vars(each.slots.draft_mask)[name] for each in (mine, result))
                rows_of_requests = slice(0, len(found) - (name == "hidden"))
                assert torch.equal(found[rows_of_requests], expected[rows_of_requests])
            if next_rows is None:
                draft_mask = mine.slots.draft_mask
                assert draft_mask is not None
                for slot, draft in zip(mine.slots.slot_ids, drafts[:, number], strict=False):
                    row = int(column(mine.slots, "allowed_row")[int(slot)])
                    left = ids_in(draft_mask.allowed[row, :-1]) if row >= 0 else {int(draft)}
                    assert int(draft) in left or not left
                continue
            indices = [position + number + 2 for position in mine.positions]
            before = [row[: number + 1] for row in drafts.tolist()]
            checked += mine.check(mine.options, indices, before)
    assert checked > 8
