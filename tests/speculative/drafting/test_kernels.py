"""Whole steps on the Triton kernels equal whole steps on the references, bit for bit.

Runs under Triton's interpreter without a GPU, on the device with one; in a CUDA graph there too.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.config import SpeculativeDecodingMode
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.step import SamplingKind
from mtp_plugin.requests.stopping import NO_STOP
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker
from mtp_plugin.speculative.metadata import MTPSpecMetadata
from mtp_plugin.speculative.state import MTPHiddenStatesManager
from tests.ops.bits import same_bits
from tests.ops.on_device import DEVICE, read_back_forbidden
from tests.speculative.plain_host import LimitedAttention

BEGIN, END = 3, 5


class DeviceAttention(LimitedAttention):
    """The embedded executor's fields, on the device of the run."""

    def __init__(self, seq_lens: list[int], num_contexts: int, kv_lens: list[int]) -> None:
        super().__init__(seq_lens, num_contexts, kv_lens)
        for name in ("_seq_lens_cuda", "kv_lens_cuda", "kv_write_limit", "kv_capacity"):
            setattr(self, name, getattr(self, name).to(DEVICE))


class MixingLayer:
    """A draft layer whose states depend on ids, states and positions; its head is a projection."""

    def __init__(self, embedding: torch.Tensor, head: torch.Tensor, returns_input: bool) -> None:
        self.embedding = embedding
        self.head = head
        self.returns_input = returns_input

    def __call__(self, *, input_ids, position_ids, hidden_states, **_: Any) -> torch.Tensor:
        if self.returns_input:
            return hidden_states
        places = (position_ids.reshape(-1, 1) % 7).to(hidden_states.dtype) / 16
        return hidden_states / 2 + self.embedding[input_ids.long()] + places

    def shared_head(self, hidden, _lm_head, attn_metadata, return_all=False) -> torch.Tensor:
        if not return_all:
            ends = attn_metadata.seq_lens_cuda[: attn_metadata.num_seqs].long().cumsum(0) - 1
            hidden = hidden[ends]
        return hidden @ self.head


