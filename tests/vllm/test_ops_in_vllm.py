"""Our sampler and verifier with vLLM's own request states, without an engine.

Batches are stubs with the attributes of vLLM's ``InputBatch``; kernels run in Triton's interpreter.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

if find_spec("vllm") is None:
    pytest.skip("needs vLLM", allow_module_level=True)

os.environ.setdefault("TRITON_INTERPRET", "1")
SHIM = Path(__file__).parent / "shim"
if SHIM.exists() and str(SHIM) not in sys.path:
    sys.path.insert(0, str(SHIM))
    runpy.run_path(str(SHIM / "sitecustomize.py"))

import vllm.v1.worker.cpu.shm  # noqa: E402, F401 - replaces pinned memory
import vllm.v1.worker.gpu.sample.sampler as vllm_sampler  # noqa: E402
import vllm.v1.worker.gpu.sample.states as vllm_states  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch  # noqa: E402
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers  # noqa: E402
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext  # noqa: E402
from vllm.v1.worker.gpu.sample.min_p import apply_min_p  # noqa: E402
from vllm.v1.worker.gpu.states import RequestState  # noqa: E402

from mtp_plugin.hosts.vllm import sampler as our_sampler  # noqa: E402
from mtp_plugin.hosts.vllm.engine import Engine  # noqa: E402
from mtp_plugin.hosts.vllm.options import VllmOptions  # noqa: E402
from mtp_plugin.hosts.vllm.requests import MAX_BIASED_TOKENS, PREFILL  # noqa: E402
from mtp_plugin.hosts.vllm.sampler import PluginSampler, PluginVerifier  # noqa: E402
from mtp_plugin.hosts.vllm.versions import differences, where_tested  # noqa: E402
from mtp_plugin.ops.backend import Backend  # noqa: E402
from mtp_plugin.requests.columns import TopPMass  # noqa: E402
from mtp_plugin.speculative.rows.options import EngineSettings  # noqa: E402
from mtp_plugin.speculative.rows.request_slots import RequestSlots  # noqa: E402
from mtp_plugin.speculative.rows.row_ops import DraftRows, RowOps  # noqa: E402
from tests.ops.sampling.host_truncation import check_same_tokens  # noqa: E402

CPU = torch.device("cpu")
VOCAB = 64
MAX_REQUESTS = 8
NUM_DRAFTS = 3
PROMPT = [1, 2, 3, 4]
SPEC = SimpleNamespace(
    num_speculative_tokens=NUM_DRAFTS,
    enable_adaptive_verification=False,
    fly_entropy_threshold=None,
    fly_entropy_top_k=None,
    rejection_sample_method="standard",
)
BACKENDS = pytest.mark.parametrize("backend", Backend)


@pytest.fixture(autouse=True)
def truncation_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's kernel of top-k and top-p, for processed log-probabilities, needs a GPU."""
    monkeypatch.setattr(
        vllm_states,
        "apply_top_k_top_p",
        lambda logits, k, p, **_hints: apply_top_k_top_p_pytorch(logits, k, p),
    )


def make_vllm_sampler(states: RequestState, mode: str) -> vllm_sampler.Sampler:
    config = SimpleNamespace(reasoning_config=None)
    return vllm_sampler.Sampler(config, MAX_REQUESTS, VOCAB, CPU, states, mode)


def rows_of(batch: SimpleNamespace) -> LogitsContext:
    """The rows of a batch, whose fields are arguments of ``apply_sampling_params`` too."""
    return LogitsContext(
        expanded_idx_mapping=batch.expanded_idx_mapping,
        idx_mapping=batch.idx_mapping,
        idx_mapping_np=batch.idx_mapping_np,
        expanded_local_pos=batch.expanded_local_pos,
        input_ids=batch.input_ids,
        pos=batch.positions,
        seq_lens_upper_bound_np=batch.seq_lens_cpu_upper_bound.numpy(),
    )


def make_request_states() -> RequestState:
    return RequestState(MAX_REQUESTS, 128, 256, NUM_DRAFTS, VOCAB, CPU)


