"""The host's traps one by one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mtp_plugin.errors import ConfigError, ExecutorError
from tests.contract_host.behaviours import GRAPH_DUMMY_ID
from tests.contract_host.conftest import ask, free_strangers, options_of, texts
from tests.contract_host.line_rules import LINES
from tests.contract_host.requests import FinishReason
from tests.contract_host.test_loop import lines, mixed, ways

newest = pytest.mark.parametrize("line", ["1.3b"])
N = 3
LATE = {"batch": N, "num_seq_slots": 2 * N, "late_frees": True}
"""A finished request frees its rows a step after the next one was admitted."""


@lines
@ways
def test_r09_slots_of_a_batch_in_flight_and_of_one_that_is_let_in(vanilla, make, check):
    """R09: every wave ends with its first token and gives its slots back a step after the next wave
    came; dummies of idle ranks and of padding are in the same batch."""
    host = make(vanilla=vanilla, padded_sizes=(1, 2, N), attention_dp=True, warms_up=True, **LATE)
    for _ in range(3):
        host.executor.step()  # an idle rank's dummy
    check(host, [1] * N + [1] * N + [6, 1])
    assert host.executor.most_slots == 2 * N
    free_strangers(host)


@lines
def test_r09_rows_of_logit_edits_of_who_has_ended(line, make, prompts, decoded):
    """R09: pools have rows for one batch, and a finished request frees its own a step late."""
    host, penalty = make(**LATE), {"repetition_penalty": 1.3}
    prompts, lengths = [*prompts, *prompts], [1, 6, 1, 6] * 2
    requests = ask(prompts, lengths)
    for request in requests:
        request.sampling_config = options_of(line, **penalty)
    assert host.generate(requests) == texts(decoded, prompts, lengths, **penalty)
    host.assert_drained()


@mixed
def test_r19_a_hit_is_as_long_as_without_drafts(line, overlap, make, prompts, decoded):
    """R19: blocks of 32, prompts that end around a block's end: every whole block in front of the
    last token is found again, whatever was drafted after it."""
    vanilla = line == "1.3b"
    host = make(vanilla=vanilla, overlap=overlap, block_size=32, reuses_blocks=True)
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


@newest
def test_steps_of_many_draft_lengths(make, check):
    """By the size of the batch, none at all among them; a padding dummy for each."""
    by_size = {1: 3, 2: 1, 3: 0, 4: 2}
    host = make(padded_sizes=(2, 4), choose_draft_len=by_size.__getitem__)
    check(host)
    assert set(host.engine.dummies) <= {GRAPH_DUMMY_ID - k for k in by_size.values()}
    assert len(host.engine.dummies) > 1


@pytest.mark.parametrize("line", ["1.2"])
def test_results_that_are_read_late_and_no_rows_for_the_draft_loop(make, check):
    """The last results are read after the next sampling. What the draft loop writes past a
    request's blocks is lost: drafts may be worse, the text is not."""
    host = make(updates_before_sampling=False, block_size=2, extra_kv_tokens=0)
    check(host)
    assert host.engine.attn_metadata.spilled_rows > 0


@newest
def test_chunks_cost_no_acceptance_where_the_host_looks_ahead(make, check, prompts, embedded_steps):
    host = make(chunk_tokens=13)
    check(host, [10] * 4)
    assert host.executor.histogram == embedded_steps(prompts[:4], [10] * 4, vanilla=False)


@mixed
def test_a_request_that_is_not_served(line, overlap, make, prompts, decoded):
    """Newer lines ask at admission; elsewhere it ends with its prompt, and alone."""
    host = make(overlap=overlap)
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
def test_a_user_gives_up(line, overlap, make, prompts, decoded):
    """With results in flight: no token follows, other requests continue, slots are freed."""
    host = make(vanilla=line == "1.3b", overlap=overlap, batch=2)
    requests = ask(prompts, [12, 12, 12])
    for request in requests:
        host.executor.add(request)
    for _ in range(3):
        host.executor.step()
    requests[1].finish_by(FinishReason.CANCELLED, 0)
    kept = list(requests[1].output)
    host.executor.run()
    plain = texts(decoded, prompts, [12, 12, 12])
    assert [requests[0].output, requests[2].output] == [plain[0], plain[2]]
    assert requests[1].output == kept == plain[1][: len(kept)]
    host.assert_drained()


