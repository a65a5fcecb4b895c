"""The host's traps one by one, and that the host notices who falls into one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.errors import ConfigError
from tests.contract_host.behaviours import GRAPH_DUMMY_ID, FinishReason
from tests.contract_host.host import make_host
from tests.contract_host.line_rules import LINES
from tests.contract_host.test_loop import (
    ask,
    free_strangers,
    lines,
    loops,
    mixed,
    options_of,
    texts,
    ways,
)

N = 3


@lines
@ways
def test_r09_slots_of_a_batch_in_flight_and_of_one_that_is_let_in(
    line, vanilla, tiny_model, prompts, decoded
):
    """R09: every wave ends with its first token and gives its slots back a step after the next wave
    came; dummies of idle ranks and of padding are in the same batch."""
    host = make_host(
        line,
        tiny_model,
        vanilla=vanilla,
        overlap=True,
        batch=N,
        num_seq_slots=2 * N,
        padded_sizes=(1, 2, N),
        late_frees=True,
        attention_dp=True,
    )
    for _ in range(3):
        host.executor.step()  # an idle rank's dummy
    lengths = [1] * N + [1] * N + [6, 1]
    assert host.generate(ask(prompts, lengths)) == texts(decoded, prompts, lengths)
    assert host.executor.most_slots == 2 * N
    free_strangers(host)
    host.assert_drained()


@lines
def test_r09_rows_of_logit_edits_of_who_has_ended(line, tiny_model, prompts, decoded):
    """R09: pools have rows for one batch, and who has ended frees its own a step late."""
    host = make_host(
        line,
        tiny_model,
        vanilla=False,
        overlap=True,
        batch=N,
        num_seq_slots=2 * N,
        late_frees=True,
    )
    penalty = {"repetition_penalty": 1.3}
    lengths = [1, 6, 1, 6] * 2
    requests = ask([*prompts, *prompts], lengths)
    for request in requests:
        request.sampling_config = options_of(line, **penalty)
    want = [
        decoded(prompt, max_new_tokens=length, **penalty).token_ids
        for prompt, length in zip([*prompts, *prompts], lengths, strict=False)
    ]
    assert host.generate(requests) == want
    host.assert_drained()


@mixed
def test_r19_a_hit_is_as_long_as_without_drafts(line, overlap, tiny_model, prompts, decoded):
    """R19: blocks of 32, prompts that end around a block's end: every whole block in front of the
    last token is found again, whatever was drafted after it."""
    vanilla = line == "1.3b"
    host = make_host(
        line,
        tiny_model,
        vanilla=vanilla,
        overlap=overlap,
        block_size=32,
        num_blocks=30,
        reuses_blocks=True,
    )
    text = prompts[0] + prompts[1] + prompts[2]
    numbers = iter(range(1, 100))
    for length in (64, 65, 68):
        prompt = text[:length]
        histograms = []
        for turn in range(2):
            request = ask([prompt], [5])[0]
            request.request_id = request.py_request_id = next(numbers)
            host.executor.histogram.clear()
            assert host.generate([request]) == texts(decoded, [prompt], [5])
            histograms.append(+host.executor.histogram)
            if turn:
                assert host.kv_cache.hits[request.request_id] == (length - 1) // 32 * 32
        if not vanilla:
            # the draft layer's rows are found with the target's
            assert histograms[0] == histograms[1]
    assert not host.manager.slot_manager.slot_mapping


@pytest.mark.parametrize("line", ["1.3b"])
@loops
def test_steps_of_many_draft_lengths(line, overlap, tiny_model, prompts, decoded):
    """By the size of the batch, none at all among them; a padding dummy for each."""
    by_size = {1: 3, 2: 1, 3: 0, 4: 2}
    host = make_host(
        line,
        tiny_model,
        vanilla=False,
        overlap=overlap,
        padded_sizes=(2, 4),
        choose_draft_len=by_size.__getitem__,
    )
    assert host.generate(ask(prompts)) == texts(decoded, prompts)
    assert set(host.engine._dummies) <= {GRAPH_DUMMY_ID - k for k in by_size.values()}
    assert len(host.engine._dummies) > 1
    host.assert_drained()


@lines
def test_results_that_are_read_after_the_next_sampling(line, tiny_model, prompts, decoded):
    host = make_host(line, tiny_model, vanilla=False, overlap=True, updates_before_sampling=False)
    assert host.generate(ask(prompts)) == texts(decoded, prompts)
    host.assert_drained()


@pytest.mark.parametrize("line", ["1.2"])
@loops
def test_a_host_without_rows_for_the_draft_loop(line, overlap, tiny_model, prompts, decoded):
    """What the loop writes there is lost: drafts may be worse, the text is not."""
    host = make_host(
        line, tiny_model, vanilla=False, overlap=overlap, block_size=2, extra_kv_tokens=0
    )
    assert host.generate(ask(prompts)) == texts(decoded, prompts)
    assert host.engine.attn_metadata.spilled_rows > 0
    host.assert_drained()


@pytest.mark.parametrize("line", ["1.3b"])
@loops
def test_chunks_cost_no_acceptance_where_the_host_looks_ahead(
    line, overlap, tiny_model, prompts, decoded, embedded_steps
):
    host = make_host(line, tiny_model, vanilla=False, overlap=overlap, chunk_tokens=13)
    lengths = [10] * 4
    assert host.generate(ask(prompts, lengths)) == texts(decoded, prompts, lengths)
    assert host.executor.histogram == embedded_steps(prompts[:4], lengths, vanilla=False)


@mixed
def test_contexts_that_become_generations_of_flash_mla(
    line, overlap, tiny_model, prompts, decoded, embedded_steps
):
    """After the first pass every request is a generation, and the table that generations read by
    must say so, and must be as before when the worker is done."""
    host = make_host(line, tiny_model, vanilla=False, overlap=overlap, flash_mla=True, batch=2)
    lengths = [12, 9, 11, 5]
    assert host.generate(ask(prompts, lengths)) == texts(decoded, prompts, lengths)
    assert host.executor.histogram == embedded_steps(prompts[:4], lengths, vanilla=False)


@mixed
def test_a_request_that_is_not_served(line, overlap, tiny_model, prompts, decoded):
    """Newer lines ask at admission; elsewhere it ends with its prompt, and alone."""
    host = make_host(line, tiny_model, vanilla=False, overlap=overlap)
    requests = ask(prompts, [6, 6])
    requests[0].py_return_context_logits = True
    if LINES[line].is_newer:
        with pytest.raises(ConfigError, match=r"request 1: .*py_return_context_logits"):
            host.executor.add(requests[0])
        requests = requests[1:]
    assert host.generate(requests)[-1] == texts(decoded, prompts, [6, 6])[1]
    if not LINES[line].is_newer:
        assert requests[0].output == []
        assert requests[0].finish_reason is FinishReason.CANCELLED
    host.assert_drained()


@mixed
def test_a_user_gives_up(line, overlap, tiny_model, prompts, decoded):
    """With results in flight: no token follows, other requests continue, slots are freed."""
    host = make_host(line, tiny_model, vanilla=line == "1.3b", overlap=overlap, batch=2)
    requests = ask(prompts, [12, 12, 12])
    for request in requests:
        host.executor.add(request)
    for _ in range(3):
        host.executor.step()
    host.executor.cancel(requests[1])
    kept = list(requests[1].output)
    host.executor.run()
    plain = texts(decoded, prompts, [12, 12, 12])
    assert [requests[0].output, requests[2].output] == [plain[0], plain[2]]
    assert requests[1].output == kept == plain[1][: len(kept)]
    host.assert_drained()


@mixed
def test_a_step_that_fails(line, overlap, tiny_model, prompts, decoded):
    """In the middle of the draft loop: nothing is left of it, and the next requests are well."""
    host = make_host(line, tiny_model, vanilla=line == "1.3b", overlap=overlap)
    layer = host.engine.draft_model.mtp_layers[-1]
    host.engine.draft_model.mtp_layers[-1] = FailingLayer(layer, at_call=5)
    for request in ask(prompts, [12, 12]):
        host.executor.add(request)
    with pytest.raises(RuntimeError, match="in the middle of the draft loop"):
        host.executor.run()
    host.executor.fail_all()
    host.assert_drained()
    assert host.generate(ask(prompts, [6, 6])) == texts(decoded, prompts, [6, 6])


class FailingLayer:
    """Raises at its n-th call."""

    def __init__(self, layer: Any, at_call: int) -> None:
        self.layer = layer
        self.left = at_call
        self.shared_head = layer.shared_head

    def __call__(self, **inputs: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("in the middle of the draft loop")
        return self.layer(**inputs)


@lines
def test_ranks_without_the_last_stage(line, tiny_model, prompts):
    """Their outputs have the shapes of the last one's; every row is one valid token long."""
    host = make_host(line, tiny_model, vanilla=False, overlap=False)
    worker, engine = host.engine.pieces.worker, host.engine
    seen: list[Any] = []

    def skip(**inputs: Any) -> Any:
        seen.append(worker.skip_forward(**inputs))
        return worker(**inputs)

    object.__setattr__(engine, "pieces", replace(engine.pieces, worker=skip))
    host.generate(ask(prompts, [4, 4]))
    for outputs in seen:
        rows = len(outputs["new_tokens_lens"])
        assert outputs["new_tokens_lens"].tolist() == [1] * rows
        assert outputs["new_tokens"].shape == outputs["next_new_tokens"].shape == (rows, 4)
        assert outputs["next_draft_tokens"].shape == (rows, 3)
        assert int(outputs["new_tokens"][:, 0].min()) >= 0
        assert int(outputs["next_new_tokens"].min()) >= 0


