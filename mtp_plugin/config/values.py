"""Types of the values under the keys, for keys that take more than one form or have a limit.

A tag selects the form that was meant, so that an error message covers only that form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, ValidationInfo

from mtp_plugin.config.messages import got, join, problem
from mtp_plugin.errors import INT32_MAX
from mtp_plugin.verifications import METHODS, codes, custom_codes, is_custom

MAX_DRAFT_LEN = 16
MAX_SEED = 2**32 - 1
MAX_THINKING_END = 16
"""Ids that end thinking at most."""
MAX_ENGINE_SEED = 2**64 - 1
MAX_INT = 2**63 - 1
MAX_ITEMS = 10_000
"""Items of a list or mapping at most."""

PositiveInt = Annotated[int, Field(ge=1, le=MAX_INT)]
RelaxedTopK = Annotated[int, Field(ge=1, le=INT32_MAX)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
Text = Annotated[str, Field(min_length=1)]


def resolve_path(path: str, folder: Path) -> str:
    """Return an absolute path: ``~`` is the user's home, a relative path is seen from a folder.

    Raises:
        ValueError: the path is invalid.
    """
    try:
        given = Path(path).expanduser()
        return str(given if given.is_absolute() else (folder / given).resolve())
    except RuntimeError:
        raise problem(f"expected the home of a user, got {Path(path).parts[0]!r}") from None
    except (ValueError, OSError) as error:
        raise problem(f"expected a path, got {got(path)}: {error}") from None


def _in_folder_of_file(path: str, info: ValidationInfo) -> str:
    folder = (info.context or {}).get("folder")
    return path if folder is None else resolve_path(path, folder)


FilePath = Annotated[Text, AfterValidator(_in_folder_of_file)]
"""A path; in a file, relative paths are seen from the file's folder."""
Rate = Annotated[float, Field(ge=0, le=1)]
# strict=False: YAML has lists and no tuples
_List = Field(strict=False, max_length=MAX_ITEMS)
Rates = Annotated[tuple[Rate, ...], _List]
BatchSizes = Annotated[tuple[PositiveInt, ...], _List]
ThinkingEnd = Annotated[
    tuple[TokenId, ...], Field(strict=False, min_length=1, max_length=MAX_THINKING_END)
]


def _int_from_text(key: Any) -> Any:
    """Convert a key of JSON, which knows text keys only."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key


DraftLenSchedule = Annotated[
    dict[
        Annotated[PositiveInt, BeforeValidator(_int_from_text)],
        Annotated[int, Field(ge=0, le=MAX_DRAFT_LEN)],
    ],
    Field(min_length=1, max_length=MAX_ITEMS),
]


def _form(tag_of: Callable[[Any], str | None], expected: str) -> Discriminator:
    """Select a form by its tag; None: no form, ``expected`` describes all of them."""
    return Discriminator(
        tag_of, custom_error_type="form", custom_error_message=f"Input should be {expected}"
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_number(value: Any, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


SyntheticAcceptance = Annotated[
    Annotated[Rate, Tag("<number>")] | Annotated[Rates, Tag("<list>")],
    _form(
        lambda v: "<list>" if _is_list(v) else "<number>" if _is_number(v, int, float) else None,
        "a number from 0 to 1 or a list of them",
    ),
]
Switch = Literal["auto", True, False]
DraftVocab = Annotated[
    Annotated[PositiveInt, Tag("<count>")] | Annotated[FilePath, Tag("<path>")],
    _form(
        lambda v: "<path>" if isinstance(v, str) else "<count>" if _is_number(v, int) else None,
        "a number of token ids or the path of a list",
    ),
]


def _known_method(names: Iterable[str]) -> AfterValidator:
    """Accept methods registered from outside the package in addition to ``names``."""

    def check(value: str) -> str:
        if value in names or is_custom(value):
            return value
        known = join([*names, *custom_codes()])
        raise problem(f"expected one of {known}, got {got(value)}")

    return AfterValidator(check)


Verification = Annotated[
    Annotated[str, _known_method(METHODS), Tag("<method>")]
    | Annotated[
        tuple[Annotated[str, _known_method(tuple(codes()))], ...],
        Field(strict=False, min_length=1, max_length=MAX_ITEMS),
        Tag("<methods>"),
    ],
    Discriminator(lambda value: "<methods>" if _is_list(value) else "<method>"),
]
