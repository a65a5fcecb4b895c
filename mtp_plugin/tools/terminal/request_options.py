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
        flags: options that have a flag, by name.
        others: any other options as ``NAME=VALUE``, with the value in YAML syntax.
        presumed: defaults of flags that are None, unless another name of the option is given.

    Raises:
        RequestError: an option has the wrong form, is given twice or has a flag; or as for
            `SamplingParams`.
    """
    values: dict[str, Any] = {}
    for text in others:
        name, equals, value = text.partition("=")
        expect(
            bool(name and equals),
            RequestError,
            f"--option: expected NAME=VALUE, got {format_value(text)}",
        )
        expect(name not in flags, RequestError, f"--option: {name} has a flag of its own")
        expect(name not in values, RequestError, f"--option: {format_value(name)} is given twice")
        try:
            values[name] = parse_yaml(value, f"--option: {format_value(name)}")
        except ConfigError as error:
            raise RequestError(str(error)) from None
    unsaid = {
        name: value
        for name, value in (presumed or {}).items()
        if flags[name] is None and values.keys().isdisjoint(OPTIONS[name].elsewhere)
    }
    return SamplingParams(**{**flags, **unsaid}, **values)
