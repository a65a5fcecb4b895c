"""The plugin's own options beside TensorRT-LLM's, in a file that the environment names.

The host's file takes no keys that the host does not know, and its ranks get no variables but those
with the host's own prefix.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mtp_plugin.config import MTPPluginOptions, load_plugin_options, path_of
from mtp_plugin.errors import ConfigError

VARIABLE = "TRTLLM_MTP_PLUGIN_CONFIG"
"""Names the side file: YAML, what would stand under ``speculative_config.mtp``."""


def read_side_file(environ: Mapping[str, str] | None = None) -> MTPPluginOptions:
    """The options of the side file; the defaults where the variable is not set, or empty.

    Args:
        environ: None: of this process.

    Raises:
        ConfigError: one line per mistake: the variable, the path as given, the key, what came, what
            is allowed.
    """
    given = _given(environ)
    if not given:
        return MTPPluginOptions()
    source = f"{VARIABLE}={given}"
    return load_plugin_options(path_of(given, source), source)


def options_of(config: Any, environ: Mapping[str, str] | None = None) -> MTPPluginOptions:
    """The options that go with a decoding config: its own ``mtp``, else those of the side file.

    Raises:
        ConfigError: as `read_side_file`, or both say something, and not the same.
    """
    own = getattr(config, "mtp", None)
    asked = read_side_file(environ)
    if not isinstance(own, MTPPluginOptions) or own in (MTPPluginOptions(), asked):
        return asked
    given = _given(environ)
    if given:
        differ = [
            name for name in type(own).model_fields if getattr(own, name) != getattr(asked, name)
        ]
        raise ConfigError(
            f"{VARIABLE}={given}: expected either it or the config's own mtp, or the same in both; "
            f"they differ in {', '.join(differ)}"
        )
    return own


def _given(environ: Mapping[str, str] | None) -> str:
    return (os.environ if environ is None else environ).get(VARIABLE, "")
