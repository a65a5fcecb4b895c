"""vLLM as a host engine: our sampling and verification inside vLLM's V2 model runner.

vLLM calls :func:`register` in every process (entry-point group ``vllm.general_plugins``). Without
``additional_config={"mtp_plugin": {...}}`` an engine works as if the package were not installed.

This module imports the standard library alone: vLLM only logs an entry point that fails to import.
"""


def register() -> None:
    """Wrap vLLM's start-up methods, once per process; see :mod:`mtp_plugin.hosts.vllm.wrapping`."""
    from mtp_plugin.hosts.vllm.wrapping import wrap_start

    wrap_start()