@lines
def test_states_that_the_host_built_itself(line, tiny_model, prompts, decoded):
    """As a rank does that was sent them: the host's fields say it all."""
    host = make_host(line, tiny_model, vanilla=False, overlap=False)
    sampler = host.executor.sampler
    update = sampler.update_requests

    def update_requests(state: Any, managers: Any) -> None:
        del state.mtp_plugin
        update(state, managers)

    sampler.update_requests = update_requests
    assert host.generate(ask(prompts, [9, 7])) == texts(decoded, prompts, [9, 7])
    host.assert_drained()


# ---- the host notices ----


def prepares_again(host: Any) -> None:
    step = host.engine.pieces.worker.mtp_plugin_worker.forward

    def forward(**inputs: Any) -> Any:
        inputs["spec_metadata"].prepare()
        return step(**inputs)

    host.engine.pieces.worker.mtp_plugin_worker.forward = forward


def leaves_lengths(host: Any) -> None:
    step = host.engine.pieces.worker.mtp_plugin_worker.forward

    def forward(**inputs: Any) -> Any:
        outputs = step(**inputs)
        inputs["attn_metadata"].kv_lens_cuda[0] += 1
        return outputs

    host.engine.pieces.worker.mtp_plugin_worker.forward = forward


def changes_logits(host: Any) -> None:
    step = host.engine.pieces.worker.mtp_plugin_worker.forward

    def forward(**inputs: Any) -> Any:
        outputs = step(**inputs)
        outputs["logits"][0] += 1
        return outputs

    host.engine.pieces.worker.mtp_plugin_worker.forward = forward


