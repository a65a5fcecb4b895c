"""SGLang as a host engine: our sampling and verification inside SGLang's scheduler processes.

SGLang calls :func:`register` in its main process and in every scheduler process (entry-point group
``sglang.srt.plugins``). With the environment variable ``MTP_PLUGIN_SGLANG`` unset, SGLang works as
if the package were not installed.

This module imports the standard library alone: SGLang only logs an entry point that fails.
"""

import os

VARIABLE = "MTP_PLUGIN_SGLANG"
"""Options of the plugin: JSON, or the path of a YAML or JSON file; unset or empty: off."""


def register() -> None:
    """Hook SGLang's start-up functions; see :mod:`mtp_plugin.hosts.sglang.hooks`."""
    if os.environ.get(VARIABLE, "").strip():
        from mtp_plugin.hosts.sglang.hooks import register_start

        register_start()
