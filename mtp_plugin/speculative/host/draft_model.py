"""Read properties of a draft model, its layers and a speculative decoding mode."""

from __future__ import annotations

from functools import cache
from inspect import Parameter, signature
from typing import Any


def takes_output_rows(layer: Any) -> bool:
    """Return whether a draft layer accepts ``output_rows``, see `DraftLayer`."""
    return bool(getattr(layer, "takes_output_rows", False))


def accepted_by(
    layer: Any, names: tuple[str, ...], through_kwargs: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Return which of these keyword arguments to pass to a draft layer.

    These are the ones that it names. A layer may pass its ``**kwargs`` on to attention that takes
    no further argument, so it receives only the names in ``through_kwargs`` that way.
    """
    kind: Any = type(layer)
    return _accepted_by(kind, names, through_kwargs)


@cache
def _accepted_by(
    kind: Any, names: tuple[str, ...], through_kwargs: frozenset[str]
) -> frozenset[str]:
    called = getattr(kind, "forward", None) or kind.__call__
    try:
        parameters = signature(called).parameters
    except (TypeError, ValueError):  # builtins have no signature
        return frozenset()
    keyword = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
    named = frozenset(name for name, each in parameters.items() if each.kind in keyword)
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()):
        named |= through_kwargs
    return named.intersection(names)


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
