"""TensorRT-LLM spec metadata, extended by what our components read of a step."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from mtp_plugin.ops.step import SamplingKind
from mtp_plugin.speculative.host import STATES_POOL, TOKENS_POOL
from mtp_plugin.speculative.metadata import MTPSpecMetadata, SlotPointers


class MetadataBody:
    """Mixin for the host's metadata object that also prepares ours.

    ``mtp_plugin`` is ours: it finds the slots of the step's requests. The host's part is prepared
    without a manager; pointers into pools are computed when they are read.
    """

    mtp_plugin: MTPSpecMetadata
    mtp_plugin_greedy_key: bool
    """The host captures separate graphs for greedy batches, keyed by ``is_all_greedy_sample``."""
    request_ids: Any
    num_generations: int
    num_tokens: int
    is_cuda_graph: bool
    is_all_greedy_sample: bool = True
    group_all_greedy_sample: bool | None = None
    _force_non_greedy_for_capture: bool = False
    mtp_hidden_states_ptrs: Any = SlotPointers(STATES_POOL)
    mtp_past_tokens_ptrs: Any = SlotPointers(TOKENS_POOL)

    def prepare(self) -> None:
        """Prepare both metadata objects, once per forward.

        Raises:
            MetadataError: a request has no slot, or needs more than the captured step computes.
        """
        own, counted = self.mtp_plugin, self.num_tokens
        self.mtp_hidden_states_manager: Any = None
        super().prepare()  # type: ignore[misc]
        # without a greedy key, a graph must serve every sampling option
        always = self.is_cuda_graph and not self.mtp_plugin_greedy_key
        self.sampling_kind = own.sampling_kind = SamplingKind.PROCESSED if always else None
        own.is_all_greedy_sample = self.is_all_greedy_sample
        own.request_ids = self.request_ids
        own.num_generations = self.num_generations
        own.num_tokens = counted
        own.prepare()
        self.num_tokens = own.num_tokens
        self.mtp_hidden_states_manager = own.mtp_hidden_states_manager
        self.slot_ids = own.slot_ids
        self.max_position = own.max_position
        # 1.3 passes the token that follows each prompt chunk, in a buffer for all requests
        following = getattr(self, "context_prompt_lookahead_tokens", None)
        if following is not None:
            following = following[: len(self.request_ids) - self.num_generations]
        self.next_prompt_tokens = following

    @property
    def prepared_ids(self) -> list[int] | None:
        """Request ids of the last call of :meth:`prepare`; None before the first."""
        return self.mtp_plugin.prepared_ids

    def dp_num_tokens(self) -> int:
        """Rows of this rank's first draft pass; ranks exchange it before they prepare."""
        own = self.mtp_plugin
        own.num_tokens, own.num_generations = self.num_tokens, self.num_generations
        return own.dp_num_tokens()

    def write_padding_onehot_draft_probs(self, *_: Any, **__: Any) -> None:
        """Do nothing: no verification method served here reads draft probabilities."""

    def create_cuda_graph_metadata(self, max_batch_size: int) -> Any:
        """Return the host's metadata for CUDA graphs, with slot buffers of its own."""
        view = super().create_cuda_graph_metadata(max_batch_size)  # type: ignore[misc]
        if view is not self:
            view.mtp_plugin = self.mtp_plugin.create_cuda_graph_metadata(max_batch_size)
            # the host allocates these, but fills them only with its own manager
            view.mtp_hidden_states_ptrs = view.mtp_past_tokens_ptrs = None
        return view

    def update_is_all_greedy_sample(self, requests: Iterable[Any]) -> None:
        """Set whether all requests of the batch are greedy; called before a graph is selected."""
        self.group_all_greedy_sample = None
        self.populate_sampling_params_for_one_model(requests)

    def populate_sampling_params_for_one_model(self, requests: Iterable[Any]) -> None:
        """Like :meth:`update_is_all_greedy_sample`, but use what the ranks agreed on. Sampling
        parameters are read from the slots."""
        own = self.mtp_plugin
        own.group_all_greedy_sample = self.group_all_greedy_sample
        own._force_non_greedy_for_capture = self._force_non_greedy_for_capture
        own.populate_sampling_params_for_one_model(requests)
        self.is_all_greedy_sample = own.is_all_greedy_sample


@cache
def _with_body(base: Any) -> type:
    return type(base.__name__, (MetadataBody, base), {"__module__": base.__module__})


def adopt(metadata: Any, own: MTPSpecMetadata, *, greedy_key: bool) -> Any:
    """Turn the host's metadata object into one that also prepares ours."""
    base: Any = type(metadata)
    metadata.__class__ = _with_body(base)
    metadata.mtp_plugin = own
    metadata.mtp_plugin_greedy_key = greedy_key
    return metadata
