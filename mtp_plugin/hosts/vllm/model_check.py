"""``mtp-plugin doctor --host vllm --model DIR``: what vLLM will do with a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.util import find_spec

from mtp_plugin.checkpoint import (
    DSPARK,
    IN_VLLM,
    SEPARATE_DRAFTERS,
    Checkpoint,
    InVllm,
    describe,
    read_checkpoint,
    thinking_options,
    vllm_command_of,
    write_report,
)
from mtp_plugin.config.messages import spelled
from mtp_plugin.errors import CheckpointError, one_line, shell_quote
from mtp_plugin.hosts.vllm.checks import OK, PROBLEM, Examination, examine, show

NOT_HERE = "vllm is not installed here: what is said of it follows from the files of the checkpoint"
LARGE_VOCABULARY = 65_536
"""From this number of ids on, a draft pass is mostly the product with the head."""


def verdict(checkpoint: Checkpoint) -> str:
    """Return what vLLM will do with a checkpoint."""
    worst: InVllm = "drafts"
    for problem in checkpoint.problems:
        worst = max(worst, problem.in_vllm, key=list(IN_VLLM).index)
    if worst != "drafts":
        return IN_VLLM[worst]
    if checkpoint.model_type in SEPARATE_DRAFTERS:
        return "drafts for another checkpoint"
    if checkpoint.model_type in DSPARK:
        return "refuses method mtp, drafts with dspark"
    if checkpoint.family is None:
        return f"not known, whether it drafts with family {spelled(checkpoint.model_type)}"
    return IN_VLLM[worst] if checkpoint.declared else "runs without drafts, there are no MTP layers"


def problems(checkpoint: Checkpoint) -> list[str]:
    """Return one line for everything that is wrong with a checkpoint in vLLM."""
    return [problem.text for problem in checkpoint.problems]


def serve_command(checkpoint: Checkpoint) -> str:
    """Return the command that serves a checkpoint, with the thinking ids of its tokenizer."""
    options = thinking_options(checkpoint.directory)
    return vllm_command_of(checkpoint.directory, checkpoint.config, **options)


def main(model: str) -> int:
    """Print what was found, the problems and the command to type next; return the exit code."""
    again = f"mtp-plugin doctor --host vllm --model {shell_quote(model)}  # with this corrected"
    command = None
    try:
        checkpoint = read_checkpoint(model)
        lines = [*describe(checkpoint), ("vLLM", verdict(checkpoint))]
        if wrong := problems(checkpoint):
            write_report(lines, wrong)
        else:
            command = serve_command(checkpoint)
            write_report([*lines, *_hints(checkpoint), ("command", command)], ())
    except CheckpointError as error:
        lines = [("checkpoint", model), ("vLLM", IN_VLLM["refusal"])]
        write_report(lines, str(error).splitlines())
        again = error.next_command or again
    seen = examine() if find_spec("vllm") else Examination(notes=[NOT_HERE])
    show(seen, sys.stdout)
    is_good = command is not None and not seen.problems
    sys.stdout.write(f"next: {one_line(command if is_good else again)}\n")
    return OK if is_good else PROBLEM


def _hints(checkpoint: Checkpoint) -> Iterable[tuple[str, str]]:
    vocab_size = checkpoint.number("vocab_size")
    if checkpoint.declared and vocab_size >= LARGE_VOCABULARY and not checkpoint.quantized["head"]:
        yield (
            "hint",
            f'of {vocab_size} ids few are drafted: "draft_vocab": 32768 in mtp_plugin drafts from '
            "the lowest ones, a list of mtp-plugin draft-vocab from those of your texts",
        )
