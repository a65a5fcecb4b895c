"""What holds for every worker; the tests of each inherit it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.config import SpeculativeDecodingMode
from mtp_plugin.errors import MetadataError, TensorContractError
from mtp_plugin.ops.step import PAD_TOKEN, STATUS_NO_FINITE_LOGIT, STATUS_OK
from mtp_plugin.speculative.drafting import SpecWorker
from tests.ops.bits import same_bits
from tests.speculative.drafting.example import VOCAB, Pass
from tests.speculative.drafting.host import (
    BrokenLayer,
    Prompt,
    ReturningLayer,
    ScriptedLayer,
    Seen,
    SelectingLayer,
    Step,
    Turn,
)
from tests.speculative.plain_host import Attention, KVAttention, LimitedAttention, PlainAttributes

ExpectedPasses = list[Pass | None]
"""Per pass a request's rows; None where they are not read."""


def random_step(k: int, seed: int, **options: Any) -> Step:
    """Whole prompts, pieces of prompts, and turns with runs of any length."""
    rng = random.Random(1000 * k + seed)
    pieces = options.get("look_ahead", True)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, VOCAB) for _ in range(count)]

    def prompt() -> Prompt:
        text = tokens(rng.randint(1, 3 * k + 3))
        start = rng.randrange(len(text)) if pieces and rng.random() < 0.6 else 0
        end = rng.randint(start + 1, len(text)) if pieces else len(text)
        return Prompt(text, start, end, choice=rng.randrange(VOCAB))

    def turn() -> Turn:
        drafts = tokens(k)
        right = rng.choice([0.0, 0.7, 1.0])
        target = [d if rng.random() < right else rng.randrange(VOCAB) for d in drafts]
        draft_len = rng.randint(0, k) if rng.random() < 0.3 else None
        text = tokens(rng.randint(2, 3 * k + 3))
        return Turn(text, drafts, [*target, rng.randrange(VOCAB)], draft_len)

    num_prompts = rng.randint(0, 3)
    num_turns = rng.randint(0 if num_prompts else 1, 4)
    return Step(
        k,
        [prompt() for _ in range(num_prompts)],
        [turn() for _ in range(num_turns)],
        **options,
    )