@dataclass
class Harness:
    """A sampler and a verifier of ours over vLLM's states."""

    mode: str = "raw_logprobs"
    backend: Backend = Backend.TORCH
    settings: EngineSettings = EngineSettings(VllmOptions(), NUM_DRAFTS)  # noqa: RUF009
    indices: list[int] = field(default_factory=list)  # of the requests, in the order of adding

    def __post_init__(self) -> None:
        self.states = make_request_states()
        self.ops = RowOps(
            RequestSlots(MAX_REQUESTS, CPU, self.settings), self.settings, self.backend, VOCAB
        )
        given = make_vllm_sampler(self.states, self.mode)
        self.sampler = PluginSampler(given, self.ops)
        self.verifier = PluginVerifier(self.sampler, SPEC, CPU)

    def add(self, *params: SamplingParams, outputs: Sequence[int] = ()) -> Harness:
        """Add requests with `PROMPT`, and with ``outputs`` as after a preemption."""
        for each in params:
            name = str(len(self.indices))
            tokens = [*PROMPT, *outputs]
            self.states.add_request(name, len(PROMPT), tokens, len(tokens), 64)
            self.indices.append(self.states.req_id_to_index[name])
            # as the wrapper of ``RequestState.add_request`` does
            vars(self.states).setdefault(PREFILL, {})[self.indices[-1]] = tokens
            self.sampler.add_request(self.indices[-1], each)
        self.states.apply_staged_writes()
        self.sampler.apply_staged_writes()
        return self

    def batch(
        self, drafts: Sequence[Sequence[int]], requests: Sequence[int] | None = None
    ) -> SimpleNamespace:
        """A step of generations; ``drafts`` per request in it."""
        which = range(len(drafts)) if requests is None else requests
        indices = [self.indices[request] for request in which]
        sizes = [len(each) + 1 for each in drafts]
        starts = np.cumsum([0, *sizes]).astype(np.int32)
        first = [int(self.states.prefill_len.np[index]) for index in indices]
        return SimpleNamespace(
            num_reqs=len(indices),
            idx_mapping=torch.tensor(indices),
            idx_mapping_np=np.array(indices),
            expanded_idx_mapping=torch.tensor(indices).repeat_interleave(torch.tensor(sizes)),
            expanded_local_pos=torch.tensor(
                [i for size in sizes for i in range(size)], dtype=torch.int32
            ),
            input_ids=torch.tensor([t for each in drafts for t in (9, *each)], dtype=torch.int32),
            positions=torch.tensor(
                [p + i for p, size in zip(first, sizes, strict=True) for i in range(size)]
            ),
            logits_indices=torch.arange(int(starts[-1])),
            cu_num_logits=torch.from_numpy(starts),
            cu_num_logits_np=starts,
            seq_lens=torch.tensor(
                [p + size for p, size in zip(first, sizes, strict=True)], dtype=torch.int32
            ),
            seq_lens_cpu_upper_bound=torch.tensor(
                [p + size for p, size in zip(first, sizes, strict=True)], dtype=torch.int32
            ),
        )


def make_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)).mul(2)


def tokens_of(output: object) -> list[list[int]]:
    return [
        row[:count]
        for row, count in zip(
            output.sampled_token_ids.tolist(), output.num_sampled.tolist(), strict=True
        )
    ]


def seeded(seed: int, **options: object) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, **options)


def test_the_installed_version_is_tested() -> None:
    assert where_tested() is not None
    assert not differences()


