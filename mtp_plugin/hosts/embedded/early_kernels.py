"""Compile the kernels of an executor's steps in other processes, before the steps are captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from mtp_plugin.errors import describe_error
from mtp_plugin.hosts.embedded.prompt_steps import distinct_shapes
from mtp_plugin.hosts.embedded.row_table import StepShape
from mtp_plugin.ops.early_compile import (
    CompileJob,
    CompileRequest,
    num_processes,
    record_launches,
    warn_of_compilation,
)
from mtp_plugin.ops.step import SamplingKind

BACKGROUND_NICENESS = 10


def launches_kernels(device: torch.device) -> bool:
    """Return whether work on a device launches Triton kernels."""
    return device.type == "cuda" and find_spec("triton") is not None


class EarlyKernels:
    """The kernels of an executor's steps, which other processes compile.

    A dry run finds them. Those of the steps that are captured first, and of prompts, are compiled
    at once; leaving the context waits for them. Those of requests with logits processing follow in
    the background, see :meth:`compile_later`.

    Args:
        launch: launches steps. launch_prompts: launches prompts that have no graph.
        shapes: of all steps that have a graph. first: those that are captured now.
        report: called with a line of text.
    """

    def __init__(
        self,
        device: torch.device,
        launch: Callable[[Iterable[StepShape]], None],
        launch_prompts: Callable[[], None],
        shapes: Sequence[StepShape],
        first: Sequence[StepShape],
        report: Callable[[str], None],
    ) -> None:
        self._greedy: dict[str, CompileRequest] = {}
        self._later: dict[str, CompileRequest] = {}
        self._job = CompileJob()
        if not launches_kernels(device):
            return
        greedy = [s for s in first if s.sampling_kind is SamplingKind.GREEDY]
        processed = {s for s in shapes if s.sampling_kind is SamplingKind.PROCESSED} - {*first}
        others = [s for s in shapes if s not in processed and s not in greedy]
        report("looking for kernels to compile")
        try:
            with record_launches() as self._greedy:
                launch(greedy)
            with record_launches() as of_others:
                launch_prompts()
                launch(distinct_shapes(others))
            with record_launches() as of_processed:
                launch(distinct_shapes([s for s in shapes if s in processed]))
        except Exception as error:  # of a Triton with other hooks
            _warn_once(describe_error(error))
            self._greedy = {}
            return
        needed = self._greedy | of_others
        self._later = {name: r for name, r in of_processed.items() if name not in needed}
        self._job = CompileJob(list(needed.values()), urgent={*self._greedy})
        if not self._job.is_done:
            report(f"compiling {len(needed)} kernels in {num_processes()} processes")

    def __enter__(self) -> EarlyKernels:
        return self

    def __exit__(self, error: Any, *_: object) -> None:
        if error is None:
            self._job.wait()
        self._job.close()

    def wait_for(self, shape: StepShape) -> None:
        """Wait for the kernels of a step that is captured now.

        Those of sampling take longest: meanwhile, greedy steps can be captured.
        """
        if shape.sampling_kind is SamplingKind.GREEDY:
            self._job.wait_for(self._greedy.values())
        else:
            self._job.wait()

    def compile_later(self) -> CompileJob:
        """Start compiling the kernels of requests with logits processing."""
        return CompileJob(list(self._later.values()), niceness=BACKGROUND_NICENESS)


@cache
def _warn_once(error: str) -> None:
    warn_of_compilation(error)
