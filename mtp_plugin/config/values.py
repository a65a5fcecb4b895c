"""Types of the values under the keys, for keys that take more than one form or have a limit.

A tag selects the form that was meant, so that an error message covers only that form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from mtp_plugin.config.messages import got, join
from mtp_plugin.verifications import METHODS, codes, custom_codes, is_custom

MAX_DRAFT_LEN = 16
MAX_SEED = 2**32 - 1
MAX_THINKING_END = 16
"""Ids that end thinking at most."""
MAX_ENGINE_SEED = 2**64 - 1

MAX_ITEMS = 10_000
"""Items of a list or mapping at most."""

_DIGITS = re.compile(r"[0-9]+\Z")


def _tuple_from_list(value: Any) -> Any:
    return tuple(_bounded(value)) if isinstance(value, (list, tuple)) else value


def _bounded(value: Any) -> Any:
    """A list or mapping that is worth a look at each item."""
    if len(value) > MAX_ITEMS:
        problem = f"expected at most {MAX_ITEMS} items, got {len(value)}"
        raise PydanticCustomError("problems", "problems", {"problems": [("", problem)]})
    return value


def _int_keys(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    # JSON knows text keys only
    by_int = {
        int(k) if isinstance(k, str) and _DIGITS.match(k) else k: v
        for k, v in _bounded(value).items()
    }
    return by_int if len(by_int) == len(value) else value


PositiveInt = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0, le=1)]
Rates = Annotated[tuple[Rate, ...], BeforeValidator(_tuple_from_list)]


def _rate_tag(value: Any) -> str | None:
    """Whether one rate is meant or a list of them; None: neither."""
    if isinstance(value, (list, tuple)):
        return "<list>"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return "<number>" if is_number else None


SyntheticAcceptance = Annotated[
    Annotated[Rate, Tag("<number>")] | Annotated[Rates, Tag("<list>")], Discriminator(_rate_tag)
]


def _verification_tag(value: Any) -> str:
    """Distinguish one verification method from a list of them."""
    return "<methods>" if isinstance(value, (list, tuple)) else "<method>"


def _known_method(names: Mapping[str, Any]) -> WrapValidator:
    """Accept methods registered from outside the package in addition to ``names``."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if not isinstance(value, str) or value in names:
            return handler(value)
        if is_custom(value):
            return value
        known = join([*names, *custom_codes()])
        problem = f"expected one of {known}, got {got(value)}"
        raise PydanticCustomError("problems", "problems", {"problems": [("", problem)]})

    return WrapValidator(check)


_AS_TEXT = PlainSerializer(str)  # the literal's serializer warns of registered names

if TYPE_CHECKING:
    _AnyMethod: TypeAlias = str
    _RequestedMethod: TypeAlias = str
else:  # a checker cannot read the names off a table
    _AnyMethod, _RequestedMethod = Literal[tuple(METHODS)], Literal[tuple(codes())]

Verification = Annotated[
    Annotated[_AnyMethod, _known_method(METHODS), _AS_TEXT, Tag("<method>")]
    | Annotated[
        tuple[Annotated[_RequestedMethod, _known_method(codes()), _AS_TEXT], ...],
        BeforeValidator(_tuple_from_list),
        Tag("<methods>"),
    ],
    Discriminator(_verification_tag),
]


def _switch_tag(value: Any) -> str | None:
    """Whether a switch is set or left to the machine; None: neither."""
    if isinstance(value, bool):
        return "<flag>"
    return "<auto>" if isinstance(value, str) and value == "auto" else None


Switch = Annotated[
    Annotated[Literal["auto"], Tag("<auto>")] | Annotated[bool, Tag("<flag>")],
    Discriminator(_switch_tag),
]


def _ids_tag(value: Any) -> str | None:
    """Whether ids are counted or listed in a file; None: neither."""
    if isinstance(value, int) and not isinstance(value, bool):
        return "<count>"
    return "<path>" if isinstance(value, str) else None


Text = Annotated[str, Field(min_length=1)]
DraftVocab = Annotated[
    Annotated[PositiveInt, Tag("<count>")] | Annotated[Text, Tag("<path>")],
    Discriminator(_ids_tag),
]
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_tuple_from_list)]
BatchSizes = Annotated[tuple[PositiveInt, ...], BeforeValidator(_tuple_from_list)]
DraftLenSchedule = Annotated[
    dict[PositiveInt, Annotated[int, Field(ge=0, le=MAX_DRAFT_LEN)]], BeforeValidator(_int_keys)
]
