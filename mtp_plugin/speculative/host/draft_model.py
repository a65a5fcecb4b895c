"""Read properties of a draft model, its layers and a speculative decoding mode."""

from __future__ import annotations

from functools import cache
from inspect import Parameter, signature
from typing import Any


def takes_output_rows(layer: Any) -> bool:
    """Return whether a draft layer accepts ``output_rows``, see `DraftLayer`."""
    return bool(getattr(layer, "takes_output_rows", False))


def accepted_by(layer: Any, names: tuple[str, ...]) -> frozenset[str]:
    """Return which of these keyword arguments a draft layer accepts; all with ``**kwargs``."""
    kind: Any = type(layer)
    return _accepted_by(kind, names)


@cache
def _accepted_by(kind: Any, names: tuple[str, ...]) -> frozenset[str]:
    called = getattr(kind, "forward", None) or kind.__call__
    try:
        parameters = signature(called).parameters
    except (TypeError, ValueError):  # builtins have no signature
        return frozenset()
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return frozenset(names)
    positional = Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL
    return frozenset(n for n in names if n in parameters and parameters[n].kind not in positional)


def part_of(draft_model: Any, name: str) -> Any:
    """Return a component of the draft model, such as its head; None if it has none."""
    return getattr(draft_model, name, None)


def own_vocabulary(draft_model: Any) -> Any:
    """Return the map from draft to target ids (``d2t``); None if the draft model has the target's
    vocabulary."""
    return getattr(getattr(draft_model, "model", None), "d2t", None)


def is_eagle(mode: Any) -> bool:
    """Return whether one layer drafts all tokens; host engines may have a separate name for the
    one-model variant."""
    names = ("is_mtp_eagle", "is_mtp_eagle_one_model")
    return any(getattr(mode, name)() for name in names if hasattr(mode, name))


def is_vanilla(mode: Any) -> bool:
    """Return whether every draft token has its own layer; older modes are compared by name."""
    check = getattr(mode, "is_mtp_vanilla", None)
    return bool(check()) if check is not None else getattr(mode, "name", None) == "MTP"
