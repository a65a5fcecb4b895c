"""A host's spec metadata, with what our pieces read of a step."""

from __future__ import annotations

from functools import cache
from typing import Any

from mtp_plugin.speculative.metadata import MTPSpecMetadata


class MetadataBody:
    """The host's own metadata object, whose steps are prepared for our pieces too.

    ``mtp_plugin`` is ours: it fills the slots of the step's requests, and knows what they ask for.
    The host's part is prepared as if there was no manager: its pointers into pools are not needed.
    """

    mtp_plugin: MTPSpecMetadata
    mtp_plugin_greedy_key: bool
    """The host captures greedy steps apart from others, by ``is_all_greedy_sample``."""
    request_ids: Any
    num_generations: int
    num_tokens: int
    is_cuda_graph: bool

    def prepare(self) -> None:
        """Once a forward, as the host's.

        Raises:
            MetadataError: a request without a slot.
        """
        own = self.mtp_plugin
        self.mtp_hidden_states_manager: Any = None
        counted = self.num_tokens
        super().prepare()  # type: ignore[misc]
        own.request_ids = self.request_ids
        own.num_generations = self.num_generations
        own.num_tokens = counted
        own.prepare()
        self.num_tokens = own.num_tokens
        self.mtp_hidden_states_manager = own.mtp_hidden_states_manager
        self.slot_ids = own.slot_ids
        self.max_position = own.max_position
        # 1.3 tells the token behind a prompt chunk, by a name of its own
        self.next_prompt_tokens = getattr(self, "context_prompt_lookahead_tokens", None)
        self.edits_logits = own.edits_logits
        self.only_draws = own.only_draws
        if self.is_cuda_graph:
            # a graph holds what its capture asked for, and is replayed for whoever comes
            self.edits_logits = not (self.mtp_plugin_greedy_key and own.is_all_greedy_sample)
            self.only_draws = False

    def create_cuda_graph_metadata(self, max_batch_size: int) -> Any:
        """As the host's, with slots of its own."""
        view = super().create_cuda_graph_metadata(max_batch_size)  # type: ignore[misc]
        if view is not self:
            view.mtp_plugin = self.mtp_plugin.create_cuda_graph_metadata(max_batch_size)
        return view

    def populate_sampling_params_for_one_model(self, requests: Any) -> None:
        """Nothing: draws read what the slots say."""

    def update_is_all_greedy_sample(self, requests: Any) -> None:
        """Whether no request of the batch asks for more than first choices."""
        self.mtp_plugin.update_is_all_greedy_sample(requests)
        self.is_all_greedy_sample = self.mtp_plugin.is_all_greedy_sample


@cache
def _with_body(base: Any) -> type:
    return type(base.__name__, (MetadataBody, base), {"__module__": base.__module__})


def adopt(metadata: Any, own: MTPSpecMetadata, *, greedy_key: bool) -> Any:
    """The host's metadata object, prepared for our pieces from now on."""
    metadata.__class__ = _with_body(type(metadata))
    metadata.mtp_plugin = own
    metadata.mtp_plugin_greedy_key = greedy_key
    if getattr(metadata, "use_rejection_sampling", False):
        metadata.use_rejection_sampling = False  # the probabilities of drafts are the manager's
    return metadata