@BACKENDS
def test_verifier_gives_the_tokens_of_the_sampler(backend: Backend) -> None:
    """The rows of K drafts, one by one without drafts, at the same positions."""
    harness = Harness(backend=backend).add(seeded(1), seeded(2, top_p=0.9), SamplingParams())
    sizes = [4, 4, 2]
    logits = make_logits(sum(sizes))
    targets = harness.ops.sample(
        logits,
        (batch := harness.batch([[0] * (size - 1) for size in sizes])).expanded_idx_mapping,
        batch.positions,
    ).tolist()
    drafts = [targets[0:3], [targets[4], VOCAB - 1, targets[6]], [-1]]
    assert targets[5] != VOCAB - 1
    output = harness.verifier(logits, harness.batch(drafts))
    assert tokens_of(output) == [targets[0:4], targets[4:6], targets[8:9]]
    assert output.num_rejected.tolist() == [0, 2, 1]
    assert output.sampled_token_ids.dtype == torch.int64
    assert output.sampled_token_ids.min() >= 0
    first_rows = logits[[0, 4, 8]]
    single = harness.sampler(first_rows, harness.batch([[], [], []]))
    assert tokens_of(single) == [[targets[0]], [targets[4]], [targets[8]]]


@BACKENDS
@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs"])
def test_logits_are_not_edited_in_place(backend: Backend, mode: str) -> None:
    params = [
        seeded(1, repetition_penalty=1.5, logprobs=2),
        seeded(2, top_k=5, logprobs=1),
        seeded(3, allowed_token_ids=[5, 6, 7]),
    ]
    harness = Harness(mode, backend).add(*params)
    logits = make_logits(9)
    before = logits.clone()
    harness.verifier(logits, harness.batch([[1, 2], [3, 4], [5, 6]]))
    assert torch.equal(logits, before)
    harness.sampler(logits[:3], harness.batch([[], [], []]))
    assert torch.equal(logits, before)


def test_raw_logprobs_are_those_of_the_given_logits() -> None:
    harness = Harness().add(seeded(1, repetition_penalty=1.5, logprobs=3), seeded(2))
    logits = make_logits(4)
    output = harness.verifier(logits, harness.batch([[1], [2]]))
    expected = logits.log_softmax(1)
    found = output.logprobs_tensors
    first = found.logprob_token_ids[0].tolist()
    assert first[0] == tokens_of(output)[0][0]
    torch.testing.assert_close(found.logprobs[0], expected[0, first])
    assert first[1:] == logits[0].topk(3).indices.tolist()


@pytest.mark.parametrize("drafts", [[[], []], [[1], [2]], [[1, 2, 3], [4]]])
def test_processed_logprobs_are_those_of_vllm(drafts: list[list[int]]) -> None:
    params = [
        seeded(1, repetition_penalty=1.5, top_k=20, logprobs=2),
        SamplingParams(temperature=0.5, top_p=0.9, seed=2, logprobs=2),
    ]
    harness = Harness("processed_logprobs").add(*params)
    batch = harness.batch(drafts)
    logits = make_logits(int(batch.cu_num_logits_np[-1]))
    call = harness.verifier if any(drafts) else harness.sampler
    found = call(logits, batch).logprobs_tensors
    theirs = make_vllm_sampler(harness.states, "processed_logprobs")
    for index, each in zip(harness.indices, params, strict=True):
        theirs.add_request(index, each)
    theirs.apply_staged_writes()
    processed = theirs.apply_sampling_params(logits.clone(), **vars(rows_of(batch)))
    expected = processed.log_softmax(1).gather(1, found.logprob_token_ids.long())
    torch.testing.assert_close(found.logprobs, expected)


def test_kept_tokens_are_those_of_vllm() -> None:
    def kept(
        scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
    ) -> torch.Tensor:
        logits = scores.clone()
        apply_min_p(logits, torch.arange(len(logits)), min_p)
        return apply_top_k_top_p_pytorch(logits, top_k, top_p) > -torch.inf

    check_same_tokens(kept, TopPMass.MIN_P)


