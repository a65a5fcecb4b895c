"""What the API versions of TensorRT-LLM do differently, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """One API version of the host."""

    name: str
    is_newer: bool
    """1.3: scheduled contexts are two lists, those of unfinished prompts first; a sample state has
    ``requests`` instead of ``scheduled_requests``; metadata and state have the draft length of a
    step, and padding dummies come one per draft length; eagle has the metadata of Eagle3; the
    worker is called with ``resource_manager=``; metadata receives the requests of the step."""
    is_newest: bool
    """1.3b: metadata of eagle gets the token after each prompt chunk; no mode has two models;
    sampling options of a request are numbers, not lists of one."""
    writes_layers_to: str
    """The field of the config that takes the checkpoint's number of MTP layers."""


_LAYERS = "num_nextn_predict_layers"
LINES = {
    line.name: line
    for line in (
        Line("1.2", False, False, f"{_LAYERS}_from_model_config"),
        Line("1.3a", True, False, _LAYERS),
        Line("1.3b", True, True, _LAYERS),
    )
}
FULL = ("1.2", "1.3b")
"""The oldest and the newest: run in whole loops. The other's signatures are checked, and that the
plugin is installed into it."""
