"""One worker serves every draft length up to its own: the host's metadata has the number."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.errors import MetadataError
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker
from mtp_plugin.speculative.host import HostStep
from mtp_plugin.speculative.state import MTPHiddenStatesManager
from tests.speculative.drafting.host import H, Prompt, ScriptedLayer, Seen, Step, Turn

WORKERS = [pytest.param(MTPEagleWorker, id="eagle"), pytest.param(MTPWorker, id="vanilla")]
K = 3


class CountingLayer(ScriptedLayer):
    """Counts its passes."""

    passes = 0

    def __call__(self, **kwargs: Any) -> torch.Tensor:
        self.passes += 1
        return super().__call__(**kwargs)


def run(kind: type, k: int | None, keep_warm: bool = True) -> tuple[dict[str, Any], list[int]]:
    width = K if k is None else k
    step = Step(K if k is None else k, [Prompt([1, 2], choice=9)], [turn(width), turn(width)])
    step.spec.runtime_draft_len = k
    if kind is MTPWorker:
        widen(step)
    config = MTPDecodingConfig(max_draft_len=K, mtp={"keep_warm": keep_warm})
    layers = [CountingLayer(d) for d in range(K)]
    outputs = kind(config, device="cpu")(**step.inputs(), mtp_layers=layers)
    return outputs, [layer.passes for layer in layers]


def turn(width: int) -> Turn:
    return Turn([1, 2, 3], [20, 21, 22][:width], [20, 31, 32, 33][: width + 1])


def widen(step: Step) -> None:
    """Pools of K pairs, whatever the step drafts."""
    config = SimpleNamespace(max_draft_len=K)
    manager = MTPHiddenStatesManager(config, torch.float32, H, 4, device="cpu")
    slots = [manager.slot_manager.add_slot(request) for request in step.spec.request_ids]
    step.spec.mtp_hidden_states_manager = manager
    step.spec.slot_ids = torch.tensor(slots)


@pytest.mark.parametrize("kind", WORKERS)
@pytest.mark.parametrize("k", [None, 3, 2, 1, 0])
def test_a_step_of_fewer_drafts(kind: type, k: int | None) -> None:
    outputs, _ = run(kind, k)
    width = K if k is None else k
    assert outputs["new_tokens"].shape == (3, width + 1)
    assert outputs["next_draft_tokens"].shape == (3, width)
    assert outputs["next_new_tokens"].shape == (3, width + 1)
    emitted = 2 if width else 1  # the first draft is right, and no other
    assert outputs["new_tokens_lens"].tolist() == [1, emitted, emitted]


@pytest.mark.parametrize(
    ("kind", "k", "keep_warm", "passes"),
    [
        pytest.param(MTPEagleWorker, 2, True, [2, 0, 0], id="eagle"),
        pytest.param(MTPEagleWorker, 0, True, [1, 0, 0], id="eagle-warm"),
        pytest.param(MTPEagleWorker, 0, False, [0, 0, 0], id="eagle-cold"),
        pytest.param(MTPWorker, 2, True, [1, 1, 1], id="vanilla"),
        pytest.param(MTPWorker, 2, False, [1, 1, 0], id="vanilla-cooling"),
        pytest.param(MTPWorker, 0, True, [1, 1, 1], id="vanilla-warm"),
        pytest.param(MTPWorker, 0, False, [0, 0, 0], id="vanilla-cold"),
    ],
)
def test_layers_that_run(kind: type, k: int, keep_warm: bool, passes: list[int]) -> None:
    assert run(kind, k, keep_warm)[1] == passes


@pytest.mark.parametrize("k", [0, 1])
def test_passes_without_drafts_read_token_zero(k: int) -> None:
    step = Step(k, [Prompt([1, 2], choice=9)], [turn(k), turn(k)])
    step.spec.runtime_draft_len = k
    widen(step)
    seen: list[Seen] = []
    layers = [ScriptedLayer(depth, seen) for depth in range(K)]
    MTPWorker(MTPDecodingConfig(max_draft_len=K), device="cpu")(**step.inputs(), mtp_layers=layers)
    assert [one.depth for one in seen] == [0, 1, 2]
    for one in seen:
        last_ids = [one.ids[end - 1] for end in itertools.accumulate(one.seq_lens)]
        assert (last_ids == [0, 0, 0]) == (one.depth > k)


def test_a_rank_without_logits_gives_as_many() -> None:
    step = Step(K, [], [turn(K)])
    step.spec.runtime_draft_len = 1
    worker = MTPEagleWorker(MTPDecodingConfig(max_draft_len=K), device="cpu")
    outputs = worker.skip_forward(**step.inputs())
    assert outputs["new_tokens"].tolist() == [[0, -1]]
    assert outputs["next_draft_tokens"].shape == (1, 1)


def test_the_host_hears_of_acceptance_before_drafts_are_made() -> None:
    """What cannot be cut back moves on between verification and the first pass."""
    step, heard = Step(K, [], [turn(K)]), []
    layer = CountingLayer(0)
    step.attn.after_acceptance = lambda counts: heard.append((counts.tolist(), layer.passes))
    worker = MTPEagleWorker(MTPDecodingConfig(max_draft_len=K), device="cpu")
    worker(**step.inputs(), mtp_layers=[layer])
    assert heard == [([2], 0)]
    assert layer.passes == K


@pytest.mark.parametrize("kind", WORKERS)
def test_tokens_are_passed_on_before_drafts_are_made(kind: type) -> None:
    step, heard = Step(K, [], [turn(K)]), []
    layers = [CountingLayer(depth) for depth in range(K)]

    def record(accepted: Any, logprob_entries: Any) -> None:
        passes = sum(layer.passes for layer in layers)
        heard.append((accepted.tokens.tolist(), accepted.num_accepted.tolist(), passes))
        assert logprob_entries is None

    step.attn.after_verification = record
    if kind is MTPWorker:
        widen(step)
    outputs = kind(MTPDecodingConfig(max_draft_len=K), device="cpu")(
        **step.inputs(), mtp_layers=layers
    )
    assert heard == [(outputs["new_tokens"].tolist(), [2], 0)]
    assert sum(layer.passes for layer in layers) == K


def test_a_config_of_a_host_has_few_fields() -> None:
    worker = MTPEagleWorker(SimpleNamespace(max_draft_len=2), device="cpu")
    assert (worker.max_draft_len, worker.keeps_warm, worker.chain) == (2, True, "output")


# --- rows whose drafts the host cut ---


def cut_step(draft_len: int, lens: list[int | None], **options: Any) -> Step:
    """Generations whose drafts are all right, as far as the host left them."""
    drafts = [20, 21, 22][:draft_len]
    turns = [Turn([1, 2, 3], drafts, [*drafts, 30], draft_len=n) for n in lens]
    step = Step(draft_len, [Prompt([1, 2], choice=9)], turns, **options)
    step.spec.runtime_draft_len = draft_len
    return step


def results(kind: type, step: Step, slot_dtype: torch.dtype = torch.int64) -> dict[str, Any]:
    if kind is MTPWorker:
        widen(step)
    step.spec.slot_ids = step.spec.slot_ids.to(slot_dtype)
    layers = [ScriptedLayer(depth) for depth in range(K)]
    return kind(MTPDecodingConfig(max_draft_len=K), device="cpu")(
        **step.inputs(), mtp_layers=layers
    )


@pytest.mark.parametrize("kind", WORKERS)
def test_cut_drafts_of_a_shorter_step(kind: type) -> None:
    """Two drafts of three, of which the host left none, one and both."""
    outputs = results(kind, cut_step(2, [0, 1, 2]))
    assert outputs["new_tokens_lens"].tolist() == [1, 1, 2, 3]
    assert outputs["new_tokens"].tolist() == [[9, -1, -1], [20, -1, -1], [20, 21, -1], [20, 21, 30]]
    assert outputs["next_draft_tokens"].shape == (4, 2)


@pytest.mark.parametrize("kind", WORKERS)
@pytest.mark.parametrize("lens", [[0, 1, 2], [2, 2, 2]])
def test_a_list_of_draft_lengths_is_as_good_as_a_tensor(kind: type, lens: list[int]) -> None:
    given, same = cut_step(2, lens), cut_step(2, lens)
    given.spec.draft_lens = [*lens, 7]  # longer than the batch, as buffers are
    expected, outputs = results(kind, same), results(kind, given)
    for name, value in expected.items():
        assert torch.equal(outputs[name], value), name


def test_a_list_of_full_lengths_costs_nothing() -> None:
    step = cut_step(2, [2, 2])
    for lens, expected in (([2, 2], None), ([2, 1], [2, 1])):
        step.spec.draft_lens = lens
        read = HostStep.read(step.attn, step.spec, K).draft_lens
        assert (None if read is None else read.tolist()) == expected


def test_lists_of_draft_lengths_that_cannot_be() -> None:
    step = cut_step(2, [2, 1])
    step.spec.draft_lens = [2]
    with pytest.raises(MetadataError, match=r"draft_lens: expected one value .* got \[2\]"):
        HostStep.read(step.attn, step.spec, K)
    step.spec.draft_lens, step.attn.is_cuda_graph = [2, 1], True
    with pytest.raises(MetadataError, match=r"draft_lens: a graph would keep the list \[2, 1\]"):
        HostStep.read(step.attn, step.spec, K)
    step.spec.draft_lens = [2, 2]
    assert HostStep.read(step.attn, step.spec, K).draft_lens is None


@pytest.mark.parametrize("kind", WORKERS)
def test_slots_may_be_of_any_integer_type(kind: type) -> None:
    outputs = [
        results(kind, cut_step(3, [1, 3], slots=[3, 0, 1], num_slots=4), dtype)
        for dtype in (torch.int64, torch.int32)
    ]
    for name, value in outputs[0].items():
        assert torch.equal(outputs[1][name], value), name


@pytest.mark.parametrize("kind", WORKERS)
@pytest.mark.parametrize("modules", [0, 1, 7])
def test_the_number_of_modules_is_no_draft_length(kind: type, modules: int) -> None:
    """Some hosts have 1 there, some K: how many drafts a step makes does not depend on it."""
    given, same = cut_step(2, [1, 2]), cut_step(2, [1, 2])
    given.spec.mtp_num_modules = modules
    expected, outputs = results(kind, same), results(kind, given)
    for name, value in expected.items():
        assert torch.equal(outputs[name], value), name


# --- steps without drafts, by name ---


@pytest.mark.parametrize("kind", WORKERS)
@pytest.mark.parametrize("keep_warm", [True, False])
@pytest.mark.parametrize("runtime_draft_len", [0, None, K])
@pytest.mark.parametrize("positional", [True, False])
def test_skip_drafting_is_a_step_of_no_drafts(
    kind: type, keep_warm: bool, runtime_draft_len: int | None, positional: bool
) -> None:
    """Whatever the host's metadata say of drafts; layers run as in that step."""
    config = MTPDecodingConfig(max_draft_len=K, mtp={"keep_warm": keep_warm})
    steps = [Step(0, [Prompt([1, 2], choice=9)], [turn(0), turn(0)]) for _ in range(2)]
    outputs, passes, pools = [], [], []
    for step, draft_len in zip(steps, (0, runtime_draft_len), strict=True):
        step.spec.runtime_draft_len = draft_len
        if kind is MTPWorker:
            widen(step)
        layers = [CountingLayer(depth) for depth in range(K)]
        model = SimpleNamespace(lm_head=None, embed_tokens=None, mtp_layers=layers)
        worker, inputs = kind(config, device="cpu"), step.inputs()
        if step is steps[0]:
            outputs.append(worker(**inputs, mtp_layers=layers))
        else:
            del inputs["lm_head"], inputs["embed_tokens"]
            order = [
                "input_ids", "position_ids", "hidden_states", "logits",
                "attn_metadata", "spec_metadata",
            ]  # fmt: skip
            if positional:
                result = worker.skip_drafting(*[inputs[name] for name in order], model)
            else:
                result = worker.skip_drafting(**inputs, draft_model=model, resource_manager=None)
            outputs.append(result)
        passes.append([layer.passes for layer in layers])
        manager = step.spec.mtp_hidden_states_manager
        pools.append(None if manager is None else manager.mtp_past_tokens_pool.tolist())
    assert outputs[0].pop("logits") is steps[0].logits
    assert outputs[1].pop("logits") is steps[1].logits
    for name, value in outputs[0].items():
        assert torch.equal(outputs[1][name], value), name
    assert outputs[1]["new_tokens_lens"].tolist() == [1, 1, 1]
    assert outputs[1]["next_new_tokens"].tolist() == [[9], [20], [20]]
    assert outputs[1]["next_draft_tokens"].shape == (3, 0)
    assert passes[0] == passes[1]
    assert pools[0] == pools[1]


# --- what hosts hand to a worker when they start ---


@pytest.mark.parametrize("kind", WORKERS)
def test_grammars_are_not_served(kind: type) -> None:
    """A host engine that reads this refuses requests with a grammar."""
    assert kind(MTPDecodingConfig(max_draft_len=K)).set_guided_decoder(object()) is False
