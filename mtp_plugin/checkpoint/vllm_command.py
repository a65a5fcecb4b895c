"""The command that serves in vLLM what the embedded executor does not run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtp_plugin import extras
from mtp_plugin.errors import shell_quote

IN_VLLM = "vLLM with this package's plugin may run it"
"""Precedes `vllm_command` in the refusal of a model."""

V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
V2_DEFAULT_SINCE = (0, 32)
"""Versions of vLLM whose default is the V2 model runner."""


def vllm_command(
    model: str | Path,
    num_drafts: int = 3,
    *,
    drafter: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Return the shell command that serves a checkpoint in vLLM with this package's plugin.

    Args:
        num_drafts: drafts per step; 0: the checkpoint has no MTP layers.
        drafter: another checkpoint with the MTP layers; None: ``model`` has them.
        options: of the plugin.
    """
    drafting: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": num_drafts}
    if drafter is not None:
        drafting["model"] = str(drafter)
    flags = [("--speculative-config", drafting)] if num_drafts else []
    flags.append(("--additional-config", {"mtp_plugin": dict(options or {})}))
    shown = " ".join(f"{name} {shell_quote(json.dumps(value))}" for name, value in flags)
    return with_v2_runner(f"vllm serve {shell_quote(model)} {shown}")


def with_v2_runner(command: str) -> str:
    """Return a command of vLLM with the variable that selects its V2 model runner, if the installed
    version needs it; without vLLM, with a comment."""
    installed = extras.version_of("vllm")
    if not installed:
        return f"{command}  # vLLM 0.24 to 0.26: set {V2_RUNNER}=1"
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    if numbers and tuple(map(int, numbers.groups())) >= V2_DEFAULT_SINCE:
        return command
    return f"{V2_RUNNER}=1 {command}"
