"""Build request options from command-line arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtp_plugin.config.loading import parse_yaml
from mtp_plugin.errors import ConfigError, RequestError, expect, format_value
from mtp_plugin.requests.options import OPTIONS, SamplingParams


def sampling_params(
    flags: Mapping[str, Any],
    others: Sequence[str] = (),
    *,
    presumed: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """Build the options of a request.

    Args:
        flags: options that have a flag, by name; None: not given.
        others: any options as ``NAME=VALUE``, with the value in YAML syntax.
        presumed: defaults of options that are not given under any of their names.

    Raises:
        RequestError: an option has the wrong form or is given twice; or as for `SamplingParams`.
    """
    flags = {name: value for name, value in flags.items() if value is not None}
    values: dict[str, Any] = {}
    for text in others:
        name, equals, value = text.partition("=")
        expect(
            bool(name and equals),
            RequestError,
            f"--option: expected NAME=VALUE, got {format_value(text)}",
        )
        expect(name not in flags, RequestError, f"--option: {name} is given by its flag, too")
        expect(name not in values, RequestError, f"--option: {format_value(name)} is given twice")
        try:
            values[name] = parse_yaml(value, f"--option: {format_value(name)}")
        except ConfigError as error:
            raise RequestError(str(error)) from None
    unsaid = {
        name: value
        for name, value in (presumed or {}).items()
        if name not in flags and values.keys().isdisjoint((name, *OPTIONS[name].elsewhere))
    }
    return SamplingParams(**{**flags, **unsaid}, **values)
