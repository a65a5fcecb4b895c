"""What the plugin asks of a host: requests, scheduled batches, attention metadata, draft layers.

Names follow TensorRT-LLM's PyTorch executor, so that its objects satisfy these protocols as they
are. Attributes that only some hosts have are optional and read with a default; they are listed in
the docstrings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from mtp_plugin.errors import ConfigError, MetadataError
from mtp_plugin.speculative.step import StepLayout


class SpecRequest(Protocol):
    """A request as samplers and resource managers see it.

    Optional attributes: ``py_epoch`` (int, grows with every preemption), ``py_stop_ids`` (further
    end ids), ``py_stop_criterion`` (callable without arguments that answers True when the text so
    far contains a stop string), ``py_stop_words_list`` (words of one token count as stop ids),
    ``end_id``, ``py_acceptance`` (an ``AcceptanceStats`` of :mod:`mtp_plugin.speculative.metrics`),
    ``py_draft_state`` (a ``DraftState`` of :mod:`mtp_plugin.speculative.draft_length`),
    ``is_dummy``. The sampler writes ``py_error`` (str) into a request that it ends with an error.
    """

    request_id: int
    py_seq_slot: int | None
    state: Any
    py_end_id: int | None
    py_max_new_tokens: int
    py_orig_prompt_len: int
    py_draft_tokens: list[int]
    py_rewind_len: int
    py_num_accepted_draft_tokens: int
    py_decoding_iter: int

    @property
    def is_first_context_chunk(self) -> bool: ...

    @property
    def context_remaining_length(self) -> int: ...

    def get_tokens(self, beam: int) -> list[int]: ...

    def get_num_tokens(self, beam: int) -> int: ...

    def add_new_token(self, token: int, beam: int) -> Any: ...

    def finish_by(self, reason: Any, beam: int) -> Any: ...


class ScheduledBatch(Protocol):
    """The requests of one step, contexts before generations."""

    @property
    def context_requests(self) -> Sequence[Any]: ...

    @property
    def generation_requests(self) -> Sequence[Any]: ...

    def all_requests(self) -> Sequence[Any]: ...


class AttentionMetadata(Protocol):
    """The fields of a host's attention metadata that a worker reads or changes.

    Optional, used where present: ``kv_lens_cuda`` [R] int32,
    ``kv_cache_params.num_cached_tokens_per_seq``, ``host_request_types`` [R], of these tensors the
    views ``kv_lens_cuda_runtime`` and ``host_request_types_runtime``,
    ``update_for_spec_dec()``, ``on_update_kv_lens()``, and three of the
    embedded executor: ``supports_dead_rows`` (rows at negative positions are legal; elsewhere KV
    lengths are clamped to the query rows), ``kv_write_limit`` [R] int32 (rows at or past it write
    to the sentinel block), ``kv_capacity`` [R] int32 (rows that the request has reserved),
    ``reads_cached_token_counts`` (the backend reads the host list, so the draft loop must change
    it). ``after_acceptance(num_accepted)`` [R] int32 is called between verification and the first
    draft pass: states that cannot be cut back, as those of recurrent layers, move on there.
    """

    _seq_lens: torch.Tensor
    _seq_lens_cuda: torch.Tensor
    num_contexts: int
    is_cuda_graph: bool

    @property
    def num_seqs(self) -> int: ...

    @property
    def num_generations(self) -> int: ...

    @property
    def num_ctx_tokens(self) -> int: ...

    @property
    def seq_lens_cuda(self) -> torch.Tensor: ...

    def on_update(self) -> None: ...


class DraftLayer(Protocol):
    """One MTP layer of a checkpoint.

    A layer with a true attribute ``takes_output_rows`` may be called with ``output_rows`` [N]
    integers: the flat rows whose states are read. It then returns [N, H], and of the other rows
    only keys and values need to be computed. No other layer sees that argument, and none does
    where ranks exchange rows (``all_rank_num_tokens``).
    """

    def __call__(
        self,
        *,
        embed_tokens: Any,
        input_ids: torch.Tensor,  # [T]
        position_ids: torch.Tensor,  # [1, T]
        hidden_states: torch.Tensor,  # [T, H]
        attn_metadata: Any,
        **kwargs: Any,
    ) -> torch.Tensor: ...  # [T, H]

    def shared_head(self, *args: Any, **kwargs: Any) -> torch.Tensor: ...


@runtime_checkable
class ResourceManager(Protocol):
    """TensorRT-LLM's ``BaseResourceManager``, duck-typed."""

    def get_max_resource_count(self) -> int: ...

    def get_needed_resource_to_completion(self, request: Any) -> int: ...

    def add_dummy_requests(self, request_ids: Sequence[int]) -> None: ...

    def prepare_resources(self, scheduled_batch: Any) -> None: ...

    def update_resources(self, scheduled_batch: Any) -> None: ...

    def free_resources(self, request: Any) -> None: ...

    def shutdown(self) -> None: ...


