"""The embedded PyExecutor: a small TensorRT-LLM-shaped engine on transformers models."""
# ruff: noqa: E402 - missing packages are reported before an import fails

from mtp_plugin.extras import MODEL_PACKAGES, require

require("the embedded executor (mtp_plugin.LLM)", *MODEL_PACKAGES)

from mtp_plugin.executor.handle import RequestHandle
from mtp_plugin.executor.llm import LLM
from mtp_plugin.executor.outputs import CompletionOutput, RequestOutput
from mtp_plugin.executor.py_executor import PyExecutor, StepEvent
from mtp_plugin.executor.request import LlmRequest
from mtp_plugin.requests.options import SamplingParams

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