@BACKENDS
def test_penalties_change_their_own_rows_alone(backend: Backend) -> None:
    plain, penalized = seeded(1), seeded(2, repetition_penalty=100.0)
    logits = make_logits(8).abs()  # a penalty of 100 rules a token out
    logits[:, PROMPT] += 6  # else most likely
    drafts = [[0, 0, 0], [0, 0, 0]]
    alone = Harness(backend=backend).add(plain)
    together = Harness(backend=backend).add(plain, penalized)
    expected = alone.verifier(logits[:4], alone.batch(drafts[:1]))
    output = together.verifier(logits, together.batch(drafts))
    assert tokens_of(output)[0] == tokens_of(expected)[0]
    without = Harness(backend=backend).add(plain, seeded(2))
    assert tokens_of(without.verifier(logits, without.batch(drafts)))[1][0] in PROMPT
    assert tokens_of(output)[1][0] not in PROMPT


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_requests_with_penalties_do_not_change_others(backend: Backend, dtype: torch.dtype) -> None:
    """Their batch is processed in float32, another one is sampled from the given logits."""
    plain = [seeded(1), seeded(2, top_p=0.7), seeded(3, top_k=6), SamplingParams(temperature=0.0)]
    alone = Harness(backend=backend).add(*plain)
    together = Harness(backend=backend).add(*plain, seeded(5, frequency_penalty=1.0))
    logits = make_logits(20, seed=4).to(dtype)
    drafts = [[0, 0, 0]] * 5
    batch = together.batch(drafts)
    expected = alone.ops.sample(logits, batch.expanded_idx_mapping, batch.positions).tolist()
    drafts = [expected[4 * i : 4 * i + 3] for i in range(5)]
    output = together.verifier(logits, together.batch(drafts))
    assert tokens_of(output)[:4] == [expected[4 * i : 4 * i + 4] for i in range(4)]


def test_penalties_see_the_drafts_before_a_row() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    harness = Harness().add(params)
    logits = torch.zeros(3, VOCAB)
    logits[:, 10], logits[:, 11], logits[:, 12] = 3.0, 2.5, 2.0
    output = harness.verifier(logits, harness.batch([[10, 11]]))
    assert tokens_of(output) == [[10, 11, 12]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"allowed_token_ids": [30, 31]}, 30),
        ({"min_tokens": 8, "stop_token_ids": [10]}, 11),
        ({"repetition_penalty": 50.0}, 11),
        ({"logit_bias": {30: 5.0}}, 30),
        ({"logit_bias": {10: -5.0}}, 11),
        ({}, 10),
    ],
)
def test_logits_processors_of_vllm_are_applied(options: dict[str, object], expected: int) -> None:
    harness = Harness().add(SamplingParams(temperature=0.0, **options), outputs=[10])
    logits = torch.zeros(2, VOCAB)
    logits[:, 10], logits[:, 11], logits[:, 30] = 3.0, 2.0, 1.0
    assert tokens_of(harness.verifier(logits, harness.batch([[5]]))) == [[expected]]
    assert tokens_of(harness.sampler(logits[:1], harness.batch([[]]))) == [[expected]]


@pytest.mark.parametrize("method", ["coupled", "rejection", "block"])
@BACKENDS
def test_a_bias_and_min_p_are_applied_to_every_row_of_their_request(
    backend: Backend, method: str
) -> None:
    """Rows are ragged; drafts are those that the processed logits give."""
    bias = dict.fromkeys(range(20, 30), 40.0)
    biased = {"logit_bias": bias, "min_p": 0.3, "extra_args": {"mtp_verification": method}}
    params = [seeded(1), seeded(2, **biased), seeded(3, min_p=0.3)]
    settings = EngineSettings(VllmOptions(), NUM_DRAFTS, True)
    harness = Harness(backend=backend, settings=settings).add(*params)
    logits = make_logits(9, seed=7)
    expected = logits.clone()
    expected[2:6, 20:30] += 40.0
    batch = harness.batch([[5], [21, 22, 23], [6, 7]])
    processed = harness.sampler.processed(logits, rows_of(batch))
    assert torch.equal(processed, expected)  # neither temperature nor min_p
    alone = [Harness(backend=backend, settings=settings).add(each) for each in params]
    outputs = tokens_of(harness.verifier(logits, batch))
    assert set(outputs[1]) <= {*range(20, 30)}
    for request, (first, last) in ((0, (0, 2)), (2, (6, 9))):
        drafts = batch.input_ids[first + 1 : last].tolist()
        single = alone[request].batch([drafts])
        assert tokens_of(alone[request].verifier(logits[first:last], single))[0] == outputs[request]