class Sampler(Protocol):
    """What an executor asks of a sampler; ``SampleState`` is the class of what ``sample_async``
    returns."""

    SampleState: ClassVar[Any]

    def sample_async(self, scheduled_requests: Any, model_outputs: dict[str, Any]) -> Any: ...

    def update_requests(self, state: Any) -> None: ...


def read_step_draft_len(spec_metadata: Any, max_draft_len: int) -> int:
    """K of this step: ``runtime_draft_len`` of the host's metadata, or ``max_draft_len``.

    Raises:
        MetadataError: more than the pieces were built for, or less than none.
    """
    chosen = getattr(spec_metadata, "runtime_draft_len", None)
    if chosen is None:
        return max_draft_len
    if not 0 <= chosen <= max_draft_len:
        raise MetadataError(
            f"runtime_draft_len: expected 0 to max_draft_len ({max_draft_len}), got {chosen}"
        )
    return int(chosen)


def read_layout(
    attn_metadata: Any,
    spec_metadata: Any,
    max_draft_len: int,
    positions: torch.Tensor | None = None,
) -> StepLayout:
    """The shape of a step, from a host's metadata.

    Args:
        max_draft_len: K where the host chooses none. positions: [T], where the caller has them.

    Raises:
        MetadataError: a draft length that cannot be.
        TensorContractError: counts and tensors that do not fit each other.
    """
    contexts = int(attn_metadata.num_contexts)
    chunk_lens = tuple(attn_metadata._seq_lens[:contexts].tolist()) if contexts else ()
    generations = int(attn_metadata.num_seqs) - contexts
    draft_len = read_step_draft_len(spec_metadata, max_draft_len)
    if positions is not None:
        expected = sum(chunk_lens) + generations * (draft_len + 1)
        if positions.shape[0] != expected:
            asked = getattr(spec_metadata, "runtime_draft_len", None)
            raise MetadataError(
                f"step: expected T = {expected} rows, {sum(chunk_lens)} of prompts and K+1 = "
                f"{draft_len + 1} for each of {generations} generations (runtime_draft_len: "
                f"{asked}), got {positions.shape[0]}"
            )
    return StepLayout(
        chunk_lens=chunk_lens,
        num_generations=generations,
        draft_len=draft_len,
        context_lens=attn_metadata.seq_lens_cuda[:contexts],
        positions=positions,
    )


def read_final_context(spec_metadata: Any, layout: StepLayout) -> torch.Tensor | None:
    """Which chunks end their prompt [C] bool; None: all do, or there are none."""
    next_prompt = getattr(spec_metadata, "next_prompt_tokens", None)
    if next_prompt is None or layout.num_contexts == 0:
        return None
    final: torch.Tensor = next_prompt[: layout.num_contexts] < 0
    return final


def read_slots(spec_metadata: Any, layout: StepLayout) -> tuple[Any, torch.Tensor]:
    """The host's MTP manager, and the requests' rows in its pools [R] int64.

    Raises:
        MetadataError: the host gave one of them not.
    """
    manager = getattr(spec_metadata, "mtp_hidden_states_manager", None)
    if manager is None:
        raise MetadataError("this step needs spec_metadata.mtp_hidden_states_manager, got None")
    if spec_metadata.slot_ids is None:
        raise MetadataError("this step needs spec_metadata.slot_ids: call prepare() first")
    return manager, spec_metadata.slot_ids[: layout.num_requests]


def refuse_unserved(piece: str, arguments: Mapping[str, Any]) -> None:
    """Refuse what a host hands to a constructor and this version does not serve.

    Hosts of several versions pass arguments of their own. None, False, 0 and what is empty ask for
    nothing, and so does a ``mapping`` of one rank.

    Raises:
        ConfigError: naming every other argument and its value.
    """
    asked = [
        f"{name}={value!r}"
        for name, value in arguments.items()
        if not (_is_nothing(value) or (name == "mapping" and num_ranks(value) == 1))
    ]
    if asked:
        raise ConfigError(f"{piece}: not served in this version: {', '.join(asked)}")


def num_ranks(mapping: Any) -> int | None:
    """Ranks of a host's mapping: its ``world_size``, else the product of its parallel sizes; None
    where it tells neither."""
    world = getattr(mapping, "world_size", None)
    if world is not None:
        return int(world)
    sizes = [getattr(mapping, name, None) for name in ("tp_size", "pp_size", "cp_size")]
    told = [size for size in sizes if size is not None]
    return math.prod(told) if told else None


def _is_nothing(value: Any) -> bool:
    plain = (bool, int, float, str, bytes, list, tuple, dict, set)
    return value is None or (isinstance(value, plain) and not value)