class Same:
    """Equal to what holds the very same object; keeps it, so that no other takes its address."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def snapshot(attn: Any) -> dict[str, Any]:
    """Values and identities of every field."""
    taken: dict[str, Any] = {}
    fields = {**vars(attn), **vars(getattr(attn, "kv_cache_params", None) or SimpleNamespace())}
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            taken[name] = (Same(value), value.tolist())
        elif isinstance(value, list):
            taken[name] = (Same(value), list(value))
        elif isinstance(value, (int, bool)):
            taken[name] = value
    return taken


def assert_seen(step: Step, seen: list[Seen], by_request: list[ExpectedPasses]) -> None:
    """Check that every call of a layer has the expected rows of every request."""
    clamped = not getattr(step.attn, "supports_dead_rows", False)
    for number, call in enumerate(seen):
        assert all(0 <= token < VOCAB for token in call.ids)
        assert call.seq_lens == call.host_seq_lens
        first = 0
        for request, passes in enumerate(by_request):
            count = call.seq_lens[request]
            rows = slice(first, first + count)
            first += count
            expected = passes[number]
            if expected is None:
                continue
            assert count == len(expected.rows)
            if call.kv_lens is not None:
                least = count if clamped else 0
                assert call.kv_lens[request] == max(expected.kv_len, least)
            numbers = zip(call.ids[rows], call.positions[rows], call.states[rows], strict=True)
            for row, (token, position, state) in zip(expected.rows, numbers, strict=True):
                if row is None:
                    assert position == 0
                    continue
                assert (token, position) == (row.token, row.position)
                if row.state is not None:
                    assert state == row.state


class WorkerSteps:
    """Random steps: subclasses say how a worker is made and what its layers are to see."""

    draft_lens = (1, 3)
    mode = SpeculativeDecodingMode.MTP

    def make(self, k: int, **options: Any) -> SpecWorker:
        raise NotImplementedError

    def num_layers(self, k: int) -> int:
        raise NotImplementedError

    def num_calls(self, k: int) -> int:
        """How often layers are called in a step."""
        return k

    def num_selections(self, k: int) -> int:
        """How often layers are called with output_rows."""
        raise NotImplementedError

    def expected_passes(self, step: Step, request: Prompt | Turn) -> ExpectedPasses:
        """The expected passes of a request."""
        raise NotImplementedError

    def step(self, k: int, seed: int, **options: Any) -> Step:
        return random_step(k, seed, mode=self.mode, **options)

    def layers(self, k: int, kind: type[ScriptedLayer] = ScriptedLayer) -> list[ScriptedLayer]:
        seen: list[Seen] = []
        return [kind(depth, seen) for depth in range(self.num_layers(k))]

    def run(
        self, step: Step, layers: list[ScriptedLayer] | None = None, **options: Any
    ) -> dict[str, torch.Tensor]:
        layers = self.layers(step.k) if layers is None else layers
        return self.make(step.k, **options)(**step.inputs(), mtp_layers=layers)

    @pytest.mark.parametrize("seed", range(8))
    def test_step_is_as_in_the_example(self, k: int, seed: int) -> None:
        """What is emitted, what is drafted, and what every pass reads on the way."""
        step = self.step(k, seed)
        layers = self.layers(k)
        result = self.run(step, layers)
        self.assert_results(step, result)
        seen = layers[0].seen if layers else []
        assert len(seen) == self.num_calls(k)
        assert_seen(step, seen, [self.expected_passes(step, request) for request in step.requests])

    def assert_results(self, step: Step, result: dict[str, torch.Tensor]) -> None:
        k = step.k
        for row, request in enumerate(step.requests):
            run = request.run
            assert result["new_tokens"][row].tolist() == run + [PAD_TOKEN] * (k + 1 - len(run))
            assert result["new_tokens_lens"][row] == len(run)
            assert result["status"][row] == STATUS_OK
            following = result["next_new_tokens"][row].tolist()
            assert following[1:] == result["next_draft_tokens"][row].tolist()
            assert all(0 <= token < VOCAB for token in following)
            if run:
                assert following[0] == run[-1]
                passes = self.expected_passes(step, request)
                assert following[1:] == [p.draft for p in passes if p is not None]

    @pytest.mark.parametrize("attention", [Attention, KVAttention, PlainAttributes])
    @pytest.mark.parametrize("seed", range(2))
    def test_hosts_with_fewer_fields(self, k: int, seed: int, attention: type) -> None:
        """Without look-ahead, limits, dead rows or lengths on the device; or without properties."""
        step = self.step(k, seed, attention=attention, look_ahead=False)
        layers = self.layers(k)
        self.assert_results(step, self.run(step, layers))
        seen = layers[0].seen if layers else []
        assert_seen(step, seen, [self.expected_passes(step, request) for request in step.requests])

    @pytest.mark.parametrize("seed", range(2))
    def test_a_layer_may_return_what_is_read_alone(self, k: int, seed: int) -> None:
        step = self.step(k, seed)
        layers = self.layers(k, SelectingLayer)
        self.assert_results(step, self.run(step, layers))
        seen = layers[0].seen if layers else []
        assert_seen(step, seen, [self.expected_passes(step, request) for request in step.requests])
        counts = [call.extra["output_rows"] for call in seen if "output_rows" in call.extra]
        assert counts == [len(step.requests)] * self.num_selections(k)


class WorkerContract(WorkerSteps):
    """What holds for every worker."""

    # ---- results -------------------------------------------------------------------------------

    def test_keys_shapes_and_types(self, k: int) -> None:
        step = self.step(k, 0)
        result = self.run(step)
        num_seqs = len(step.requests)
        shapes = {
            "new_tokens": (num_seqs, k + 1),
            "new_tokens_lens": (num_seqs,),
            "next_draft_tokens": (num_seqs, k),
            "next_new_tokens": (num_seqs, k + 1),
            "status": (num_seqs,),
        }
        assert result.pop("logits") is step.logits
        assert {name: tuple(tensor.shape) for name, tensor in result.items()} == shapes
        assert {tensor.dtype for tensor in result.values()} == {torch.int32}

    def test_one_row_of_logits_may_be_flat(self, k: int) -> None:
        step = Step(k, [Prompt([3, 4, 5], choice=6)], mode=self.mode)
        step.logits = step.logits[0]
        result = self.run(step)
        assert result["logits"] is step.logits
        assert result["new_tokens"].tolist() == [[6] + [PAD_TOKEN] * k]

    def test_positions_may_be_flat(self, k: int) -> None:
        step, same = self.step(k, 1), self.step(k, 1)
        step.position_ids = step.position_ids[0]
        flat, expected = self.run(step), self.run(same)
        for name in ("new_tokens", "next_draft_tokens"):
            assert torch.equal(flat[name], expected[name])

    def test_layers_may_come_in_a_draft_model(self, k: int) -> None:
        step, same = self.step(k, 2), self.step(k, 2)
        model = SimpleNamespace(lm_head=None, embed_tokens=None, mtp_layers=self.layers(k))
        inputs = step.inputs()
        del inputs["lm_head"], inputs["embed_tokens"]
        result = self.make(k)(**inputs, draft_model=model, resource_manager=None)
        assert torch.equal(result["next_new_tokens"], self.run(same)["next_new_tokens"])

    # ---- requests that are special -------------------------------------------------------------

    def test_absent_drafts_are_never_accepted(self, k: int) -> None:
        """All drafts match; only those before draft_len are accepted, then the bonus token."""
        drafts = list(range(10, 10 + k))
        turns = [Turn([1, 2, 3], drafts, [*drafts, 30], draft_len=n) for n in range(k + 1)]
        step = Step(k, turns=turns, mode=self.mode)
        result = self.run(step)
        assert result["new_tokens_lens"].tolist() == [n + 1 for n in range(k + 1)]
        self.assert_results(step, result)

    def test_a_piece_of_a_prompt_emits_nothing(self, k: int) -> None:
        pieces = [Prompt([3, 4, 5, 6], 0, 2), Prompt([3, 4, 5, 6], 2, 3), Prompt([3, 4, 5, 6], 2)]
        step = Step(k, pieces, mode=self.mode)
        result = self.run(step)
        assert result["new_tokens_lens"].tolist() == [0, 0, 1]
        assert result["new_tokens"][:2].eq(PAD_TOKEN).all()
        assert result["status"].tolist() == [STATUS_OK] * 3
        assert result["next_new_tokens"].ge(0).all()

    def test_a_dead_row_fails_its_request_alone(self, k: int) -> None:
        """Everything else is as without it."""
        drafts = list(range(10, 10 + k))
        dead_turn = Turn([7, 8, 9], drafts, [*drafts, None])
        alive = Turn([1, 2, 3], drafts, [*drafts[:-1], 30, 31][: k + 1])
        dead_prompt, prompt = Prompt([5, 6], choice=None), Prompt([4, 5, 6], choice=20)
        step = Step(k, [dead_prompt, prompt], [dead_turn, alive], mode=self.mode)
        result = self.run(step)
        fine, dead = STATUS_OK, STATUS_NO_FINITE_LOGIT
        assert result["status"].tolist() == [dead, fine, dead, fine]
        assert result["new_tokens_lens"].tolist() == [0, 1, k, len(alive.run)]
        assert result["new_tokens"][2].tolist() == [*drafts, PAD_TOKEN]
        assert result["next_new_tokens"].ge(0).all()
        assert result["next_new_tokens"].lt(VOCAB).all()
        alone = self.run(Step(k, [prompt], [alive], mode=self.mode))
        for name in ("new_tokens", "new_tokens_lens", "next_draft_tokens", "next_new_tokens"):
            assert torch.equal(result[name][[1, 3]], alone[name])

    def test_a_request_without_any_token_keeps_the_batch_going(self, k: int) -> None:
        """Its first row is dead already: an empty run, ids that are tokens all the same."""
        step = Step(k, turns=[Turn([1, 2], [9] * k, [None] * (k + 1))], mode=self.mode)
        result = self.run(step)
        assert result["new_tokens_lens"].tolist() == [0]
        assert result["new_tokens"].eq(PAD_TOKEN).all()
        assert result["next_new_tokens"].ge(0).all()

    @pytest.mark.parametrize("length", [1, 2, 3])
    def test_prompts_shorter_than_the_drafts(self, k: int, length: int) -> None:
        prompt = list(range(5, 5 + length))
        turn = Turn([*prompt, 30], [9] * k, [8] * (k + 1))
        step = Step(k, [Prompt(prompt)], [turn], mode=self.mode)
        layers = self.layers(k)
        self.assert_results(step, self.run(step, layers))
        seen = layers[0].seen if layers else []
        assert_seen(step, seen, [self.expected_passes(step, request) for request in step.requests])

    # ---- what must not change ------------------------------------------------------------------

    @pytest.mark.parametrize("kind", [ScriptedLayer, ReturningLayer])
    @pytest.mark.parametrize("options", [{}, {"chain": "target_shift"}, {"chain": "none"}])
    def test_inputs_stay_as_they_are(
        self, k: int, kind: type[ScriptedLayer], options: dict[str, str]
    ) -> None:
        """Also where a layer returns the very tensor that it was given."""
        step = self.step(k, 3)
        tensors = {
            **{name: v for name, v in step.inputs().items() if isinstance(v, torch.Tensor)},
            **{name: v for name, v in vars(step.spec).items() if isinstance(v, torch.Tensor)},
        }
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        result = self.run(step, self.layers(k, kind), **options)
        for name, tensor in tensors.items():
            assert same_bits(tensor, before[name]), name
        emitted = [request.run for request in step.requests]
        assert result["new_tokens_lens"].tolist() == [len(run) for run in emitted]
        assert result["new_tokens"].tolist() == [
            r + [PAD_TOKEN] * (k + 1 - len(r)) for r in emitted
        ]

    @pytest.mark.parametrize(
        "attention", [LimitedAttention, KVAttention, Attention, PlainAttributes]
    )
    def test_attention_metadata_is_as_before(self, k: int, attention: type) -> None:
        """R04: every field, host lists and identities included, and no field more."""
        step = self.step(k, 4, attention=attention, look_ahead=False)
        before = snapshot(step.attn)
        self.run(step)
        assert snapshot(step.attn) == before

    def test_parked_slots_and_padding(self, k: int) -> None:
        """Padding rows change nothing for the live rows, and write nowhere but to the sentinel."""
        slots = [7, 0, 4]
        drafts = list(range(10, 10 + k))
        turns = [
            Turn([1, 2, 3, 4], drafts, [*drafts, 30]),
            Turn([5, 6], drafts, [31] * (k + 1)),
            Turn([7, 8, 9], drafts, [*drafts[:1], 32, 33, 34, 35][: k + 1]),
        ]
        padded = Step(k, turns=turns, padding=5, slots=slots, mode=self.mode)
        plain = Step(k, turns=turns, slots=slots, mode=self.mode)
        before = self.pools(padded)
        result, expected = self.run(padded), self.run(plain)
        for name in ("new_tokens", "new_tokens_lens", "next_draft_tokens", "next_new_tokens"):
            assert torch.equal(result[name][:3], expected[name])
            assert result[name].shape[0] == 8
        for pool, old, same in zip(
            self.pools(padded, False), before, self.pools(plain, False), strict=True
        ):
            sentinel = pool.shape[0] - 1
            for slot in range(sentinel):
                if slot in slots:
                    assert same_bits(pool[slot], same[slot])
                else:
                    assert same_bits(pool[slot], old[slot])

    @staticmethod
    def pools(step: Step, copy: bool = True) -> list[torch.Tensor]:
        if step.manager is None:
            return []
        pools = [step.manager.mtp_past_tokens_pool, step.manager.mtp_past_hidden_states_pool]
        pools.append(step.manager.table.rows)
        return [pool.clone() for pool in pools] if copy else pools

    @pytest.mark.parametrize("seed", range(2))
    def test_another_order_of_requests(self, k: int, seed: int) -> None:
        """Permuted rows give permuted results, and the same pools."""
        step = self.step(k, seed)
        rng = random.Random(seed)
        prompts = rng.sample(range(len(step.prompts)), len(step.prompts))
        turns = rng.sample(range(len(step.turns)), len(step.turns))
        order = prompts + [len(prompts) + turn for turn in turns]
        other = Step(
            k,
            [step.prompts[i] for i in prompts],
            [step.turns[i] for i in turns],
            slots=order,
            mode=self.mode,
        )
        result, permuted = self.run(step), self.run(other)
        for name in set(result) - {"logits"}:
            assert torch.equal(result[name][order], permuted[name])
        for pool, same in zip(self.pools(step), self.pools(other), strict=True):
            assert same_bits(pool, same)

    # ---- arguments ------------------------------------------------------------------------------

    def test_rows_that_do_not_fit(self, k: int) -> None:
        step = self.step(k, 5)
        step.position_ids = step.position_ids[:, :-1]
        with pytest.raises(TensorContractError, match=r"forward: expected T = .* positions"):
            self.run(step)
        step = self.step(k, 5)
        step.hidden_states = step.hidden_states[:-1]
        with pytest.raises(TensorContractError, match=r"forward: expected T = .* states"):
            self.run(step)

    def test_skip_forward(self, k: int) -> None:
        """The same keys and shapes with valid ids, with and without logits."""
        step = self.step(k, 7)
        expected = self.run(step)
        for logits in (step.logits, None):
            inputs = {**step.inputs(), "logits": logits}
            result = self.make(k).skip_forward(**inputs, mtp_layers=None)
            assert result.pop("logits") is logits
            for name, tensor in result.items():
                assert tensor.shape == expected[name].shape
                assert tensor.dtype == expected[name].dtype
            assert result["new_tokens_lens"].eq(1).all()
            assert result["new_tokens"][:, 0].ge(0).all()
            assert result["next_new_tokens"].ge(0).all()


class DraftingContract(WorkerContract):
    """And for every worker that calls draft layers."""

    @pytest.mark.parametrize("attention", [LimitedAttention, Attention])
    def test_attention_metadata_is_as_before_a_failure(self, k: int, attention: type) -> None:
        """R04: at whichever call a layer breaks; the next step then runs as if nothing had been."""
        for at_call in range(1, self.num_calls(k) + 1):
            step = self.step(k, 4, attention=attention, look_ahead=False)
            before = snapshot(step.attn)
            broken = BrokenLayer(at_call)
            with pytest.raises(RuntimeError, match="the layer broke"):
                self.run(step, [broken] * self.num_layers(k))
            assert snapshot(step.attn) == before
            again = self.step(k, 4, attention=attention, look_ahead=False)
            again.attn = step.attn
            self.assert_results(again, self.run(again))

    def test_a_layer_that_returns_other_rows_than_are_read(self, k: int) -> None:
        """A wrapper may inherit the promise and swallow the argument."""

        class Swallowing(ScriptedLayer):
            takes_output_rows = True

        step = self.step(k, 3)
        with pytest.raises(TensorContractError, match="takes_output_rows returned"):
            self.run(step, self.layers(k, Swallowing))

    def test_ranks_that_exchange_rows_exchange_all(self, k: int) -> None:
        step = self.step(k, 3)
        step.spec.all_rank_num_tokens = [7, 7]
        layers = self.layers(k, SelectingLayer)
        self.assert_results(step, self.run(step, layers))
        calls = [call for call in layers[0].seen if "output_rows" in call.extra]
        assert all(call.extra.get("all_rank_num_tokens") is None for call in calls)

    def test_layer_that_changes_metadata_is_found(self, k: int) -> None:
        """check_metadata names the field; without it there is no check."""
        options = SimpleNamespace(check_metadata=True)
        changes = [
            ("kv_capacity", lambda attn: attn.kv_capacity.add_(1)),
            ("kv_capacity", lambda attn: setattr(attn, "kv_capacity", attn.kv_capacity.clone())),
            ("request_ids", lambda attn: attn.request_ids.append(9)),
            ("is_cuda_graph", lambda attn: setattr(attn, "is_cuda_graph", True)),
            (
                "kv_cache_params.num_cached_tokens_per_seq",
                lambda attn: setattr(
                    attn.kv_cache_params,
                    "num_cached_tokens_per_seq",
                    list(attn.kv_cache_params.num_cached_tokens_per_seq),
                ),
            ),
        ]
        for name, change in changes:

            class Careless(ScriptedLayer):
                def __call__(self, *, attn_metadata: Any, **inputs: Any) -> torch.Tensor:
                    change(attn_metadata)  # noqa: B023 - called before the next one
                    return super().__call__(attn_metadata=attn_metadata, **inputs)

            with pytest.raises(MetadataError, match=f"left changes in: {name}$"):
                self.run(self.step(k, 6), self.layers(k, Careless), mtp=options)
            self.run(self.step(k, 6), self.layers(k, Careless))
        step = self.step(k, 6)
        self.assert_results(step, self.run(step, mtp=options))
