"""The embedded PyExecutor: a small TensorRT-LLM-shaped engine on transformers models.

The names below are imported lazily, so that processes that compile kernels do not load models.
"""
# ruff: noqa: E402 - missing packages are reported before an import fails

from mtp_plugin.extras import MODEL_PACKAGES, require

require("the embedded executor (mtp_plugin.LLM)", *MODEL_PACKAGES)

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtp_plugin.hosts.embedded.handle import RequestHandle as RequestHandle
    from mtp_plugin.hosts.embedded.llm import LLM as LLM
    from mtp_plugin.hosts.embedded.outputs import CompletionOutput as CompletionOutput
    from mtp_plugin.hosts.embedded.outputs import RequestOutput as RequestOutput
    from mtp_plugin.hosts.embedded.py_executor import PyExecutor as PyExecutor
    from mtp_plugin.hosts.embedded.py_executor import StepEvent as StepEvent
    from mtp_plugin.hosts.embedded.request import LlmRequest as LlmRequest
    from mtp_plugin.requests.options import SamplingParams as SamplingParams

_MODULES = {
    "CompletionOutput": "hosts.embedded.outputs",
    "LLM": "hosts.embedded.llm",
    "LlmRequest": "hosts.embedded.request",
    "PyExecutor": "hosts.embedded.py_executor",
    "RequestHandle": "hosts.embedded.handle",
    "RequestOutput": "hosts.embedded.outputs",
    "SamplingParams": "requests.options",
    "StepEvent": "hosts.embedded.py_executor",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "LlmRequest",
    "PyExecutor",
    "RequestHandle",
    "RequestOutput",
    "SamplingParams",
    "StepEvent",
]

if not TYPE_CHECKING:  # a checker reads the imports above

    def __getattr__(name: str) -> Any:
        if f"hosts.embedded.{name}" in _MODULES.values():
            return import_module(f"{__name__}.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"mtp_plugin.{_MODULES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
