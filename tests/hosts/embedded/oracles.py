"""Oracles for end-to-end tests: the target alone, and drafts of a fresh run over a prefix.

Everything here is a full recomputation with transformers' own attention; nothing of the executor or
the workers is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import nn
from transformers import DynamicCache

from mtp_plugin.hosts.embedded.models import LoadedModel


@dataclass
class _FullAttention:
    """Attention metadata of one sequence that transformers' own attention runs."""

    cache: DynamicCache = field(default_factory=DynamicCache)

    def model_kwargs(self) -> dict:
        return {"past_key_values": self.cache, "attention_mask": None, "use_cache": True}


@dataclass(frozen=True)
class FreshDrafts:
    """What a fresh run over a prefix proposes, and the draft KV that it writes."""

    drafts: list[int]
    kv: dict[int, tuple[torch.Tensor, torch.Tensor]]
    """Layer -> key and value rows [rows, heads, width] that follow from verified tokens alone."""


class Oracle:
    """The target alone and its draft layers, recomputed from scratch.

    Args:
        model: loaded with transformers' ``sdpa`` attention.
        max_draft_len: K. vanilla: one layer per depth, else the first layer reused.
        chain: how vanilla depths hand states on.
    """

    def __init__(
        self, model: LoadedModel, max_draft_len: int, *, vanilla: bool, chain: str = "output"
    ) -> None:
        self.model = model
        self.k = max_draft_len
        self.vanilla = vanilla
        self.chain = chain
        self.fresh = lru_cache(maxsize=None)(self._fresh)
        self.states = lru_cache(maxsize=None)(self._states)
        self.next_token = lru_cache(maxsize=None)(self._next_token)

    def greedy(self, prompt: list[int], num_tokens: int, stop: tuple[int, ...] = ()) -> list[int]:
        """The target's greedy continuation, one full forward per token."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(self.next_token(tuple(tokens)))
            if tokens[-1] in stop:
                break
        return tokens[len(prompt) :]

    @torch.inference_mode()
    def _states(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """[len(tokens), H] target states."""
        ids = torch.tensor(tokens)
        positions = torch.arange(len(tokens)).unsqueeze(0)
        return self.model.forward_target(ids, positions, _FullAttention())

    @torch.inference_mode()
    def _fresh(self, tokens: tuple[int, ...], script: tuple[int, ...] = ()) -> FreshDrafts:
        """Drafts and draft KV after ``tokens``, whose last one the target has not read yet.

        With a script every depth goes on from the scripted draft, not from its own.
        """
        length = len(tokens) - 1  # L: states exist for positions 0 .. L-1
        states = self.states(tokens[:-1])
        drafts, attention = (
            self._vanilla(list(tokens), states, script)
            if self.vanilla
            else self._eagle(tokens, states, script)
        )
        kv = {}
        first = self.model.facts.num_hidden_layers
        for layer, held in enumerate(attention.cache.layers[first:], start=first):
            key, value = held.keys, held.values
            depth = layer - first if self.vanilla else 0
            # row i of depth d reads the token i + d + 1, which is verified up to position L
            rows = max(0, length - depth)
            kv[layer] = (key[0].transpose(0, 1)[:rows], value[0].transpose(0, 1)[:rows])
        return FreshDrafts(drafts, kv)

    def _vanilla(
        self, tokens: list[int], states: torch.Tensor, script: tuple[int, ...]
    ) -> tuple[list[int], _FullAttention]:
        length = states.shape[0]
        attention = _FullAttention()
        drafts: list[int] = []
        for depth in range(self.k):
            known = tokens + list(script[:depth] or drafts)
            window = known[depth + 1 : depth + 1 + length]
            outputs = self._layer(depth, window, range(length), states, attention)
            drafts.append(self._draft(depth, outputs[-1:]))
            if self.chain == "output":
                states = outputs
            elif self.chain == "target_shift":
                states = torch.cat([states[1:], outputs[-1:]])
        return drafts, attention

    def _eagle(
        self, tokens: tuple[int, ...], states: torch.Tensor, script: tuple[int, ...]
    ) -> tuple[list[int], _FullAttention]:
        length = states.shape[0]
        attention = _FullAttention()
        state = self._layer(0, list(tokens[1:]), range(length), states, attention)[-1:]
        drafts = [self._draft(0, state)]
        for i in range(self.k - 1):
            position = length + i
            token = [script[i]] if script else drafts[-1:]
            state = self._layer(0, token, range(position, position + 1), state, attention)
            drafts.append(self._draft(0, state))
        return drafts, attention

    def _layer(self, depth, tokens, positions, states, attention) -> torch.Tensor:
        return self.model.mtp_layers[depth](
            embed_tokens=self.model.embed_tokens,
            input_ids=torch.tensor(tokens),
            position_ids=torch.tensor([list(positions)]),
            hidden_states=states,
            attn_metadata=attention,
        )

    def _draft(self, depth: int, state: torch.Tensor) -> int:
        layer = self.model.mtp_layers[depth]
        return int(layer.shared_head(state, self.model.lm_head, None, True)[-1].argmax())

    @torch.inference_mode()
    def _next_token(self, tokens: tuple[int, ...]) -> int:
        return int(self.model.lm_head(self.states(tokens)[-1:])[-1].float().argmax())


class ScriptedDrafts(nn.Module):
    """Wraps a worker and puts scripted drafts in place of its own, inside its draft loop.

    Scripted drafts follow the true continuation for as many tokens as ``accept`` says and are wrong
    after it, so a step's acceptance is exactly known. Since the loop goes on from them, the draft
    KV is what a worker with these drafts would have written.

    Args:
        worker: the worker under test.
        sequences: request id -> prompt and true continuation, long enough for every draft.
        accept: (request id, position of the last emitted token) -> drafts to make right, 0..K.
        on_drafts: called with request id, the prefix (last emitted token included), the worker's
            own choice at each depth, the scripted drafts, the request's row and the attention
            metadata.
    """

    def __init__(self, worker, sequences, accept, on_drafts=None) -> None:
        super().__init__()
        self.worker = worker
        self.sequences = sequences
        self.accept = accept
        self.on_drafts = on_drafts
        self._own: list[torch.Tensor] = []
        self._scripts: dict[int, list[int]] = {}
        self._step: dict = {}
        verify = worker.verifier.verify

        def verify_and_plan(*args, **kwargs):
            accepted = verify(*args, **kwargs)
            self._plan(accepted.num_accepted)
            return accepted

        def propose(step, accepted, logits, place):  # noqa: ARG001 - as the worker calls it
            own = worker.draft_sampler(logits)
            self._own.append(own)
            drafts = own.clone()
            for row, script in self._scripts.items():
                drafts[row] = script[place.column]
            place.write(drafts)

        worker.verifier.verify = verify_and_plan
        worker._propose = propose

    @property
    def max_draft_len(self) -> int:
        return self.worker.max_draft_len

    def forward(self, **kwargs):
        self._step, self._own, self._scripts = kwargs, [], {}
        self._lengths: dict[int, int] = {}
        outputs = self.worker(**kwargs)
        ids = list(kwargs["spec_metadata"].request_ids)
        for row, script in self._scripts.items():
            assert outputs["next_draft_tokens"][row].tolist() == script
            if self.on_drafts is not None:
                prefix = tuple(self.sequences[ids[row]][: self._lengths[row] + 1])
                own = [int(drafts[row]) for drafts in self._own]
                self.on_drafts(ids[row], prefix, own, script, row, kwargs["attn_metadata"])
        return outputs

    def _plan(self, num_accepted: torch.Tensor) -> None:
        """Script every request that emitted something and goes on."""
        attention, spec = self._step["attn_metadata"], self._step["spec_metadata"]
        positions = self._step["position_ids"].reshape(-1)
        k, row_start = self.max_draft_len, 0
        if spec.runtime_draft_len is not None:
            k = spec.runtime_draft_len
        for row, request_id in enumerate(list(spec.request_ids)):
            rows = int(attention.seq_lens[row])
            is_context = row < attention.num_contexts
            count = int(num_accepted[row])
            first, last = int(positions[row_start]), int(positions[row_start + rows - 1])
            row_start += rows
            length = last + 1 if is_context else first + count  # tokens with final KV
            sequence = self.sequences.get(request_id, [])
            if count == 0 or length + 1 + k > len(sequence):
                continue
            right = self.accept(request_id, length)
            true = sequence[length + 1 : length + 1 + k]
            self._lengths[row] = length
            self._scripts[row] = [t if i < right else (t + 1) % 7 for i, t in enumerate(true)]
