"""Multi-token-prediction speculative decoding as a plugin for PyExecutor-shaped serving loops.

The names below are the public interface for users and host engines. They are imported lazily, so
that ``import mtp_plugin`` loads nothing else.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mtp_plugin.version import __version__ as __version__

if TYPE_CHECKING:
    from mtp_plugin.config import CudaGraphConfig as CudaGraphConfig
    from mtp_plugin.config import KvCacheConfig as KvCacheConfig
    from mtp_plugin.config import MTPDecodingConfig as MTPDecodingConfig
    from mtp_plugin.config import SpeculativeDecodingMode as SpeculativeDecodingMode
    from mtp_plugin.errors import MTPPluginError as MTPPluginError
    from mtp_plugin.hosts.embedded import LLM as LLM
    from mtp_plugin.hosts.embedded import CompletionOutput as CompletionOutput
    from mtp_plugin.hosts.embedded import RequestHandle as RequestHandle
    from mtp_plugin.hosts.embedded import RequestOutput as RequestOutput
    from mtp_plugin.hosts.embedded import StepEvent as StepEvent
    from mtp_plugin.ops.step import Accepted as Accepted
    from mtp_plugin.plugin import CustomDrafter as CustomDrafter
    from mtp_plugin.plugin import CustomVerification as CustomVerification
    from mtp_plugin.plugin import DraftPlan as DraftPlan
    from mtp_plugin.plugin import HostFacts as HostFacts
    from mtp_plugin.plugin import SpeculativePieces as SpeculativePieces
    from mtp_plugin.plugin import custom_verifications as custom_verifications
    from mtp_plugin.plugin import find_plugin as find_plugin
    from mtp_plugin.plugin import register_drafter as register_drafter
    from mtp_plugin.plugin import register_plugin as register_plugin
    from mtp_plugin.plugin import register_verification as register_verification
    from mtp_plugin.requests.options import SamplingParams as SamplingParams
    from mtp_plugin.requests.states import FinishReason as FinishReason
    from mtp_plugin.speculative.drafting import MTPEagleWorker as MTPEagleWorker
    from mtp_plugin.speculative.drafting import MTPWorker as MTPWorker
    from mtp_plugin.speculative.metadata import MTPSpecMetadata as MTPSpecMetadata
    from mtp_plugin.speculative.result_store import SampleStateTensorsMTP as SampleStateTensorsMTP
    from mtp_plugin.speculative.sampler import MTPSampler as MTPSampler
    from mtp_plugin.speculative.sampler import SamplerHooks as SamplerHooks
    from mtp_plugin.speculative.sampler import SampleStateMTP as SampleStateMTP
    from mtp_plugin.speculative.state import MTPHiddenStatesManager as MTPHiddenStatesManager
    from mtp_plugin.speculative.step_output import StepOutput as StepOutput

_MODULES = {
    "Accepted": "ops.step",
    "CompletionOutput": "hosts.embedded",
    "CudaGraphConfig": "config",
    "CustomDrafter": "plugin",
    "CustomVerification": "plugin",
    "DraftPlan": "plugin",
    "FinishReason": "requests.states",
    "HostFacts": "plugin",
    "KvCacheConfig": "config",
    "LLM": "hosts.embedded",
    "MTPDecodingConfig": "config",
    "MTPEagleWorker": "speculative.drafting",
    "MTPHiddenStatesManager": "speculative.state",
    "MTPPluginError": "errors",
    "MTPSampler": "speculative.sampler",
    "MTPSpecMetadata": "speculative.metadata",
    "MTPWorker": "speculative.drafting",
    "RequestHandle": "hosts.embedded",
    "RequestOutput": "hosts.embedded",
    "SampleStateMTP": "speculative.sampler",
    "SampleStateTensorsMTP": "speculative.result_store",
    "SamplerHooks": "speculative.sampler",
    "SamplingParams": "requests.options",
    "SpeculativeDecodingMode": "config",
    "SpeculativePieces": "plugin",
    "StepEvent": "hosts.embedded",
    "StepOutput": "speculative.step_output",
    "custom_verifications": "plugin",
    "find_plugin": "plugin",
    "register_drafter": "plugin",
    "register_plugin": "plugin",
    "register_verification": "plugin",
}

__all__ = [
    "LLM",
    "Accepted",
    "CompletionOutput",
    "CudaGraphConfig",
    "CustomDrafter",
    "CustomVerification",
    "DraftPlan",
    "FinishReason",
    "HostFacts",
    "KvCacheConfig",
    "MTPDecodingConfig",
    "MTPEagleWorker",
    "MTPHiddenStatesManager",
    "MTPPluginError",
    "MTPSampler",
    "MTPSpecMetadata",
    "MTPWorker",
    "RequestHandle",
    "RequestOutput",
    "SampleStateMTP",
    "SampleStateTensorsMTP",
    "SamplerHooks",
    "SamplingParams",
    "SpeculativeDecodingMode",
    "SpeculativePieces",
    "StepEvent",
    "StepOutput",
    "custom_verifications",
    "find_plugin",
    "register_drafter",
    "register_plugin",
    "register_verification",
]

if not TYPE_CHECKING:  # a checker reads the imports above

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            from mtp_plugin.hosts.embedded.foreign_names import OF_PACKAGE, counterpart

            hint = counterpart(name, OF_PACKAGE)
            # Python replaces an AttributeError of ``from mtp_plugin import name`` by its own text
            is_import = sys._getframe(1).f_code.co_name == "_handle_fromlist"
            kind = ImportError if hint and is_import else AttributeError
            raise kind(f"module {__name__!r} has no attribute {name!r}{hint}")
        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
