"""Admission of requests to an engine with the plugin."""

from __future__ import annotations

from typing import Any

PREFIX = "mtp_"


def check_request(params: Any) -> None:
    """Refuse options of ours that do not exist.

    Args:
        params: vLLM's ``SamplingParams`` or ``PoolingParams``.

    Raises:
        VLLMValidationError: a key of ``extra_args`` begins with ``mtp_``; vLLM answers with
            HTTP 400.
    """
    extra = getattr(params, "extra_args", None) or {}
    unknown = sorted(key for key in extra if str(key).startswith(PREFIX))
    if unknown:
        from vllm.exceptions import VLLMValidationError

        # 0.32 answers to any other exception with HTTP 500, to ValueError too
        raise VLLMValidationError(
            f"extra_args: mtp_plugin has no request options, got {', '.join(unknown)}: leave "
            "them out"
        )
