"""``mtp-plugin doctor --host tensorrt_llm --model DIR``: which MTP layers a checkpoint has."""

from __future__ import annotations

import sys

from mtp_plugin.checkpoint import Checkpoint, describe, read_checkpoint, write_report
from mtp_plugin.errors import CheckpointError, one_line, shell_quote
from mtp_plugin.hosts.tensorrt_llm.checks import OK, PROBLEM, examine, serve_command, show


def heads(checkpoint: Checkpoint) -> str:
    """Return how TensorRT-LLM drafts with the MTP layers of a checkpoint."""
    number = min(checkpoint.declared, len(checkpoint.found))
    if checkpoint.family is None:
        return "not known, the table of this package lacks the family"
    if number == 0:
        return "no MTP layers to draft with"
    if number == 1:
        return "eagle: the MTP layer drafts every token, max_draft_len is free"
    return f"vanilla: {number} MTP layers draft one token each, max_draft_len at most {number}"


def main(model: str) -> int:
    """Print what was found, the problems and the command to type next; return the exit code."""
    again = f"mtp-plugin doctor --host tensorrt_llm --model {shell_quote(model)}"
    next_command = f"{again}  # with this corrected"
    try:
        checkpoint = read_checkpoint(model)
        lines = [*describe(checkpoint), ("TensorRT-LLM", heads(checkpoint))]
        problems = [each.text for each in checkpoint.problems if not each.is_of_vllm]
    except CheckpointError as error:
        lines, problems = [("checkpoint", model)], str(error).splitlines()
        next_command = error.next_command or next_command
    write_report(lines, problems)
    seen = examine()
    show(seen, sys.stdout)
    if problems or seen.problems:
        sys.stdout.write(f"next: {one_line(next_command)}\n")
        return PROBLEM
    sys.stdout.write(f"next: {one_line(serve_command(seen, model, len(checkpoint.found)))}\n")
    return OK