def test_a_worker_holds_as_many_biased_tokens_as_are_admitted() -> None:
    params = seeded(1, logit_bias=dict.fromkeys(range(MAX_BIASED_TOKENS), 1.0))
    Harness().add(params)
    params.logit_bias[MAX_BIASED_TOKENS] = 1.0
    with pytest.raises(ValueError, match="Too many logit bias tokens"):
        Harness().add(params)


def test_temperature_that_vllm_applies_elsewhere_is_not_applied_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's method, which ends with temperature and min_p, is not called."""
    monkeypatch.setattr(vllm_sampler.Sampler, "apply_sampling_params", None)
    params = SamplingParams(temperature=0.5, seed=1, bad_words=["a"])
    params._bad_words_token_ids = [[3]]
    harness = Harness().add(params)
    logits = make_logits(1)
    processed = harness.sampler.processed(logits, rows_of(harness.batch([[]])))
    assert torch.equal(processed[0, 4:], logits[0, 4:])
    assert processed[0, 3] == -torch.inf


def test_wrong_options_that_reach_the_worker_are_left_out() -> None:
    """An error would end the engine."""
    wrong = Harness().add(seeded(1, extra_args={"mtp_max_draft_len": 9}))
    logits = make_logits(4)
    output = wrong.verifier(logits, wrong.batch([[1, 2, 3]]))
    right = Harness().add(seeded(1))
    assert tokens_of(output) == tokens_of(right.verifier(logits, right.batch([[1, 2, 3]])))


@BACKENDS
def test_invalid_drafts_are_rejected(backend: Backend) -> None:
    harness = Harness(backend=backend).add(seeded(1), seeded(2))
    logits = make_logits(8)
    batch = harness.batch([[0] * 3] * 2)
    targets = harness.ops.sample(logits, batch.expanded_idx_mapping, batch.positions).tolist()
    drafts = [targets[0:3], targets[4:7]]
    invalid = torch.zeros(8, dtype=torch.bool)
    accepted = harness.verifier(logits, harness.batch(drafts), None, invalid)
    assert tokens_of(accepted) == [targets[0:4], targets[4:8]]
    invalid[2] = True  # the second draft of the first request
    invalid[4] = True  # the row of a last token, which is no draft
    output = harness.verifier(logits, harness.batch(drafts), None, invalid)
    assert tokens_of(output) == [targets[0:2], targets[4:8]]


def test_placeholders_of_prompts_are_rejected() -> None:
    """Drafts at positions within the prompt are no drafts."""
    harness = Harness().add(SamplingParams(temperature=0.0))
    logits = make_logits(3)
    target = logits.argmax(1).tolist()
    batch = harness.batch([target[:2]])
    batch.positions -= 2
    assert harness.verifier(logits, batch).sampled_token_ids[0, 0] == target[0]
    assert harness.verifier(logits, batch).num_sampled.tolist() == [1]
    assert tokens_of(harness.verifier(logits, harness.batch([target[:2]]))) == [target]


def test_unfinished_prompts_give_no_token() -> None:
    harness = Harness().add(seeded(1), seeded(2))
    batch = harness.batch([[], [3]])
    batch.seq_lens[0] = len(PROMPT) - 1
    output = harness.verifier(make_logits(3), batch)
    assert output.num_sampled.tolist()[0] == 0
    assert output.num_sampled.tolist()[1] >= 1
    assert output.num_rejected.tolist()[0] == 0


@BACKENDS
@pytest.mark.parametrize("num_requests", [1, MAX_REQUESTS])
def test_dummy_calls_before_any_request(backend: Backend, num_requests: int) -> None:
    harness = Harness(backend=backend)
    buffers = InputBuffers(MAX_REQUESTS, 64, CPU)
    logits = make_logits(num_requests)
    batch = InputBatch.make_dummy(num_requests, num_requests, buffers)
    for call in (harness.sampler, harness.verifier):
        output = call(logits, batch)
        assert output.sampled_token_ids[:, 0].tolist() == logits.argmax(1).tolist()
    batch = InputBatch.make_dummy(num_requests, num_requests, buffers)
    output = harness.sampler(torch.full_like(logits, float("nan")), batch)
    assert output.sampled_token_ids.tolist() == [[0]] * num_requests
    rows = DraftRows(logits, batch.idx_mapping, batch.positions, 0, torch.tensor(0))
    drafts = harness.ops.sample_drafts(rows)
    assert drafts.tolist() == logits.argmax(1).tolist()


