"""Sampling for Megatron's controller that is keyed by seed, request id and token index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from mtp_plugin.errors import HostError, expect
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.sampling import sample_tokens
from mtp_plugin.ops.step import SlotRows, to_device
from mtp_plugin.requests.seeds import seed_words
from mtp_plugin.speculative.state.slot_table import SlotTable, SlotValues


def sampling_class(base: type, kernels: str) -> type:
    """Return a subclass of Megatron's ``TorchSampling`` or ``FlashInferSampling``.

    Log-probabilities and the static batch keep the code of ``base``.
    """
    name = f"Plugin{base.__name__}"
    return type(name, (_PluginSampling, base), {"kernels": kernels, "__module__": __name__})


class _PluginSampling:
    """Overrides the kernels of Megatron's ``Sampling``; for their arguments see there.

    With speculative tokens, the controller calls `sample_speculative` once per step and then
    `sample_kernel` once per MTP layer, without the layer's index: calls are counted.
    """

    kernels: str
    _rng: torch.Generator
    _draft_column = 0
    _slots: SlotRows | None = None
    _slot_cache: _SlotCache | None = None

    def sample_speculative(
        self,
        required_logits: torch.Tensor,
        num_decode: int,
        num_prefill: int,
        num_speculative_tokens: int,
        context: Any,
        *,
        gather_indices: torch.Tensor | None = None,
        eager: bool = False,
        cache_key: Any = None,
    ) -> torch.Tensor:
        """Sample the target tokens [N] of all rows that the step verifies."""
        del eager, cache_key
        device, width = required_logits.device, num_speculative_tokens + 1
        first, lengths = _query_rows(context)
        decode = first[:num_decode].repeat_interleave(width)
        decode = decode + torch.arange(width).repeat(num_decode)
        prefill = (first + lengths - 1)[num_decode : num_decode + num_prefill]
        positions = to_device(torch.cat([decode, prefill]), torch.int64, device)
        requests = torch.arange(num_decode + num_prefill)
        repeats = torch.ones_like(requests)
        repeats[:num_decode] = width
        requests = to_device(requests.repeat_interleave(repeats), torch.int64, device)
        self._slots = self._slots_of(context, device)
        self._draft_column = 0
        logits = _rows(required_logits, positions.shape[0], gather_indices)
        slots = replace(self._slots, slot_ids=self._slots.slot_ids[requests])
        return self._sample(logits, LogitRows.flat(positions), slots)

    def sample_kernel(
        self,
        logits: torch.Tensor,
        n: int,
        context: Any,
        *,
        no_top_k: bool,
        no_top_p: bool,
        gather_indices: torch.Tensor | None = None,
        token_to_request_index: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
        eager: bool = False,
        cache_key: Any = None,
    ) -> torch.Tensor:
        """Sample one token per request: the target's, or a draft if tokens are speculative."""
        del no_top_k, no_top_p, eager, cache_key
        expect(
            token_to_request_index is None,
            HostError,
            "sample_kernel: expected no token_to_request_index, since sample_speculative samples "
            "the rows that are verified",
        )
        first, lengths = _query_rows(context)
        ends = to_device((first + lengths)[:n], torch.int64, logits.device)
        if context.num_speculative_tokens == 0:
            slots, rows = self._slots_of(context, logits.device), LogitRows.flat(ends - 1)
        else:
            expect(
                self._slots is not None,
                HostError,
                "sample_kernel: expected a call of sample_speculative before drafts are sampled",
            )
            # the KV cache was rewound: the last target token is at the end of the sequence
            slots = cast(SlotRows, self._slots)
            rows = LogitRows.flat(ends, self._draft_column)
            self._draft_column += 1
        tokens = self._sample(_rows(logits, n, gather_indices), rows, slots)
        return tokens if output is None else output.copy_(tokens)

    def _sample(self, logits: torch.Tensor, rows: LogitRows, slots: SlotRows) -> torch.Tensor:
        backend = Backend.of(self.kernels, logits.device)
        # a row without finite value gets token 0: Megatron has no way to fail one request
        return sample_tokens(logits, rows, slots, backend=backend).clamp_min(0).to(torch.int64)

    def _slots_of(self, context: Any, device: torch.device) -> SlotRows:
        """Return the options and seeds of the active requests, in the order of the batch."""
        expect(
            str(getattr(context.config.async_sched_mode, "value", "")) == "legacy",
            HostError,
            "install(sampling=True): expected InferenceConfig.async_sched_mode 'legacy', got "
            f"{context.config.async_sched_mode}; its bookkeeping runs ahead of the sampled tokens, "
            "so their indices are not known. Use install() without sampling",
        )
        setting = context.request_ids.shape[0], self._rng.initial_seed(), device
        if self._slot_cache is None or self._slot_cache.setting != setting:
            self._slot_cache = _SlotCache(*setting)
        active = _active(context)
        options = context.active_request_metadata
        values = (
            options[name][: active.stop - active.start].tolist()
            for name in ("temperature", "top_k", "top_p")
        )
        requests = list(zip(context.request_ids[active].tolist(), *values, strict=True))
        return self._slot_cache.rows_of(requests)


def _active(context: Any) -> slice:
    return slice(context.paused_request_count, context.total_request_count)


def _query_rows(context: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first position and the number of query tokens of every active request, on the
    host."""
    active = _active(context)
    return context.request_kv_length_offsets[active], context.request_query_lengths[active]


def _rows(logits: torch.Tensor, n: int, gather_indices: torch.Tensor | None) -> torch.Tensor:
    return logits[:n] if gather_indices is None else logits[gather_indices[:n], :]


_RequestKey = tuple[int, float, int, float]
"""Id, temperature, top_k and top_p of a request."""


class _SlotCache:
    """A slot table in which the row of a request is written once.

    The id and the options of a request determine its row and find it again: Megatron moves, pauses
    and evicts requests between two steps, and may reuse an id with other options.

    Args:
        num_slots: maximum number of requests in a step.
        engine_seed: Megatron's ``inference_sampling_seed``.
    """

    def __init__(self, num_slots: int, engine_seed: int, device: torch.device) -> None:
        self.setting = num_slots, engine_seed, device
        # tensors that are created in inference mode cannot be written outside of it
        with torch.inference_mode(False):
            self._table = SlotTable(num_slots, (), device)
        self._slots: dict[_RequestKey, int] = {}
        self._free = list(range(num_slots))

    def rows_of(self, requests: Sequence[_RequestKey]) -> SlotRows:
        """Return the rows of the requests of a step, after writing those of new ones."""
        new = [request for request in dict.fromkeys(requests) if request not in self._slots]
        if len(new) > len(self._free):
            for gone in self._slots.keys() - set(requests):
                self._free.append(self._slots.pop(gone))
        if new:
            slots = dict(zip(new, self._free, strict=False))
            self._table.write({slot: self._values(request) for request, slot in slots.items()})
            del self._free[: len(slots)]
            self._slots.update(slots)
        slot_ids = [self._slots[request] for request in requests]
        return self._table.rows_of(to_device(slot_ids, torch.int64, self.setting[2]))

    def _values(self, request: _RequestKey) -> SlotValues:
        request_id, temperature, top_k, top_p = request
        return {
            # top_k 1 is greedy in Megatron, top_p 0 is off
            "temperature": 0.0 if top_k == 1 else temperature,
            "top_k": top_k,
            "top_p": top_p or 1.0,
            "seed": seed_words(None, request_id & 0xFFFFFFFF, self.setting[1]),
            "number": request_id & 0x7FFFFFFF,
        }