class Case:
    """One random step, and everything that a worker needs for it."""

    def __init__(
        self,
        *,
        k: int,
        chunks: list[tuple[int, int, bool]],
        num_generations: int,
        vocab: int,
        hidden: int,
        seed: int,
        relaxed: bool = False,
        synthetic: bool = False,
        early_stops: bool = False,
        draft_lens: bool = False,
        vanilla: bool = True,
        window: str = "exact",
        chain: str = "output",
        returns_input: bool = False,
        dtype: torch.dtype = torch.float32,
        ready_heads: bool = False,
        look_ahead: bool = True,
        own_pool: bool = False,
    ) -> None:
        rng = torch.Generator().manual_seed(seed)

        def integers(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=rng, dtype=torch.int32)

        self.k, self.vanilla = k, vanilla
        config = SimpleNamespace(
            max_draft_len=k,
            use_relaxed_acceptance_for_thinking=relaxed,
            relaxed_topk=4,
            relaxed_delta=0.3,
            begin_thinking_phase_token=BEGIN,
            end_thinking_phase_token=END,
            mtp=SimpleNamespace(draft_window=window, kernels="reference", chain=chain),
        )
        if synthetic:
            config.mtp.verification = "synthetic"
            config.mtp.synthetic_seed = 5
            config.mtp.synthetic_acceptance = 0.8
        self.config = config
        num_contexts = len(chunks)
        self.num_contexts = num_contexts
        seq_lens = [length for _, length, _ in chunks] + [k + 1] * num_generations
        lengths = integers(1, 3 * k + 4, num_generations).tolist()
        kv_lens = [start + length for start, length, _ in chunks]
        kv_lens += [length + k + 1 for length in lengths]
        requests = len(seq_lens)
        self.manager = MTPHiddenStatesManager(
            config, dtype, hidden, max(requests, 1), device=DEVICE
        )
        other = torch.Generator().manual_seed(seed)
        order = torch.randperm(self.manager.sentinel_slot, generator=other)
        self.slots = order[:requests].tolist()
        for request, slot in enumerate(self.slots):
            self.manager.slot_manager.free_slots.remove(slot)
            self.manager.slot_manager.slot_mapping[request] = slot
        # what nothing here gives a meaning to is anything
        table = self.manager.table
        for name in ("number", "prompt_len", "min_tokens"):
            noise = torch.randint(0, 9, (len(order) + 1,), generator=other)
            table.column(name).copy_(noise)
        states = self.manager.mtp_past_hidden_states_pool
        states.copy_(torch.randn(states.shape, generator=rng))
        tokens = self.manager.mtp_past_tokens_pool
        tokens.copy_(integers(0, vocab, *tokens.shape))
        if relaxed:
            pool = table.column("thinking")
            pool.copy_(integers(0, 2, *pool.shape))
            # every fifth request is strict
            table.column("relaxed_topk")[::5] = 1
            table.column("relaxed_limit")[::5] = 0.0
            # a fifth of the deltas is another: written by the host
            wanted = torch.where(pool > 0, table.column("relaxed_limit"), 0.0)
            written = integers(0, 5, *pool.shape).to(wanted) == 0
            self.manager.mtp_relaxed_delta_pool.copy_(torch.where(written, 0.1, wanted))
            if own_pool:
                mine = self.manager.mtp_relaxed_delta_pool
                self.manager.mtp_relaxed_delta_pool = torch.cat([mine, mine])
                mine.fill_(torch.nan)
            stops = table.column("stop_ids")
            stops.copy_(integers(0, vocab, *stops.shape))
            stops[:, 2:] = NO_STOP
        self.attention = DeviceAttention(seq_lens, num_contexts, kv_lens)
        starts = [start for start, _, _ in chunks] + lengths
        self.attention.kv_cache_params.num_cached_tokens_per_seq = starts
        positions = [s + i for s, n in zip(starts, seq_lens, strict=True) for i in range(n)]
        rows = num_contexts + num_generations * (k + 1)
        logits = torch.randn(rows, vocab, generator=rng) * 3
        best = logits[num_contexts:].argmax(-1).view(num_generations, k + 1)[:, :k]
        drafts = torch.where(
            torch.rand(best.shape, generator=rng) < 0.7, best, integers(0, vocab, *best.shape)
        )
        ids = integers(0, vocab, sum(seq_lens))
        self.inputs = {
            "input_ids": ids.to(DEVICE),
            "position_ids": torch.tensor([positions]).to(DEVICE),
            "hidden_states": torch.randn(len(positions), hidden, generator=rng).to(DEVICE, dtype),
            "logits": logits.to(DEVICE),
        }
        following = [-1 if last else int(integers(0, vocab, 1)) for _, _, last in chunks]
        mode = SpeculativeDecodingMode
        self.spec = MTPSpecMetadata(
            max_num_requests=max(requests, 1),
            max_draft_len=k,
            spec_dec_mode=mode.MTP if vanilla else mode.MTP_EAGLE_ONE_MODEL,
            mtp_hidden_states_manager=self.manager,
            max_position=4 * k + 6,
            draft_window=window,
            device=DEVICE,
        )
        self.spec.request_ids = range(requests)
        self.spec.draft_tokens = drafts.reshape(-1).to(DEVICE, torch.int32)
        if draft_lens:
            self.spec.draft_lens = integers(0, k + 1, num_generations).to(DEVICE)
        if look_ahead:
            following = torch.tensor(following, dtype=torch.int32, device=DEVICE)
            self.spec.next_prompt_tokens = following
        if early_stops:
            # what the target would say next, too early for half of the requests
            stops = logits.argmax(-1)[: requests * 2].to(torch.int32)
            stops = torch.cat([stops, stops.new_zeros(2 * requests - len(stops))])
            slots = torch.tensor(self.slots, dtype=torch.int64, device=DEVICE)
            table.column("stop_ids")[slots, :2] = stops.view(requests, 2).to(DEVICE)
            table.column("prompt_len")[slots] = 2
            least = torch.where(integers(0, 2, requests) > 0, 2**31 - 1, 0)
            table.column("min_tokens")[slots] = least.to(DEVICE, torch.int32)
            self.spec.sampling_kind = SamplingKind.PROCESSED
        self.spec.prepare()
        width = 1 if ready_heads else vocab  # heads of the test's own need no projection
        embedding = torch.randn(width, hidden, generator=rng).to(DEVICE, dtype)
        head = torch.randn(hidden, width, generator=rng).to(DEVICE, dtype)
        self.layers = [MixingLayer(embedding, head * (1 + d), returns_input) for d in range(k)]

    @property
    def pool_names(self) -> list[str]:
        """Everything that a step may write, the slot table included."""
        names = ["mtp_past_tokens_pool", "mtp_past_hidden_states_pool"]
        return names + ["mtp_relaxed_delta_pool"] * hasattr(self.manager, "mtp_relaxed_delta_pool")

    def alone(self, request: int) -> Case:
        """The same request in a batch of its own."""
        one, width = copy.deepcopy(self), self.k + 1
        lens, contexts = self.attention._seq_lens.tolist(), self.num_contexts
        is_context = request < contexts
        tokens = slice(sum(lens[:request]), sum(lens[: request + 1]))
        first = request if is_context else contexts + (request - contexts) * width
        rows = slice(first, first + (1 if is_context else width))
        inputs = self.inputs
        one.inputs = {
            "input_ids": inputs["input_ids"][tokens].clone(),
            "position_ids": inputs["position_ids"][:, tokens].clone(),
            "hidden_states": inputs["hidden_states"][tokens].clone(),
            "logits": inputs["logits"][rows].clone(),
        }
        kv_len = int(self.attention.kv_lens_cuda[request])
        one.attention = DeviceAttention([lens[request]], int(is_context), [kv_len])
        cached = self.attention.kv_cache_params.num_cached_tokens_per_seq[request]
        one.attention.kv_cache_params.num_cached_tokens_per_seq = [cached]
        generation = slice(request - contexts, request - contexts + 1)
        none = slice(0, 0)
        drafts = self.spec.draft_tokens.view(-1, self.k)
        one.spec.draft_tokens = drafts[none if is_context else generation].reshape(-1).clone()
        if self.spec.draft_lens is not None:
            one.spec.draft_lens = self.spec.draft_lens[none if is_context else generation].clone()
        context = slice(request, request + 1) if is_context else none
        if self.spec.next_prompt_tokens is not None:
            one.spec.next_prompt_tokens = self.spec.next_prompt_tokens[context].clone()
        one.spec.request_ids = [request]
        one.spec.prepare()
        return one

    def run(
        self, backend: Backend, *, may_overwrite_states: bool = False
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """The step on its own copy of all state: outputs, and pools afterwards."""
        case = copy.deepcopy(self)
        worker = (MTPWorker if self.vanilla else MTPEagleWorker)(case.config)
        worker.backend = backend
        worker.may_overwrite_states = may_overwrite_states
        outputs = worker(
            **case.inputs,
            lm_head=None,
            embed_tokens=None,
            attn_metadata=case.attention,
            spec_metadata=case.spec,
            mtp_layers=case.layers,
        )
        manager = case.manager
        pools = [getattr(manager, name) for name in self.pool_names] + [manager.table.rows]
        for name, before in self.inputs.items():
            if name != "hidden_states" or not may_overwrite_states:
                assert torch.equal(before, case.inputs[name])
        return outputs, pools

    def check(self) -> None:
        outputs, pools = self.run(Backend.TRITON)
        expected, expected_pools = self.run(Backend.TORCH)
        for key, value in expected.items():
            assert torch.equal(outputs[key], value), key
            assert outputs[key].dtype == value.dtype
        for pool, value in zip(pools, expected_pools, strict=True):
            assert same_bits(pool, value)


chunk = st.tuples(st.integers(0, 6), st.integers(1, 9), st.booleans())


@settings(max_examples=12)
@given(
    k=st.integers(1, 5),
    chunks=st.lists(chunk, max_size=3),
    num_generations=st.integers(0, 4),
    vocab=st.sampled_from([7, 130, 1500]),
    hidden=st.sampled_from([8, 24, 130]),
    seed=st.integers(0, 10**6),
    mode=st.sampled_from(["strict", "relaxed", "synthetic"]),
    early_stops=st.booleans(),
    draft_lens=st.booleans(),
    vanilla=st.booleans(),
    window=st.sampled_from(["exact", "trtllm"]),
    chain=st.sampled_from(["output", "target_shift", "none"]),
    returns_input=st.booleans(),
    look_ahead=st.booleans(),
    own_pool=st.booleans(),
)
def test_random_steps(mode: str, **options: Any) -> None:
    if not options["chunks"] and not options["num_generations"]:
        options["num_generations"] = 1
    Case(**options, relaxed=mode == "relaxed", synthetic=mode == "synthetic").check()


def test_modes_and_stops_make_a_difference() -> None:
    """What the random steps compare is not the same step under several names."""
    options = {"k": 3, "chunks": [(0, 4, True)], "num_generations": 4, "vocab": 130, "hidden": 8}
    runs = {}
    for name in ("strict", "relaxed", "synthetic", "early_stops"):
        named = {} if name == "strict" else {name: True}
        runs[name] = Case(**options, **named, seed=3).run(Backend.TRITON)[0]["new_tokens"]
    for name in ("relaxed", "synthetic", "early_stops"):
        assert not torch.equal(runs[name], runs["strict"]), name


@pytest.mark.parametrize("vanilla", [False, True], ids=["eagle", "vanilla"])
def test_prompts_of_a_host_without_look_ahead(vanilla: bool) -> None:
    """Every prompt's last row is followed by what that prompt emitted."""
    chunks = [(0, 4, True), (0, 3, True), (0, 5, True)]
    shape = {"k": 3, "num_generations": 0, "vocab": 130, "hidden": 8, "vanilla": vanilla}
    case = Case(chunks=chunks, **shape, seed=3, look_ahead=False)
    case.check()
    outputs, _ = case.run(Backend.TRITON)
    for request in range(len(chunks)):
        one, _ = case.alone(request).run(Backend.TORCH)
        assert torch.equal(outputs["next_draft_tokens"][request], one["next_draft_tokens"][0])


@pytest.mark.parametrize("mode", ["strict", "relaxed", "synthetic"])
@pytest.mark.parametrize("vanilla", [False, True], ids=["eagle", "vanilla"])
def test_padding_rows_may_share_a_slot(vanilla: bool, mode: str) -> None:
    shape: dict[str, Any] = {"k": 3, "num_generations": 4, "vocab": 64, "hidden": 16}
    modes = {"relaxed": mode == "relaxed", "synthetic": mode == "synthetic"}
    case = Case(chunks=[], seed=1, vanilla=vanilla, early_stops=True, **shape, **modes)
    case.spec.slot_ids[2:] = case.manager.sentinel_slot
    outputs, pools = case.run(Backend.TRITON)
    expected, expected_pools = case.run(Backend.TORCH)
    for key, value in expected.items():
        assert torch.equal(outputs[key][:2], value[:2])
    sentinel = case.manager.sentinel_slot
    for pool, value in zip(pools, expected_pools, strict=True):
        assert same_bits(pool[:sentinel], value[:sentinel])


GRAPH_SHAPES = [
    pytest.param(1, 4096, 129280, 3, id="1x4096-k3"),
    pytest.param(8, 7168, 129280, 1, id="8x7168-k1"),
    pytest.param(8, 7168, 129280, 3, id="8x7168-k3"),
    pytest.param(5, 7168, 129280, 7, id="5x7168-k7"),
    pytest.param(33, 7168, 32003, 3, id="33x7168-k3-odd-vocabulary"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "hidden", "vocab", "k"), GRAPH_SHAPES)
@pytest.mark.parametrize("vanilla", [False, True], ids=["eagle", "vanilla"])
@pytest.mark.parametrize("mode", ["strict", "relaxed", "synthetic"])
def test_a_step_in_a_cuda_graph(batch, hidden, vocab, vanilla, mode, k) -> None:
    """Captured once, replayed with changed inputs; nothing reads the device back.

    The synthetic one also masks stops that come too early, and moves states by an offset.
    """
    relaxed, synthetic = mode == "relaxed", mode == "synthetic"

    def case(seed: int) -> Case:
        made = Case(
            k=k,
            chunks=[],
            num_generations=batch,
            vocab=vocab,
            hidden=hidden,
            seed=seed,
            vanilla=vanilla,
            relaxed=relaxed,
            synthetic=synthetic,
            early_stops=synthetic,
            chain="target_shift" if synthetic else "output",
            draft_lens=True,
            returns_input=True,
            dtype=torch.bfloat16,
            ready_heads=True,
        )
        # heads that return ready logits: what is compared is the step, not a projection
        ready = [layer_logits(vocab, batch, seed, d) for d in range(k)]
        for layer, logits in zip(made.layers, ready, strict=True):
            layer.ready = logits
            layer.shared_head = lambda *_, layer=layer: layer.ready
        if not vanilla:
            turn = iter(range(10**6))
            made.layers[0].shared_head = lambda *_: ready[next(turn) % k]
        made.ready = ready
        return made

    captured = case(0)
    worker = (MTPWorker if vanilla else MTPEagleWorker)(captured.config)
    worker.backend = Backend.TRITON

    def step():
        return worker(
            **captured.inputs,
            lm_head=None,
            embed_tokens=None,
            attn_metadata=captured.attention,
            spec_metadata=captured.spec,
            mtp_layers=captured.layers,
        )

    captured.attention.is_cuda_graph = True
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with read_back_forbidden(), torch.cuda.graph(graph, stream=stream):
        outputs = step()
    for seed in (1, 2):
        fresh = case(seed)
        expected, pools = fresh.run(Backend.TORCH)
        for name, value in captured.inputs.items():
            value.copy_(fresh.inputs[name])
        for mine, theirs in zip(captured.ready, fresh.ready, strict=True):
            mine.copy_(theirs)
        for name in ("draft_tokens", "draft_lens", "slot_ids"):
            getattr(captured.spec, name).copy_(getattr(fresh.spec, name))
        for name in ("kv_lens_cuda", "kv_write_limit", "kv_capacity"):
            getattr(captured.attention, name).copy_(getattr(fresh.attention, name))
        names = captured.pool_names
        for name in names:
            getattr(captured.manager, name).copy_(getattr(fresh.manager, name))
        captured.manager.table.rows.copy_(fresh.manager.table.rows)
        graph.replay()
        torch.cuda.synchronize()
        for key, value in expected.items():
            assert torch.equal(outputs[key], value), key
        mine = [getattr(captured.manager, name) for name in names]
        mine.append(captured.manager.table.rows)
        for pool, value in zip(mine, pools, strict=True):
            assert same_bits(pool, value)


def layer_logits(vocab: int, batch: int, seed: int, depth: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1000 * seed + depth)
    return torch.randn(batch, vocab, generator=rng).to(DEVICE)
