"""What the lines of TensorRT-LLM do differently, as data; sources: the contracts, sections 1-5."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """One line of the host."""

    name: str
    implements: str
    """The method of a worker that a subclass writes: ``forward``, or ``_forward_impl`` where the
    base keeps ``forward`` to itself."""
    splits_contexts: bool
    """Scheduled contexts are two lists, those of unfinished prompts first."""
    state_lists_requests: bool
    """A sample state has ``requests``; else ``scheduled_requests``."""
    tells_draft_len: bool
    """``runtime_draft_len`` of a step stands in metadata and state; dummies come one per length."""
    tells_seq_slots: bool
    """``get_spec_metadata`` is told ``max_seq_len`` and ``num_seq_slots``."""
    sampler_takes: str
    """What ``get_spec_decoder`` builds samplers with: ``nextn`` or ``args``."""
    outputs_name: str
    """Of the second parameter of ``sample_async``."""
    worker_gets_managers: bool
    """The worker is called with ``resource_manager=``."""
    sampling_gets_managers: bool
    """``sample_async`` is called with ``resource_manager=``."""
    shares_eagle_classes: bool
    """Eagle has the metadata and manager classes of Eagle3, their manager ``spec_resource_manager``."""
    eagle_loop_rows: bool
    """KV rows are reserved for what the eagle loop writes behind a step's own rows."""
    updates_before_sampling: bool = True
    """Overlap: ``update_requests`` of the last step comes before ``sample_async`` of this one."""


LINES = {
    line.name: line
    for line in (
        Line(
            "1.2",
            implements="forward",
            splits_contexts=False,
            state_lists_requests=False,
            tells_draft_len=False,
            tells_seq_slots=False,
            sampler_takes="nextn",
            outputs_name="model_outputs",
            worker_gets_managers=False,
            sampling_gets_managers=False,
            shares_eagle_classes=False,
            eagle_loop_rows=False,
        ),
        Line(
            "1.3a",
            implements="_forward_impl",
            splits_contexts=True,
            state_lists_requests=True,
            tells_draft_len=True,
            tells_seq_slots=False,
            sampler_takes="nextn",
            outputs_name="outputs",
            worker_gets_managers=True,
            sampling_gets_managers=True,
            shares_eagle_classes=True,
            eagle_loop_rows=True,
        ),
        Line(
            "1.3b",
            implements="_forward_impl",
            splits_contexts=True,
            state_lists_requests=True,
            tells_draft_len=True,
            tells_seq_slots=True,
            sampler_takes="args",
            outputs_name="outputs",
            worker_gets_managers=True,
            sampling_gets_managers=False,
            shares_eagle_classes=True,
            eagle_loop_rows=True,
        ),
    )
}
