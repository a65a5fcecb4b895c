"""Whole steps of a worker with a model that costs nothing.

Draft layers return their input and draft heads return prepared logits. The step consists of
acceptance, history, draft inputs, the argmax of every draft, and changes of the metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from integration.bench.case import Case, RandomInputs, Shape, Trial
from mtp_plugin.config import MTPDecodingConfig, SpeculativeDecodingMode
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.step import SamplingKind
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker, SpecWorker
from mtp_plugin.speculative.host import RequestFacts
from mtp_plugin.speculative.metadata import MTPSpecMetadata
from mtp_plugin.speculative.state import MTPHiddenStatesManager

HIGHEST_POSITION = 131071
PROMPT_TOKENS = 100


@dataclass(frozen=True)
class Kind:
    """Options of every request of a step, and the config that they need."""

    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)  # keys except `mtp`
    mtp: Mapping[str, Any] = field(default_factory=dict)

    @property
    def draws(self) -> bool:
        """Whether the step samples tokens and may process logits."""
        return bool(self.options)

    @property
    def only_draws(self) -> bool:
        """Whether no request processes logits."""
        return self.options.keys() <= DRAWS.keys() | {"verification"}


DRAWS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
KINDS: Mapping[str, Kind] = {
    "": Kind(),
    "draws": Kind(DRAWS),
    "edits": Kind({**DRAWS, "repetition_penalty": 1.1, "logprobs": 5}),
}
"""Greedy, sampled, and sampled requests with logits processing; each has its own graph."""


class GenerationAttention:
    """Attention metadata of a batch of generations in a CUDA graph, as a host engine keeps it.

    Args:
        seq_len: rows per request.
        kv_lens: [R] int32, including the rows of this step.
    """

    supports_dead_rows = True
    is_cuda_graph = True
    kv_cache_params = None

    def __init__(self, seq_len: int, kv_lens: torch.Tensor) -> None:
        self._seq_lens = torch.full((kv_lens.shape[0],), seq_len, dtype=torch.int32)
        self._seq_lens_cuda = self._seq_lens.to(kv_lens.device, copy=True)
        self.kv_lens_cuda = kv_lens
        self.host_request_types = torch.ones_like(self._seq_lens)
        self.num_contexts = 0

    @property
    def num_seqs(self) -> int:
        return int(self._seq_lens.shape[0])

    @property
    def seq_lens_cuda(self) -> torch.Tensor:
        return self._seq_lens_cuda

    @property
    def num_ctx_tokens(self) -> int:
        return 0

    def on_update(self) -> None:
        """Do nothing: no field depends on the lengths."""

    def device_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a step changes."""
        return {"seq_lens": self._seq_lens_cuda, "kv_lens": self.kv_lens_cuda}