def changes_states(host: Any, change: Any) -> None:
    sampler = host.executor.sampler
    sample = sampler.sample_async

    def sample_async(*arguments: Any) -> Any:
        state = sample(*arguments)
        change(state)
        return state

    sampler.sample_async = sample_async


def imitates_tensors(host: Any) -> None:
    def change(state: Any) -> None:
        state.device = SimpleNamespace(**vars(state.device))

    changes_states(host, change)


def leaves_unused_ids(host: Any) -> None:
    def change(state: Any) -> None:
        state.device.new_tokens = torch.full_like(state.device.new_tokens, -1)

    changes_states(host, change)


def forgets_to_rewind(host: Any) -> None:
    sampler = host.executor.sampler
    update = sampler.update_requests

    def update_requests(state: Any, managers: Any) -> None:
        update(state, managers)
        requests = state.mtp_plugin.requests
        for request in requests:
            request.py_rewind_len = 0

    sampler.update_requests = update_requests


def keeps_slots(host: Any) -> None:
    host.manager.free_resources = lambda _: None


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (prepares_again, "a second time"),
        (leaves_lengths, "a trace in the metadata"),
        (changes_logits, "logits were changed"),
        (imitates_tensors, "SimpleNamespace"),
        (leaves_unused_ids, "a negative id"),
        (forgets_to_rewind, "the cache holds"),
        (keeps_slots, "keeps slots of"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("line", ["1.3b"])
def test_the_host_notices(plant, expected, line, tiny_model, prompts):
    host = make_host(line, tiny_model, vanilla=False, overlap=True, warms_up=False)
    plant(host)

    def run() -> None:
        host.generate(ask(prompts, [8, 8]))
        host.assert_drained()

    with pytest.raises(AssertionError, match=expected):
        run()


@pytest.mark.parametrize("line", ["1.3b"])
def test_the_host_notices_rows_that_ranks_were_not_given(line, tiny_model, prompts):
    """The host's own metadata counts K rows of a generation; ours feeds K+1 to its first layer."""
    host = make_host(
        line, tiny_model, vanilla=True, overlap=False, attention_dp=True, warms_up=False
    )
    own = host.engine.spec_metadata.mtp_plugin
    own.draft_window = "trtllm"
    with pytest.raises(AssertionError, match=r"ranks were given \[\d+\] rows"):
        host.generate(ask(prompts, [8]))
