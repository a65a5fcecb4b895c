"""``mtp-plugin doctor --host sglang --model DIR``: what SGLang will do with a checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from mtp_plugin.checkpoint import (
    DSPARK,
    SEPARATE_DRAFTERS,
    Checkpoint,
    describe,
    read_checkpoint,
    thinking_options,
    write_report,
)
from mtp_plugin.config.messages import spelled
from mtp_plugin.errors import CheckpointError, one_line, shell_quote
from mtp_plugin.hosts.sglang import VARIABLE

COMMAND = (
    f"{VARIABLE}='{{}}' python -m sglang.launch_server --model-path MODEL --speculative-algorithm "
    "EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
)
NOT_HERE = "sglang is not installed here: what is said of it follows from the files"

ONE_LAYER = frozenset(
    (
        *("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "glm4_moe_lite", "glm_ocr"),
        *("bailing_hybrid", "step3p5", "step3p7"),
    )
)
"""Families whose loaders refuse several MTP layers."""
FAMILIES = ONE_LAYER.union(
    ("deepseek_v4", "longcat_flash", "mimo", "mimo_v2", "mimo_v2_flash", "inkling_mm_model"),
    ("ernie4_5_moe", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    ("intern_s2_preview", "exaone_moe", "nemotron_h", "nemotron_h_puzzle", "hy_v3"),
)
"""Families whose MTP layers SGLang 0.5.17 and 0.5.23 load; of several they run one."""
NEWER = frozenset(("dots3_note", "glm5_next", "hy_v4", "interns2_mobius", "qwen4_exp"))
"""Families whose MTP layers SGLang 0.5.23 loads in addition."""


def verdict(checkpoint: Checkpoint) -> str:
    """Return what SGLang will do with a checkpoint."""
    if problems(checkpoint):
        return "refuses to start, or drafts at random"
    if checkpoint.model_type in SEPARATE_DRAFTERS:
        return "drafts for another checkpoint, by algorithms that the plugin does not serve"
    if checkpoint.model_type in DSPARK or checkpoint.family is None:
        return f"not known, whether it drafts with family {spelled(checkpoint.model_type)}"
    if not checkpoint.declared:
        return "runs without drafts, there are no MTP layers"
    return "drafts, from 0.5.23 on" if checkpoint.model_type in NEWER else "drafts"


def problems(checkpoint: Checkpoint) -> list[str]:
    """Return one line for everything that is wrong with a checkpoint in SGLang."""
    return [*_of_loaders(checkpoint)] + [
        problem.text for problem in checkpoint.problems if not problem.is_of_vllm
    ]


def _of_loaders(checkpoint: Checkpoint) -> Iterator[str]:
    family, declared = checkpoint.family, checkpoint.declared
    if family is None or not declared:
        return
    if family.model_type not in FAMILIES | NEWER:
        yield f"SGLang loads no MTP layers of family {family.model_type}: serve it in vLLM"
    elif family.model_type in NEWER and _installed() == "0.5.17":
        yield (
            f"SGLang 0.5.17 loads no MTP layers of family {family.model_type}: install 0.5.23, or "
            "serve it in vLLM"
        )
    elif family.model_type in ONE_LAYER and declared > 1:
        change = shell_quote(json.dumps({family.count_key: 1}))
        yield (
            f"SGLang loads one MTP layer of family {family.model_type}, config.json declares "
            f"{declared}: add --json-model-override-args {change}, or set {family.count_key} to 1; "
            "it drafts every token"
        )


def _installed() -> str | None:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def serve_command(checkpoint: Checkpoint) -> str:
    """Return the command that serves a checkpoint, with the thinking ids of its tokenizer."""
    options = thinking_options(checkpoint.directory)
    command = COMMAND if checkpoint.declared else COMMAND.partition(" --speculative")[0]
    command = command.partition(" ")[2].replace("MODEL", shell_quote(checkpoint.directory))
    return f"{VARIABLE}={shell_quote(json.dumps(options))} {command}"


def main(model: str) -> int:
    """Print what was found, the problems and the command to type next; return the exit code."""
    again = f"mtp-plugin doctor --host sglang --model {shell_quote(model)}  # with this corrected"
    command, wrong = "", []
    try:
        checkpoint = read_checkpoint(model)
        lines = [*describe(checkpoint), ("SGLang", verdict(checkpoint))]
        wrong = problems(checkpoint)
        command = serve_command(checkpoint)
    except CheckpointError as error:
        lines, wrong = [("checkpoint", model)], str(error).splitlines()
        again = error.next_command or again
    write_report(lines, wrong)
    is_wrong = bool(wrong)
    if find_spec("sglang"):
        from mtp_plugin.hosts.sglang.checks import examine, show

        seen = examine()
        show(seen, sys.stdout)
        is_wrong |= bool(seen.problems)
    else:
        sys.stdout.write(f"{NOT_HERE}\n")
    sys.stdout.write(f"next: {one_line(again if is_wrong else command)}\n")
    return int(is_wrong)
