"""Read the plugin's own options from a YAML file named by an environment variable.

TensorRT-LLM's own file refuses unknown keys, and its ranks inherit only environment variables with
its own prefix.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mtp_plugin.config import MTPPluginOptions, load_plugin_options, path_of
from mtp_plugin.errors import ConfigError

VARIABLE = "TRTLLM_MTP_PLUGIN_CONFIG"
"""Path of the side file: YAML with the keys of ``speculative_config.mtp``."""


def read_side_file(environ: Mapping[str, str] | None = None) -> MTPPluginOptions:
    """Return the options of the side file, or the defaults if the variable is unset or empty.

    Args:
        environ: default: the environment of this process.

    Raises:
        ConfigError: the file is invalid; one line per mistake.
    """
    given = _given(environ)
    if not given:
        return MTPPluginOptions()
    source = f"{VARIABLE}={given}"
    return load_plugin_options(path_of(given, source), source)


def options_of(config: Any, environ: Mapping[str, str] | None = None) -> MTPPluginOptions:
    """Return the plugin options of a decoding config: its own ``mtp``, else the side file's.

    Raises:
        ConfigError: see `read_side_file`; or both are given and differ.
    """
    own = getattr(config, "mtp", None)
    in_file = read_side_file(environ)
    if not isinstance(own, MTPPluginOptions) or own in (MTPPluginOptions(), in_file):
        return in_file
    given = _given(environ)
    if given:
        differ = [
            name for name in type(own).model_fields if getattr(own, name) != getattr(in_file, name)
        ]
        raise ConfigError(
            f"{VARIABLE}={given}: expected either it or the config's own mtp, or the same in both; "
            f"they differ in {', '.join(differ)}"
        )
    return own


def _given(environ: Mapping[str, str] | None) -> str:
    return (os.environ if environ is None else environ).get(VARIABLE, "")