@BACKENDS
def test_nans_are_counted_by_request_and_before_processing(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(logits: torch.Tensor) -> torch.Tensor:  # vLLM's kernel needs a GPU
        return logits.isnan().sum(1).to(torch.int32)

    for module in (our_sampler, vllm_sampler):
        monkeypatch.setattr(module, "get_num_nans", count)
    harness = Harness(backend=backend).add(seeded(1, repetition_penalty=1.2), seeded(2))
    logits = make_logits(4)
    logits[0] = float("nan")
    logits[3, :5] = float("nan")
    batch = harness.batch([[1], [2]])
    assert harness.verifier(logits, batch).num_nans is None
    harness.sampler.compute_nans = True
    output = harness.verifier(logits, batch)
    assert output.num_nans.tolist() == [VOCAB, 5]
    assert output.num_sampled.min() >= 1
    assert output.sampled_token_ids.min() >= 0
    single = harness.sampler(logits[[0, 3]], harness.batch([[], []]))
    assert single.num_nans.tolist() == [VOCAB, 5]
    assert single.sampled_token_ids.min() >= 0


def test_seeds_of_requests_without_one_are_those_of_vllm() -> None:
    harness = Harness().add(*[SamplingParams(temperature=1.0)] * 4)
    seeds = [int(harness.sampler.sampling_states.seeds.np[index]) for index in harness.indices]
    assert len(set(seeds)) == 4
    slots = harness.ops.slots.of(torch.tensor(harness.indices))
    words = slots.read("seed", slice(0, 4)).tolist()
    for seed, (low, high) in zip(seeds, words, strict=True):
        assert [low % 2**32, high % 2**32] == [seed % 2**32, (seed >> 32) % 2**32]


def test_a_freed_index_serves_the_next_request_with_its_own_options() -> None:
    harness = Harness().add(seeded(1, top_k=1, repetition_penalty=5.0))
    index = harness.states.remove_request("0")
    harness.indices.clear()
    harness.add(seeded(7))
    assert harness.indices == [index]
    fresh = Harness().add(seeded(7))
    logits = make_logits(4)
    batches = [each.batch([[1, 2, 3]]) for each in (harness, fresh)]
    outputs = [each.verifier(logits, b) for each, b in zip((harness, fresh), batches, strict=True)]
    assert tokens_of(outputs[0]) == tokens_of(outputs[1])


THINKING = EngineSettings(
    VllmOptions(thinking_begin_token=50, thinking_end_token=51, relaxed_topk=VOCAB),
    NUM_DRAFTS,
    True,
)


@pytest.mark.parametrize(("outputs", "thinking"), [((), 0), ((50, 10), 1), ((50, 10, 51), 0)])
def test_phase_and_steps_of_a_preempted_request_are_those_of_its_output(
    outputs: tuple[int, ...], thinking: int
) -> None:
    harness = Harness(settings=THINKING).add(
        SamplingParams(temperature=0.0, extra_args={"mtp_relaxed_delta": 0.5}), outputs=outputs
    )
    slots, only = harness.ops.slots.of(torch.tensor(harness.indices)), slice(0, 1)
    assert slots.read("draft_step", only).tolist() == [len(outputs)]
    assert slots.read("thinking", only).tolist() == [thinking]
    assert harness.ops.slots.delta_in_force[harness.indices].tolist() == [0.5 * thinking]
    assert not vars(harness.states)[PREFILL]


def test_sampler_without_drafts_follows_the_phase() -> None:
    harness = Harness(settings=THINKING).add(
        SamplingParams(temperature=0.0, extra_args={"mtp_relaxed_delta": 1})
    )
    logits = torch.linspace(0, 1, VOCAB).repeat(4, 1)
    draft = [30, 31, 32]
    assert tokens_of(harness.verifier(logits, harness.batch([draft]))) == [[VOCAB - 1]]
    begins = logits[:1].clone()
    begins[0, 50] = 2.0
    unfinished = harness.batch([[]])
    unfinished.seq_lens[0] = len(PROMPT) - 1
    harness.sampler(begins, unfinished)
    assert tokens_of(harness.verifier(logits, harness.batch([draft]))) == [[VOCAB - 1]]
    assert tokens_of(harness.sampler(begins, harness.batch([[]]))) == [[50]]
    assert tokens_of(harness.verifier(logits, harness.batch([draft]))) == [[*draft, VOCAB - 1]]


def test_drafts_beyond_the_limit_of_a_request_are_withheld() -> None:
    limits = [{}, {"mtp_speculate": 0}, {"mtp_max_draft_len": 2}]
    params = [SamplingParams(temperature=0.0, extra_args=extra) for extra in limits]
    harness = Harness().add(*params)
    logits = make_logits(12)
    top = logits.argmax(1).tolist()
    drafts = [top[4 * i : 4 * i + 3] for i in range(3)]
    output = harness.verifier(logits, harness.batch(drafts))
    assert tokens_of(output) == [top[:4], top[4:5], top[8:11]]
    assert output.num_rejected.tolist() == [0, 3, 1]


def test_methods_share_a_batch() -> None:
    """Drafts of the argmax, and probabilities that are all at another token."""
    methods = [{}, {"mtp_verification": "rejection"}, {"mtp_verification": "block"}]
    params = [seeded(7, extra_args=extra) for extra in methods]
    harness = Harness(settings=EngineSettings(VllmOptions(), NUM_DRAFTS, True)).add(*params)
    alone = Harness().add(seeded(7))
    logits = make_logits(4).repeat(3, 1)
    drafts = [logits[:3].argmax(1).tolist()] * 3
    expected = tokens_of(alone.verifier(logits[:4], alone.batch(drafts[:1])))
    output = tokens_of(harness.verifier(logits, harness.batch(drafts)))
    assert output[:1] == expected
    assert all(output)
    steps = harness.ops.slots.of(torch.tensor(harness.indices)).read("draft_step", slice(0, 3))
    assert steps.tolist() == [1, 1, 1]


def test_batches_without_logits_processors_copy_no_logits() -> None:
    harness = Harness().add(seeded(1, top_k=5), seeded(2, repetition_penalty=2.0))
    logits = make_logits(1)
    rows = rows_of(harness.batch([[]]))
    assert harness.sampler.processed(logits, rows) is logits


def make_engine(
    spec: object, rates: tuple[float, ...] | None = None, keeps_draft_probs: bool = False
) -> Engine:
    config = SimpleNamespace(
        speculative_config=spec,
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_REQUESTS),
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB),
    )
    given = make_vllm_sampler(make_request_states(), "raw_logprobs")
    settings = EngineSettings(
        VllmOptions(kernels="reference"), NUM_DRAFTS if spec else 0, keeps_draft_probs, rates
    )
    return Engine(config, settings, given, CPU)


