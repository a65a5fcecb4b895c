"""What the plugin asks of a host's objects; names follow TensorRT-LLM's PyTorch executor.

Attributes that only some hosts have are optional: they are listed in the docstrings, and read with
a default in the files beside this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from mtp_plugin.speculative.step import StepResult


class SpecRequest(Protocol):
    """A request as samplers and resource managers see it.

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
    - ``take_back_tokens(count)``: removes the last tokens; needed by a ``stop_callback`` that cuts
      inside a run.
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

    Optional: ``context_requests_chunking``, the first of the contexts, whose chunks do not end
    their prompts.
    """

    @property
    def context_requests(self) -> Sequence[Any]: ...

    @property
    def generation_requests(self) -> Sequence[Any]: ...

    def all_requests(self) -> Sequence[Any]: ...


class AttentionMetadata(Protocol):
    """The fields of a host's attention metadata that a worker reads or changes.

    Optional, used where present: ``kv_lens_cuda`` [R] int32,
    ``kv_cache_params.num_cached_tokens_per_seq`` (prompts of vanilla MTP need it, or wait for the
    device to tell ``kv_lens_cuda``), ``host_request_types`` [R], ``prompt_lens_cpu``
    and ``prompt_lens_cuda`` [R] (query rows of contexts), of these tensors the views of the step's
    rows, under the same names with ``_runtime`` behind; ``use_spec_decoding`` (kernels of K+1 query
    rows per generation); ``enable_flash_mla`` with ``block_ids_per_seq`` (tables of generations)
    and ``kv_block_ids_per_seq`` (of all requests in the batch's order); ``update_for_spec_dec()``,
    called after every change of lengths for passes of one row per request, and
    ``on_update_kv_lens()``, called after every other one; ``all_rank_num_tokens`` (rows of the
    target per rank). ``reads_cached_token_counts`` says whether the backend reads the host list in
    every pass, so that the draft loop must change it; without it, a host without ``kv_lens_cuda``
    does. ``request_ids`` are compared with those of the speculative metadata. ``derived_fields``
    names attributes that the check of a draft loop's traces leaves out. Three more are the embedded
    executor's: ``supports_dead_rows`` (rows at negative positions
    are legal; elsewhere KV lengths are clamped to the query rows), ``kv_write_limit`` [R] int32
    (rows at or past it write to the sentinel block), ``kv_capacity`` [R] int32 (rows that the
    request has reserved). ``after_acceptance(num_accepted)`` [R] int32 is called between
    verification and the first draft pass: states that cannot be cut back, as those of recurrent
    layers, move on there, in place.
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
    where ranks exchange rows (``all_rank_num_tokens``). A layer that takes ``spec_metadata`` is
    given the host's; one that takes ``all_rank_num_tokens`` gets None where ranks exchange none.
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
    returns.

    A step is launched, ``sample_async`` takes its outputs, prompt chunks count as read
    (``context_remaining_length`` falls), and at once or a step later ``update_requests`` fills the
    requests. What it returns is in the batch's order, without results that came too late.
    """

    SampleState: ClassVar[Any]

    def sample_async(self, scheduled_requests: Any, model_outputs: dict[str, Any]) -> Any: ...

    def update_requests(self, state: Any) -> Sequence[StepResult]: ...