class FreeLayer:
    """A draft layer that returns its input; its head returns prepared logits."""

    def __init__(self, ready: list[torch.Tensor]) -> None:
        self._ready = ready
        self._passes = 0

    def __call__(self, *, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states

    def shared_head(self, *_: Any) -> torch.Tensor:
        logits = self._ready[self._passes % len(self._ready)]
        self._passes += 1
        return logits


def step_cases(shape: Shape, device: torch.device) -> list[Case]:
    """Return a step of each worker, and of a vanilla worker whose depths all read the target's
    hidden states."""
    chains = {"vanilla": "output", "eagle": None, "vanilla-target-shift": "target_shift"}
    return [_case(name, shape, device, chain, KINDS[""]) for name, chain in chains.items()]


def kind_cases(shape: Shape, device: torch.device, kinds: Mapping[str, Kind] = KINDS) -> list[Case]:
    """Return a step of each worker per kind of requests that are not greedy."""
    return [
        _case(f"{worker}-{name}", shape, device, chain, kind)
        for name, kind in kinds.items()
        if name
        for worker, chain in (("vanilla", "output"), ("eagle", None))
    ]


def _case(name: str, shape: Shape, device: torch.device, chain: str | None, kind: Kind) -> Case:
    """Return a case; ``chain`` is that of the vanilla worker, or None for the Eagle worker."""
    # Eagle gathers the state of the last accepted row; vanilla moves the window and the pool rows
    states = shape.batch * (2 if chain is None else 3 * shape.k + 2)
    logits = (shape.rows + shape.k * shape.batch) * shape.row_bytes
    return Case(
        f"step/{name}",
        shape,
        logits + states * shape.state_bytes,
        lambda seed: _trial(shape, RandomInputs(seed, device), chain, kind),
    )


def _trial(shape: Shape, rng: RandomInputs, chain: str | None, kind: Kind) -> Trial:
    batch, k, device = shape.batch, shape.k, rng.device
    width = k + 1
    config = MTPDecodingConfig(
        max_draft_len=k,
        use_mtp_vanilla=chain is not None,
        mtp={"kernels": "reference", "chain": chain, **kind.mtp},
        **kind.config,
    )
    manager = MTPHiddenStatesManager(
        config,
        torch.bfloat16,
        shape.hidden,
        batch,
        device=device,
        num_seq_slots=batch,
        vocab_size=shape.vocab if kind.draws else None,
    )
    requests = rng.permutation(batch).tolist()
    requested = [_Request(request, kind.options, rng, shape) for request in sorted(requests)]
    manager.prepare_resources(SimpleNamespace(context_requests=requested, generation_requests=[]))
    tokens, states = manager.mtp_past_tokens_pool, manager.mtp_past_hidden_states_pool
    tokens.copy_(rng.integers(0, shape.vocab, *tokens.shape))
    states.copy_(rng.states(*states.shape))
    mode = SpeculativeDecodingMode
    spec = MTPSpecMetadata(
        max_num_requests=batch,
        max_draft_len=k,
        spec_dec_mode=mode.MTP_EAGLE_ONE_MODEL if chain is None else mode.MTP,
        mtp_hidden_states_manager=manager,
        max_position=HIGHEST_POSITION,
        draft_window="exact",
        device=device,
        is_cuda_graph=True,
    )
    lens = rng.integers(100, 4000, batch)
    attention = GenerationAttention(width, lens + width)
    logits = rng.logits(batch * width, shape)
    spec.request_ids = requests
    spec.draft_tokens = rng.drafts(logits, shape)
    spec.next_prompt_tokens = torch.empty(0, dtype=torch.int32, device=device)
    sampled = SamplingKind.SAMPLED if kind.only_draws else SamplingKind.PROCESSED
    spec.sampling_kind = sampled if kind.draws else SamplingKind.GREEDY
    spec.prepare()
    ready = [rng.logits(batch, shape) for _ in range(k)]
    layers = [FreeLayer(ready)] if chain is None else [FreeLayer([head]) for head in ready]
    positions = lens.to(torch.int64).unsqueeze(1) + torch.arange(width, device=device)
    inputs = {
        "input_ids": rng.integers(0, shape.vocab, batch * width),
        "position_ids": positions.view(1, -1),
        "hidden_states": rng.states(batch * width, shape.hidden),
        "logits": logits,
    }
    worker: SpecWorker = (
        MTPEagleWorker(config, device=device) if chain is None else MTPWorker(config, device=device)
    )

    def run(backend: Backend) -> dict[str, torch.Tensor]:
        worker.backend = backend
        outputs: dict[str, torch.Tensor] = worker(
            **inputs, attn_metadata=attention, spec_metadata=spec, mtp_layers=layers
        )
        unlike = ("logits", "logprob_entries")  # log_probs are compared instead of logprob_entries
        return {name: value for name, value in outputs.items() if name not in unlike}

    state = attention.device_tensors() | {"past_tokens": tokens, "past_states": states}
    if not kind.only_draws and manager.logits_allocator is not None:
        pools = manager.logits_allocator.pools
        state |= {"table": manager.table.rows, "counts": pools.counts, "seen": pools.seen}
    return Trial(run, state, approximate=frozenset({"log_probs"}))


class _Request:
    """A request at its first prompt chunk, with what the manager reads."""

    is_first_context_chunk = True

    def __init__(
        self, request_id: int, options: Mapping[str, Any], rng: RandomInputs, shape: Shape
    ) -> None:
        self.request_id = request_id
        self._tokens: list[int] = []
        if options:
            self._tokens = rng.integers(0, shape.vocab, PROMPT_TOKENS).tolist()
        self.facts = RequestFacts.of(
            request_id,
            SamplingParams(ignore_eos=True, **options),
            prompt_len=len(self._tokens),
            max_seq_len=HIGHEST_POSITION,
        )

    def get_tokens(self, beam: int) -> list[int]:  # noqa: ARG002
        return self._tokens