def test_an_engine_with_drafts_has_both_sampler_and_verifier() -> None:
    engine = make_engine(SPEC)
    assert isinstance(engine.sampler, PluginSampler)
    assert isinstance(engine.verifier, PluginVerifier)
    assert engine.ops.num_drafts == NUM_DRAFTS


def test_an_engine_without_drafts_has_no_verifier() -> None:
    engine = make_engine(None)
    assert isinstance(engine.sampler, PluginSampler)
    assert engine.verifier is None
    assert engine.ops.num_drafts == 0


@pytest.mark.parametrize(("rates", "length"), [([1.0, 1.0, 1.0], 4), ([1.0, 0.0, 0.0], 2)])
def test_synthetic_acceptance_of_an_engine(rates: list[float], length: int) -> None:
    changes = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    engine = make_engine(SimpleNamespace(**{**vars(SPEC), **changes}), tuple(rates))
    harness = Harness()
    harness.states, harness.sampler = engine.sampler.req_states, engine.sampler
    harness.add(seeded(1), seeded(2))
    output = engine.verifier(make_logits(8), harness.batch([[1, 2, 3]] * 2))
    assert output.num_sampled.tolist() == [length] * 2


def test_sample_draft_reads_the_logits_of_the_speculator() -> None:
    engine = make_engine(SPEC)
    logits = make_logits(2)
    calls = []

    def compute_draft_logits(hidden_states: torch.Tensor, spec_step_idx: int) -> torch.Tensor:
        calls.append((hidden_states, spec_step_idx))
        return logits

    speculator = SimpleNamespace(compute_draft_logits=compute_draft_logits)
    indices, positions = torch.tensor([0, -1]), torch.tensor([5, 0])
    unused = torch.zeros(2)
    tokens = engine.sample_draft(
        speculator, "states", positions, indices, unused, unused, unused, None, spec_step_idx=2
    )
    assert calls == [("states", 2)]
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == logits.argmax(1).tolist()


