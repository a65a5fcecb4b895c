"""The command that serves in vLLM what the embedded executor does not run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtp_plugin.errors import shell_quote

IN_VLLM = "vLLM with this package's plugin may run it"
"""Precedes `vllm_command` in the refusal of a model."""


def vllm_command(
    model: str | Path,
    num_drafts: int = 3,
    *,
    drafter: str | Path | None = None,
    method: str = "mtp",
    options: Mapping[str, Any] | None = None,
) -> str:
    """Return the shell command that serves a checkpoint in vLLM with this package's plugin.

    Args:
        num_drafts: drafts per step; 0: the checkpoint has no MTP layers.
        drafter: another checkpoint with the MTP layers; None: ``model`` has them.
        method: of drafting.
        options: of the plugin.
    """
    drafting: dict[str, Any] = {"method": method, "num_speculative_tokens": num_drafts}
    if drafter is not None:
        drafting["model"] = str(drafter)
    flags = [("--speculative-config", drafting)] if num_drafts else []
    flags.append(("--additional-config", {"mtp_plugin": dict(options or {})}))
    shown = " ".join(f"{name} {shell_quote(json.dumps(value))}" for name, value in flags)
    return f"vllm serve {shell_quote(model)} {shown}"
