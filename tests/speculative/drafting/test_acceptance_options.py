"""Options of single requests that reach acceptance through the worker: stops, phases, pools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.config import SpeculativeDecodingMode
from mtp_plugin.errors import MetadataError
from mtp_plugin.ops.step import STATUS_NO_FINITE_LOGIT, SamplingKind
from mtp_plugin.requests.stopping import MAX_STOP_IDS
from mtp_plugin.speculative.drafting import MTPEagleWorker
from mtp_plugin.speculative.state import MTPHiddenStatesManager
from mtp_plugin.speculative.verification import RelaxedVerification
from tests.speculative.drafting.example import VOCAB
from tests.speculative.drafting.host import H, Prompt, ScriptedLayer, Step, Turn
from tests.speculative.drafting.phases import fill_slots, phases, set_phases
from tests.speculative.plain_host import Attention

EOS, SECOND = 50, 51


def with_second_choice(step: Step) -> Step:
    """`SECOND` comes next in every row."""
    step.logits[:, SECOND] = step.logits[:, SECOND].clamp_min(-1.0)
    return step


Least = tuple[int, int] | None
"""Tokens of a prompt, and of its output before one may stop it."""


def run(step: Step, stop_ids: list[list[int]], least: list[Least]) -> dict[str, torch.Tensor]:
    values = {}
    for slot, ids, each in zip(step.slots, stop_ids, least, strict=True):
        values[slot] = {"stop_ids": ids}
        if each is not None:
            values[slot] |= {"prompt_len": each[0], "min_tokens": each[1]}
    fill_slots(step.manager, values)
    is_set = any(each is not None for each in least)
    step.spec.sampling_kind = SamplingKind.PROCESSED if is_set else SamplingKind.GREEDY
    worker = MTPEagleWorker(SimpleNamespace(max_draft_len=step.k), device="cpu")
    return worker(**step.inputs(), mtp_layers=[ScriptedLayer()])


# --- a stop that comes too early ---


def test_a_drafted_end_waits_for_min_tokens() -> None:
    """Prompt of 3, 2 tokens out, at least 4: the rows draw tokens 2, 3, 4 and 5 of the output."""
    text = [1, 2, 3, 10, 11]

    def emitted(drafts: list[int], target: list[int]) -> list[int]:
        step = with_second_choice(Step(3, turns=[Turn(text, drafts, target)]))
        result = run(step, [[EOS]], [(3, 4)])
        count = int(result["new_tokens_lens"][0])
        return result["new_tokens"][0, :count].tolist()

    assert emitted([EOS, 21, 22], [EOS, 21, 22, 23]) == [SECOND]
    assert emitted([20, EOS, 22], [20, EOS, 22, 23]) == [20, SECOND]
    assert emitted([20, SECOND, 22], [20, EOS, 22, 23]) == [20, SECOND, 22, 23]
    assert emitted([20, 21, EOS], [20, 21, EOS, 23]) == [20, 21, EOS, 23]
    assert emitted([20, 21, 22], [20, 21, 22, EOS]) == [20, 21, 22, EOS]


def test_every_request_has_its_own_least() -> None:
    """Prompts draw token 0 of their output; masks follow requests, not rows."""
    prompts = [Prompt([1, 2], choice=EOS), Prompt([1, 2], choice=EOS)]
    turns = [Turn([1, 2, 9], [EOS], [EOS, 30]), Turn([1, 2, 9], [EOS], [EOS, 30])]
    step = with_second_choice(Step(1, prompts, turns))
    result = run(step, [[EOS], [], [EOS, 30], [7]], [(2, 1), (2, 1), (2, 2), (2, 2)])
    assert result["new_tokens"].tolist() == [[SECOND, -1], [EOS, -1], [SECOND, -1], [EOS, 30]]


@pytest.mark.parametrize(("least", "emitted"), [(0, EOS), (1, SECOND)])
def test_prompt_samples_its_next_token(least: int, emitted: int) -> None:
    step = with_second_choice(Step(1, [Prompt([1, 2], choice=EOS)]))
    assert run(step, [[EOS]], [(2, least)])["new_tokens"].tolist() == [[emitted, -1]]


def test_positions_at_the_limit_do_not_mislead() -> None:
    """Positions of absent drafts are clamped; the index of a row counts on."""
    text = [1 + i % 40 for i in range(200)]
    step = with_second_choice(Step(2, turns=[Turn(text, [20, 21], [20, EOS, 22])]))
    assert step.position_ids[0].tolist() == [199, 200, 200]
    result = run(step, [[EOS]], [(199, 3)])
    assert result["new_tokens"].tolist() == [[20, SECOND, -1]]
    step = with_second_choice(Step(2, turns=[Turn(text, [20, 21], [20, EOS, 22])]))
    assert run(step, [[EOS]], [(199, 2)])["new_tokens"].tolist() == [[20, EOS, -1]]


def test_nothing_but_stops() -> None:
    """A row that only has an early stop to offer is dead."""
    step = Step(1, [Prompt([1, 2], choice=EOS)])
    step.logits.fill_(-torch.inf)
    step.logits[0, EOS] = 0.0
    result = run(step, [[EOS]], [(2, 7)])
    assert result["status"].tolist() == [STATUS_NO_FINITE_LOGIT]
    assert result["logits"][0, EOS] == 0.0


def test_stops_without_a_least_are_left_to_the_sampler() -> None:
    step = Step(1, [Prompt([1, 2], choice=EOS)])
    assert run(step, [[EOS]], [None])["new_tokens"].tolist() == [[EOS, -1]]


def test_public_acceptance_needs_positions_or_kv_lens_to_edit_logits() -> None:
    step = Step(1, [Prompt([1, 2])], attention=Attention)
    step.spec.sampling_kind = SamplingKind.PROCESSED
    worker = MTPEagleWorker(SimpleNamespace(max_draft_len=1), device="cpu")
    with pytest.raises(MetadataError, match="expected position_ids, or kv_lens_cuda in the"):
        worker.sample_and_accept_draft_tokens(step.input_ids, step.logits, step.spec, step.attn)


# --- relaxed acceptance ---

BEGIN, END = 40, 41
CONFIG = SimpleNamespace(
    max_draft_len=2,
    use_relaxed_acceptance_for_thinking=True,
    relaxed_topk=2,
    relaxed_delta=0.5,
    begin_thinking_phase_token=BEGIN,
    end_thinking_phase_token=END,
)


def relaxed_step(prompts: list[Prompt], turns: list[Turn], padding: int = 0) -> Step:
    """`SECOND` is a close second choice in every row."""
    step = Step(2, prompts, turns, padding=padding)
    manager = MTPHiddenStatesManager(CONFIG, torch.float32, H, 12, device="cpu")
    for request_id in range(len(step.requests)):
        manager.slot_manager.add_slot(request_id)
    step.manager = step.spec.mtp_hidden_states_manager = manager
    step.spec.prepare()
    step.logits[:, SECOND] = step.logits[:, SECOND].clamp_min(-0.2)
    return step


def relaxed(step: Step) -> dict[str, torch.Tensor]:
    return MTPEagleWorker(CONFIG, device="cpu")(**step.inputs(), mtp_layers=[ScriptedLayer()])


def end_or_not(kernels: str, **request: Any) -> list[list[int]]:
    """A request that thinks drafts 2 and 4 where 3 is a little likelier than 2, then 4 and 5."""
    config = SimpleNamespace(**vars(CONFIG), mtp=SimpleNamespace(kernels=kernels))
    manager = MTPHiddenStatesManager(config, torch.float32, H, 4, device="cpu")
    prompt = SimpleNamespace(
        request_id=7, is_first_context_chunk=True, get_tokens=lambda _: [1, BEGIN], **request
    )
    other = SimpleNamespace(
        request_id=0, is_first_context_chunk=True, get_tokens=lambda _: [1], py_end_id=9
    )
    manager.prepare_resources(SimpleNamespace(context_requests=[other, prompt]))
    step = Step(2, turns=[Turn([1, 2], [2, 4], [3, 4, 5])], mode=SpeculativeDecodingMode.MTP)
    step.spec.mtp_hidden_states_manager = manager
    step.spec.request_ids = step.attn.request_ids = [7]
    step.spec.prepare()
    step.logits.fill_(-9.0)
    for row, token in enumerate((3, 4, 5)):
        step.logits[row, token] = 1.0
    step.logits[0, 2] = 0.9
    worker = MTPEagleWorker(config, device="cpu")
    accepted, counts = worker.sample_and_accept_draft_tokens(
        step.input_ids, step.logits, step.spec, step.attn
    )
    return accepted[0, : int(counts[0])].tolist()


KERNELS = pytest.mark.parametrize("kernels", ["reference", "triton"])


@KERNELS
def test_ends_are_read_of_the_host(kernels: str) -> None:
    """Who thinks may draft its end, but only as first choice."""
    assert end_or_not(kernels) == [2, 4, 5]
    assert end_or_not(kernels, py_end_id=9) == [2, 4, 5]
    assert end_or_not(kernels, py_end_id=2) == [3]
    assert end_or_not(kernels, py_end_id=9, py_stop_ids=(8, 2)) == [3]
    assert end_or_not(kernels, py_stop_words_list=[[2]]) == [3]
    # and 4 is first choice
    assert end_or_not(kernels, py_end_id=4) == [2, 4, 5]


@KERNELS
def test_too_many_stop_ids_make_acceptance_strict(kernels: str, caplog: Any) -> None:
    """2 is none of them, but the slot does not hold all of them."""
    many = tuple(range(20, 20 + MAX_STOP_IDS + 1))
    assert end_or_not(kernels, py_stop_ids=many[:-1]) == [2, 4, 5]
    assert caplog.text == ""
    assert end_or_not(kernels, py_stop_ids=many) == [3]
    assert "a request has 33 stop ids, and relaxed acceptance serves at most 32" in caplog.text


@KERNELS
def test_a_request_may_ask_for_strict_acceptance(kernels: str) -> None:
    assert end_or_not(kernels, py_relaxed_acceptance=True) == [2, 4, 5]
    assert end_or_not(kernels, py_relaxed_acceptance=False) == [3]


def test_emitted_tokens_move_the_phase() -> None:
    """Begin as a bonus, end inside a run, begin after a prompt; the delta mirrors it."""
    prompt = Prompt([1, 2], choice=BEGIN)
    turns = [Turn([1, 2], [20, 21], [20, 21, BEGIN]), Turn([1, 2], [END, 21], [END, 21, 22])]
    step = relaxed_step([prompt], turns)
    set_phases(step.manager, {2: True})
    relaxed(step)
    assert phases(step.manager, 3) == [1, 1, 0]
    assert step.manager.mtp_relaxed_delta_pool[:3].tolist() == [0.5, 0.5, 0.0]


def test_pieces_of_prompts_and_padding_move_no_phase() -> None:
    piece = Prompt([1, BEGIN, 3], 0, 2, choice=END)
    step = relaxed_step([piece], [])
    set_phases(step.manager, {0: True, 1: True})
    relaxed(step)
    assert phases(step.manager, 2) == [1, 1]
    padded = relaxed_step([], [Turn([1, 2], [20, 21], [20, 21, 22])], padding=3)
    padded.logits[3:] = -100.0
    padded.logits[3:, BEGIN] = 0.0
    before = padded.manager.table.rows.clone()
    relaxed(padded)
    sentinel = padded.manager.sentinel_slot
    assert torch.equal(padded.manager.table.rows[:sentinel], before[:sentinel])


def test_the_last_piece_knows_the_whole_prompt() -> None:
    """The begin token is in an earlier chunk; admission wrote the phase to the slot."""
    prompt = Prompt([1, BEGIN, 3, 4], 2, choice=20)
    step = relaxed_step([prompt], [])
    set_phases(step.manager, {0: True})
    relaxed(step)
    assert phases(step.manager, 1) == [1]


def test_a_dead_row_ends_no_phase() -> None:
    """Token 0 is what the argmax of nothing looks like; as an end token it must not count."""
    config = SimpleNamespace(**{**vars(CONFIG), "end_thinking_phase_token": 0})
    step = relaxed_step([], [Turn([1, 2], [0, 0], [None, None, None])])
    step.logits.fill_(-torch.inf)
    set_phases(step.manager, {0: True})
    worker = MTPEagleWorker(config, device="cpu")
    result = worker(**step.inputs(), mtp_layers=[ScriptedLayer()])
    assert result["new_tokens_lens"].tolist() == [0]
    assert phases(step.manager, 1) == [1]


def thinking_tokens(holder: Any) -> tuple[int, int]:
    modes = [mode for mode in holder.modes if isinstance(mode, RelaxedVerification)]
    return modes[0].thinking_tokens


@KERNELS
@pytest.mark.parametrize("relaxed_delta", [0.5, 0.0])
def test_a_host_that_writes_the_delta_is_obeyed(kernels: str, relaxed_delta: float) -> None:
    """As TensorRT-LLM's own step reads it: the value in the pool counts, not the option."""
    config = SimpleNamespace(
        **{**vars(CONFIG), "relaxed_delta": relaxed_delta}, mtp=SimpleNamespace(kernels=kernels)
    )
    manager = MTPHiddenStatesManager(config, torch.float32, H, 4, device="cpu")
    worker = MTPEagleWorker(config, device="cpu")

    def emitted() -> list[list[int]]:
        """`SECOND`, 0.1 less probable than 20, twice; three requests."""
        step = Step(2, turns=[Turn([1, 2], [SECOND, 21], [20, 21, 22])] * 3)
        for request_id in range(3):
            manager.slot_manager.add_slot(request_id)
        step.spec.mtp_hidden_states_manager = manager
        step.spec.prepare()
        step.logits[:, SECOND] = step.logits[:, SECOND].clamp_min(-0.2)
        return worker(**step.inputs(), mtp_layers=[ScriptedLayer()])["new_tokens"].tolist()

    strict, loose = [20, -1, -1], [SECOND, 21, 22]
    set_phases(manager, {0: False, 1: True, 2: True})
    assert emitted() == [strict, *[loose if relaxed_delta else strict] * 2]
    manager.mtp_relaxed_delta_pool[:3] = torch.tensor([1.5, 0.01, relaxed_delta])
    for _ in range(2):  # and it stays in force
        assert emitted() == [loose, strict, loose if relaxed_delta else strict]
        assert manager.mtp_relaxed_delta_pool[:2].tolist() == pytest.approx([1.5, 0.01])
    manager.mtp_relaxed_delta_pool[:3] = 0.0
    assert emitted() == [strict, strict, strict]