def test_sample_draft_has_the_noise_of_the_row_that_verifies_it() -> None:
    """The first draft follows the token at the request's last position, where the target's rows
    begin."""
    engine = make_engine(SPEC)
    harness = Harness()
    harness.states, harness.sampler = engine.sampler.req_states, engine.sampler
    harness.add(seeded(1), seeded(2, top_k=7))
    batch = harness.batch([[0], [0]])
    logits = make_logits(4) / 10  # nearly flat: other noise gives other tokens
    first = logits[[0, 2]]
    speculator = SimpleNamespace(compute_draft_logits=lambda *_: first)
    positions = batch.positions[[0, 2]]
    unused = torch.zeros(2)
    drafts = engine.sample_draft(
        speculator, None, positions, batch.idx_mapping, unused, unused, unused, None
    )
    dspark = SimpleNamespace(model=None, _step_cols=torch.arange(NUM_DRAFTS))
    same = engine.sample_logits(dspark, first, batch.idx_mapping, positions + 1, step=0)
    assert same.tolist() == drafts.tolist()
    output = engine.verifier(logits, harness.batch([[int(draft)] for draft in drafts]))
    assert output.num_sampled.tolist() == [2, 2]
    assert output.sampled_token_ids[:, 0].tolist() == drafts.tolist()


def test_dspark_drafts_are_target_ids_and_keep_their_probabilities() -> None:
    """Draft id i is the target's 2 i; the last request is padding."""
    engine = make_engine(SPEC, keeps_draft_probs=True)
    harness = Harness()
    harness.states, harness.sampler = engine.sampler.req_states, engine.sampler
    methods = {"mtp_verification": "rejection"}, {"mtp_verification": "block"}
    harness.add(*(seeded(1, extra_args=method) for method in methods))
    model = SimpleNamespace(draft_id_to_target_id=torch.arange(VOCAB // 2))
    speculator = SimpleNamespace(
        model=model, vocab_size=VOCAB, _step_cols=torch.arange(NUM_DRAFTS, dtype=torch.int32)
    )
    logits = make_logits(3)[:, : VOCAB // 2]
    slots = harness.batch([[0], [0]]).idx_mapping.long()
    columns = torch.stack([torch.tensor([*slots, -1]), torch.zeros(3, dtype=torch.int64)], 1)
    drafts = engine.sample_logits(speculator, logits, columns[:, 0], torch.tensor([5, 5, 0]), 1)
    kept = engine.ops.draft_probs
    assert kept is not None
    torch.testing.assert_close(kept[slots, 1, ::2], (logits[:2] / 0.8).softmax(1))
    assert kept[slots, 1, 1::2].count_nonzero() == 0
    assert (kept[slots, 1, drafts[:2]] > 0).all()
    assert kept[slots][:, [0, 2]].count_nonzero() == 0