@mixed
def test_a_step_that_fails(line, overlap, make, check, prompts):
    """In the middle of the draft loop: nothing is left of it, and the next requests are well."""
    host = make(vanilla=line == "1.3b", overlap=overlap)
    layers = host.engine.draft_model.mtp_layers
    layer, calls = layers[-1].layer, iter(range(1, 1000))

    def fail_at_fifth_call(**inputs: Any) -> Any:
        if next(calls) == 5:
            raise RuntimeError("in the middle of the draft loop")
        return layer(**inputs)

    layers[-1].layer = fail_at_fifth_call
    for request in ask(prompts, [12, 12]):
        host.executor.add(request)
    with pytest.raises(RuntimeError, match="in the middle of the draft loop"):
        host.executor.run()
    host.executor.fail_all()
    host.assert_drained()
    check(host, [6, 6])


@newest
def test_ranks_without_the_last_stage(make, prompts):
    """Their outputs have the shapes of the last one's; every row is one valid token long."""
    host = make(overlap=False)
    components = host.engine.components
    worker, seen = components.worker, list[Any]()

    def skip(**inputs: Any) -> Any:
        seen.append(worker.skip_forward(**inputs))
        return worker(**inputs)

    components.worker = skip
    host.generate(ask(prompts, [4, 4]))
    for outputs in seen:
        rows = len(outputs["new_tokens_lens"])
        assert outputs["new_tokens_lens"].tolist() == [1] * rows
        assert outputs["new_tokens"].shape == outputs["next_new_tokens"].shape == (rows, 4)
        assert outputs["next_draft_tokens"].shape == (rows, 3)
        assert int(outputs["new_tokens"][:, 0].min()) >= 0
        assert int(outputs["next_new_tokens"].min()) >= 0


@lines
def test_states_that_the_host_built_itself(make, check, monkeypatch):
    """As a rank does that received them: the host's fields say it all."""
    host = make(overlap=False)
    update = host.executor.sampler.update_requests

    def update_requests(state: Any, managers: Any) -> None:
        del state.mtp_plugin
        update(state, managers)

    monkeypatch.setattr(host.executor.sampler, "update_requests", update_requests)
    check(host, [9, 7])
    with pytest.raises(ExecutorError, match="expected a state of sample_async, got 'state'"):
        update("state")
    sampler = host.executor.sampler
    fields = {sampler.mtp_plugin_requests: (), "sampler_event": None}
    with pytest.raises(ExecutorError, match="holds no host tensors"):
        update(sampler.SampleState(**fields))


@newest
@pytest.mark.parametrize(("vanilla", "yields"), [(False, True), (True, False)])
def test_the_draft_loop_runs_with_its_own_kv_cache(vanilla, yields, make, check, monkeypatch):
    """The loop alone, and with the metadata that the host's context gives, if it gives any.

    Newer hosts find a view of the target's cache without ``use_separate_draft_kv_cache``.
    """
    host = make(vanilla=vanilla, overlap=False)
    worker = host.engine.components.worker
    own, entered, drafted = worker.mtp_plugin_worker, [], []
    draft = own._draft

    @contextmanager
    def context(_: Any, attn_metadata: Any, draft_kv_cache_manager: Any) -> Iterator[Any]:
        entered.append(draft_kv_cache_manager)
        yield copy.copy(attn_metadata) if yields else None
        entered.append("left")

    def noting(step: Any, *arguments: Any) -> None:
        drafted.append((step.attn_metadata is host.engine.attn_metadata, entered[-1]))
        draft(step, *arguments)

    monkeypatch.setattr(type(worker), "get_draft_kv_cache_manager", lambda *_: "the drafts'")
    monkeypatch.setattr(type(worker), "draft_kv_cache_context", context)
    monkeypatch.setattr(own, "_draft", noting)
    check(host, [6, 6])
    assert set(drafted) == {(not yields, "the drafts'")}
    assert entered == ["the drafts'", "left"] * len(drafted)


@newest
def test_a_host_that_cannot_switch_caches_drafts_in_the_targets(make, check, monkeypatch):
    host = make(overlap=False)
    worker = type(host.engine.components.worker)
    monkeypatch.setattr(worker, "get_draft_kv_cache_manager", lambda *_: "the drafts'")
    for base in worker.__mro__:
        if "draft_kv_cache_context" in vars(base):
            monkeypatch.delattr(base, "draft_kv_cache_context")
    check(host, [6, 6])
