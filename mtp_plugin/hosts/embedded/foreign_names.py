"""Names of vLLM and TensorRT-LLM that do not exist here, and what to type instead."""

from __future__ import annotations

from collections.abc import Mapping

_ASYNC = "use `await LLM(...).generate_async(...)` and `LLM(...).stream_async(...)`"
_GRAMMAR = "grammars are not supported; vLLM with this plugin serves them with drafts"
_TASK = "this engine only generates"
_ARGUMENTS = "use keyword arguments of `LLM(...)`"

OF_PACKAGE: Mapping[str, str] = {
    "AsyncEngineArgs": _ARGUMENTS,
    "AsyncLLM": _ASYNC,
    "AsyncLLMEngine": _ASYNC,
    "EngineArgs": _ARGUMENTS,
    "GuidedDecodingParams": _GRAMMAR,
    "LLMEngine": "use `LLM(...).submit(...)`, which returns a handle",
    "MTPConfig": "use `MTPDecodingConfig`",
    "PoolingParams": _TASK,
    "RequestOutputKind": "use `LLM.stream(...)` for new tokens, `LLM.generate(...)` for the whole",
    "StructuredOutputsParams": _GRAMMAR,
    "TextPrompt": 'use a text, or `{"prompt": text}`',
    "TokensPrompt": 'use a list of token ids, or `{"prompt_token_ids": ids}`',
    "TorchLlmArgs": _ARGUMENTS,
}
OF_LLM: Mapping[str, str] = {
    "args": "use `LLM.config`",
    "beam_search": "use `SamplingParams(n=...)` with sampling",
    "classify": _TASK,
    "collective_rpc": "use `LLM.executor`: the engine runs in this process",
    "embed": _TASK,
    "encode": _TASK,
    "get_default_sampling_params": "use `SamplingParams()`",
    "get_stats": "use `LLM.get_metrics()`",
    "get_stats_async": "use `LLM.get_metrics()`",
    "llm_engine": "use `LLM.executor`",
    "reset_prefix_cache": "KV blocks are not reused between requests",
    "reward": _TASK,
    "score": _TASK,
    "sleep": "use `LLM.shutdown()`, and a new `LLM` later",
    "start_profile": "use `torch.profiler` around `LLM.generate(...)`",
    "stop_profile": "use `torch.profiler` around `LLM.generate(...)`",
    "wake_up": "use a new `LLM`",
}


def counterpart(name: str, names: Mapping[str, str]) -> str:
    """Return the end of an AttributeError's message; empty for a name of neither engine."""
    return f"; {names[name]}" if name in names else ""
