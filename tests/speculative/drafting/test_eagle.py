"""MTPEagleWorker: one layer, reused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from mtp_plugin.config import MTPDecodingConfig, SpeculativeDecodingMode
from mtp_plugin.speculative.drafting import MTPEagleWorker
from tests.speculative.drafting import example
from tests.speculative.drafting.contract import DraftingContract, ExpectedPasses, assert_seen
from tests.speculative.drafting.host import HIGHEST, Prompt, ScriptedLayer, Step, Turn
from tests.speculative.plain_host import KVAttention

MODE = SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL


class TestEagle(DraftingContract):
    mode = MODE

    def make(self, k: int, **options: Any) -> MTPEagleWorker:
        mtp = options.pop("mtp", None)
        return MTPEagleWorker(SimpleNamespace(max_draft_len=k, mtp=mtp), device="cpu", **options)

    def num_layers(self, k: int) -> int:  # noqa: ARG002 - one, whatever K
        return 1

    def num_selections(self, k: int) -> int:  # noqa: ARG002 - the first pass has more rows
        return 1

    def expected_passes(self, step: Step, request: Prompt | Turn) -> ExpectedPasses:
        k = step.k
        if isinstance(request, Prompt):
            passes = example.eagle_prompt(request.text, request.start, k, HIGHEST)
            if not request.is_final:
                # after its chunk's rows it is a row of padding
                return [passes[0]] + [None] * (k - 1)
            return list(passes)
        length, run = request.length, request.run
        return list(example.eagle_generation(length, request.inputs, run, k, HIGHEST))

    def test_later_passes_are_generations_with_room_of_their_own(self, k: int) -> None:
        """No context is left then, and rows of a prompt that goes on are written nowhere."""
        prompts = [Prompt([1, 2, 3], 0, 2), Prompt([1, 2, 3])]
        step = Step(k, prompts, [Turn([4, 5], [6] * k, [7] * (k + 1))], mode=MODE)
        layers = self.layers(k)
        self.run(step, layers)
        first, *later = layers[0].seen
        assert (first.num_contexts, first.types) == (2, [0, 0, 1])
        assert first.write_limit == step.attn.kv_write_limit.tolist()
        capacity = step.attn.kv_capacity.tolist()
        for call in later:
            assert (call.num_contexts, call.types) == (0, [1, 1, 1])
            assert call.write_limit == [0, *capacity[1:]]

    def test_the_end_of_the_longest_sequence(self, k: int) -> None:
        """Positions stop at the highest that the model has."""
        text = [1 + i % 50 for i in range(HIGHEST + 1)]
        turns = [
            Turn(text[:n], [9] * k, [8] * (k + 1), draft_len=0)
            for n in range(HIGHEST - 1, HIGHEST + 2)
        ]
        step = Step(k, [Prompt(text[:HIGHEST], HIGHEST - 2)], turns, mode=MODE)
        layers = self.layers(k)
        self.assert_results(step, self.run(step, layers))
        assert_seen(step, layers[0].seen, [self.expected_passes(step, r) for r in step.requests])
        assert max(p for call in layers[0].seen for p in call.positions) == HIGHEST

    def test_without_a_highest_position(self, k: int) -> None:
        text = [1 + i % 50 for i in range(HIGHEST)]
        step = Step(k, [Prompt(text)], mode=MODE)
        step.spec.max_position = None
        layers = self.layers(k)
        self.run(step, layers)
        assert [call.positions[-1] for call in layers[0].seen] == list(range(199, 199 + k))


# --- the letters of the design ---


def test_a_run_of_three() -> None:
    """`t u v w` emitted `u v x`: pass 1 reads `u v x x`, pass 2 the draft, and so on."""
    t, u, v, w, x = 20, 21, 22, 23, 24
    step = Step(3, turns=[Turn([5, 6, t], [u, v, w], [u, v, x, 0])], mode=MODE)
    layer = ScriptedLayer()
    result = MTPEagleWorker(MTPDecodingConfig(max_draft_len=3), device="cpu")(
        **step.inputs(), mtp_layers=[layer]
    )
    assert result["new_tokens"].tolist() == [[u, v, x, -1]]
    drafts = result["next_draft_tokens"][0].tolist()
    assert [call.ids for call in layer.seen] == [[u, v, x, x], drafts[:1], drafts[1:2]]
    assert [call.positions for call in layer.seen] == [[2, 3, 4, 5], [5], [6]]
    assert [call.kv_lens for call in layer.seen] == [[6], [6], [7]]
    assert layer.seen[0].states[:3] == [
        example.target_state(*row) for row in ((t, 2), (u, 3), (v, 4))
    ]


def test_no_manager_is_needed() -> None:
    step = Step(2, [Prompt([1, 2], choice=3)], [Turn([4, 5], [6, 7], [6, 8, 9])], mode=MODE)
    step.spec.mtp_hidden_states_manager = step.spec.slot_ids = None
    worker = MTPEagleWorker(MTPDecodingConfig(max_draft_len=2), device="cpu")
    result = worker(**step.inputs(), mtp_layers=[ScriptedLayer()])
    assert result["new_tokens"].tolist() == [[3, -1, -1], [6, 8, -1]]


def test_every_pass_refreshes_the_host() -> None:
    """Before pass 2 and before pass 3 as inside a draft loop; when everything is put back as
    after one, for tables that follow the lengths."""
    step = Step(3, [Prompt([1, 2])], attention=KVAttention, look_ahead=False, mode=MODE)
    worker = MTPEagleWorker(MTPDecodingConfig(max_draft_len=3), device="cpu")
    worker(**step.inputs(), mtp_layers=[ScriptedLayer()])
    assert step.attn.refreshed == {"spec_dec": 2, "kv_lens": 1}


def test_tensors_in_inference_mode() -> None:
    step = Step(2, turns=[Turn([4, 5], [6, 7], [6, 8, 9])], mode=MODE)
    worker = MTPEagleWorker(MTPDecodingConfig(max_draft_len=2), device="cpu")
    with torch.inference_mode():
        result = worker(**step.inputs(), mtp_layers=[ScriptedLayer()])
    assert result["new_tokens"].tolist() == [[6, 8, -1]]
