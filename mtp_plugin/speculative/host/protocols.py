"""Protocols of a host engine's objects; names follow TensorRT-LLM's PyTorch executor.

Attributes that only some host engines have are optional: the docstrings list them, and the other
modules of this package read them with a default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from mtp_plugin.speculative.step_output import StepResult


class SpecRequest(Protocol):
    """A request as samplers and resource managers use it.

    The id is an integer. States are compared by name: ``CONTEXT_INIT`` means that the prompt has to
    be processed (again), ``GENERATION_COMPLETE`` that the request has finished; results for
    requests in these states are dropped.

    Optional attributes:

    - ``facts``: a `RequestFacts`. Without it the host's fields are read (`read_request`), and the
      plugin caches on the request: the result as ``py_mtp_facts``, whether it needs more than
      greedy decoding as ``py_mtp_needs_sampling``, why it cannot be served as ``py_mtp_refused``.
    - ``seq_slot``: used if there is no ``py_seq_slot``.
    - ``py_epoch``: int, increases with every preemption.
    - ``py_num_drafted``: number of drafts in the current step; the default is the number of
      ``py_draft_tokens``, at most ``py_draft_tokens_effective_len``.
    - ``is_last_context_chunk`` (bool), ``context_current_position``, ``context_chunk_size`` and
      ``get_token(beam, position)``: the scheduled prompt chunk.
    - ``py_disable_speculative_decoding`` and ``is_finished``: bool.
    - ``take_back_tokens(count)``: removes the last tokens; required for a ``stop_callback`` that
      stops before the last token of a step.
    - ``py_draft_state``: a ``DraftState``, one per request, if the plugin chooses draft lengths.

    The sampler writes ``py_error`` (str) on a request that it ends with an error, and the number of
    verified drafts of a step to ``py_num_draft_tokens_verified`` if the request has it.
    """

    request_id: int
    py_seq_slot: int | None
    state: Any
    py_error: str | None
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
    """The requests of one step, contexts before generations.

    Optional: ``context_requests_chunking``, the leading contexts whose chunks do not end their
    prompts.
    """

    @property
    def context_requests(self) -> Sequence[Any]: ...

    @property
    def generation_requests(self) -> Sequence[Any]: ...

    def all_requests(self) -> Sequence[Any]: ...


class AttentionMetadata(Protocol):
    """The attention-metadata fields that a worker reads or changes.

    Optional, used if present:

    - ``kv_lens_cuda`` [R] int32.
    - ``kv_cache_params.num_cached_tokens_per_seq``: prompts of vanilla MTP need it; without it the
      lengths are read back from ``kv_lens_cuda``.
    - ``host_request_types`` [R], ``prompt_lens_cpu`` and ``prompt_lens_cuda`` [R] (query rows of
      contexts), and the same names with the suffix ``_runtime`` for views of the step's rows.
    - ``kv_cache_manager``: None without a KV cache; contexts then remain contexts in every pass.
    - ``use_spec_decoding``: kernels with K+1 query rows per generation.
    - ``enable_flash_mla`` with ``block_ids_per_seq`` (block tables of generations) and
      ``kv_block_ids_per_seq`` (of all requests, in batch order).
    - ``update_for_spec_dec()``: called after every change of lengths for passes with one row per
      request; ``on_update_kv_lens()``: called after every other change.
    - ``all_rank_num_tokens``: rows of the target per rank.
    - ``reads_cached_token_counts``: whether the backend reads the host list in every pass, so that
      the draft loop must change it; the default is True without ``kv_lens_cuda``.
    - ``request_ids``: compared with those of the speculative metadata.
    - ``derived_fields``: attributes that the restore check of the draft loop ignores.
    - ``supports_dead_rows``: whether rows at negative positions (padding) are allowed; otherwise KV
      lengths are at least the number of query rows.
    - ``kv_write_limit`` [R] int32: rows at or after this position write to the sentinel block.
    - ``kv_capacity`` [R] int32: KV rows allocated for the request.
    - ``after_acceptance(num_accepted)``, [R] int32: called between verification and the first draft
      pass; recurrent layers, whose states cannot be truncated, advance them there in place.
    - ``after_verification(accepted, logprob_entries)``: called before the first draft pass with the
      step's `Accepted` tokens, and their log-probabilities [R, K+1, ENTRY_WIDTH] int32 or None.
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
    integers: the flat rows whose states are read. It then returns [N, H], and needs to compute only
    keys and values for the other rows. The argument is not passed to other layers, nor if ranks
    exchange rows (``all_rank_num_tokens``). A layer that names ``spec_metadata`` gets the host
    engine's; one that names ``all_rank_num_tokens`` gets None if ranks exchange no rows. Through
    ``**kwargs`` a layer gets only the names in the worker's ``layer_kwargs``: give it to the
    worker if a wrapper with ``forward(*args, **kwargs)`` hides what the layer names.
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
    """The sampler interface of an executor.

    The executor launches a step, calls ``sample_async`` with its outputs, counts prompt chunks as
    processed (``context_remaining_length`` decreases), and calls ``update_requests``, at once or a
    step later, to append the tokens. ``update_requests`` returns results in batch order, without
    those of requests that were freed meanwhile. ``SampleState`` is the class that ``sample_async``
    returns.
    """

    SampleState: ClassVar[Any]

    def sample_async(self, scheduled_requests: Any, model_outputs: dict[str, Any]) -> Any: ...

    def update_requests(self, state: Any) -> Sequence[StepResult]: ...
