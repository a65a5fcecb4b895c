"""The embedded PyExecutor: a small TensorRT-LLM-shaped engine on transformers models."""

from mtp_plugin.executor.llm import LLM
from mtp_plugin.executor.outputs import RequestOutput
from mtp_plugin.executor.py_executor import PyExecutor, StepEvent
from mtp_plugin.executor.request import LlmRequest
from mtp_plugin.requests.options import SamplingParams

__all__ = ["LLM", "LlmRequest", "PyExecutor", "RequestOutput", "SamplingParams", "StepEvent"]
