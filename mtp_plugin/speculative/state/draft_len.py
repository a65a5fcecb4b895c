"""K of a decoding config, read in one place: pools and workers must agree on it."""

from __future__ import annotations

from typing import Any

from mtp_plugin.errors import ConfigError, expect


def read_draft_len(config: Any, minimum: int = 1) -> int:
    """K: ``max_draft_len`` where it is given, else ``num_nextn_predict_layers``.

    A host may keep the checkpoint's number of MTP layers under the older name, beside a K of its
    own.

    Raises:
        ConfigError: no name holds an integer >= ``minimum``.
    """
    for name in ("max_draft_len", "num_nextn_predict_layers"):
        value = getattr(config, name, None)
        if value is not None:
            expect(
                isinstance(value, int) and value >= minimum,
                ConfigError,
                f"{name}: expected an integer >= {minimum}, got {value!r}",
            )
            return int(value)
    raise ConfigError("the decoding config gives no max_draft_len and no num_nextn_predict_layers")
