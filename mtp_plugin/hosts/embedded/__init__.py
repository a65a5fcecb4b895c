"""The embedded PyExecutor: a small TensorRT-LLM-shaped engine on transformers models.

The names below are imported lazily, so that processes that compile kernels do not load models.
"""
# ruff: noqa: E402 - missing packages are reported before an import fails

from mtp_plugin.extras import MODEL_PACKAGES, require

require("the embedded executor (mtp_plugin.LLM)", *MODEL_PACKAGES)

from typing import TYPE_CHECKING

from mtp_plugin.lazy_imports import lazy_names

if TYPE_CHECKING:
    from mtp_plugin.hosts.embedded.handle import RequestHandle as RequestHandle
    from mtp_plugin.hosts.embedded.llm import LLM as LLM
    from mtp_plugin.hosts.embedded.outputs import CompletionOutput as CompletionOutput
    from mtp_plugin.hosts.embedded.outputs import RequestOutput as RequestOutput
    from mtp_plugin.hosts.embedded.py_executor import PyExecutor as PyExecutor
    from mtp_plugin.hosts.embedded.py_executor import StepEvent as StepEvent
    from mtp_plugin.hosts.embedded.request import LlmRequest as LlmRequest
    from mtp_plugin.requests.options import SamplingParams as SamplingParams

_NAMES = {
    "..requests.options": "SamplingParams",
    "handle": "RequestHandle",
    "llm": "LLM",
    "outputs": "CompletionOutput RequestOutput",
    "py_executor": "PyExecutor StepEvent",
    "request": "LlmRequest",
}
__all__ = " ".join(_NAMES.values()).split()

if not TYPE_CHECKING:  # a checker reads the imports above
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
