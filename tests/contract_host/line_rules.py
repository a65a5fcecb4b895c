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
    is_newer: bool
    """1.3: scheduled contexts are two lists, those of unfinished prompts first; a sample state has
    ``requests`` instead of ``scheduled_requests``; metadata and state have the draft length of a
    step, and padding dummies come one per draft length; eagle has the metadata of Eagle3, whose
    manager is ``spec_resource_manager``; the worker is called with ``resource_manager=``; every
    metadata receives the requests of the step. Before that only the metadata of Eagle3 is."""
    is_newest: bool
    """1.3b: metadata of eagle gets the token after each prompt chunk; no mode has two models;
    sampling options of a request are numbers, not lists of one."""
    writes_layers_to: str
    """The field of the config that takes the checkpoint's number of MTP layers."""
    updates_before_sampling: bool = True
    """Overlap: ``update_requests`` of the last step comes before ``sample_async`` of this one."""


LINES = {
    line.name: line
    for line in (
        Line(
            "1.2",
            implements="forward",
            is_newer=False,
            is_newest=False,
            writes_layers_to="num_nextn_predict_layers_from_model_config",
        ),
        Line(
            "1.3a",
            implements="_forward_impl",
            is_newer=True,
            is_newest=False,
            writes_layers_to="num_nextn_predict_layers",
        ),
        Line(
            "1.3b",
            implements="_forward_impl",
            is_newer=True,
            is_newest=True,
            writes_layers_to="num_nextn_predict_layers",
        ),
    )
}
FULL = ("1.2", "1.3b")
"""The oldest and the newest: run in whole loops. The other's signatures are checked, and that the
plugin is installed into it."""