def test_given_thinking_ids_win_in_both_pieces() -> None:
    bare = {n: v for n, v in vars(CONFIG).items() if not n.endswith("_thinking_phase_token")}
    for config in (CONFIG, SimpleNamespace(**bare)):
        worker = MTPEagleWorker(config, device="cpu", thinking_tokens=(5, 6))
        manager = MTPHiddenStatesManager(
            config, torch.float32, H, 2, device="cpu", thinking_tokens=(5, 6)
        )
        assert thinking_tokens(worker.verifier) == thinking_tokens(manager) == (5, 6)


def test_thinking_ids_of_a_host_are_taken() -> None:
    """TensorRT-LLM's upper-case ids of DeepSeek-R1, as its older configs have them."""
    given = {n: v for n, v in vars(CONFIG).items() if not n.endswith("_thinking_phase_token")}
    config = SimpleNamespace(
        **given, BEGIN_THINKING_PHASE_TOKEN=128798, END_THINKING_PHASE_TOKEN=128799
    )
    worker = MTPEagleWorker(config, device="cpu")
    manager = MTPHiddenStatesManager(config, torch.float32, H, 2, device="cpu")
    assert thinking_tokens(worker.verifier) == thinking_tokens(manager) == (128798, 128799)


def test_ids_of_every_result_are_tokens() -> None:
    step = relaxed_step([Prompt([1, 2])], [Turn([1, 2], [SECOND, SECOND], [20, 21, 22])])
    set_phases(step.manager, {0: True, 1: True})
    result = relaxed(step)
    assert result["next_new_tokens"].ge(0).all()
    assert result["next_new_tokens"].lt(VOCAB).all()
