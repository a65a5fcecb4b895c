"""Record launches, compile them in a job, launch them, and print what was compiled when.

Usage: ``python -m tests.ops.compile_and_launch``, with an empty ``TRITON_CACHE_DIR``.
"""

from __future__ import annotations

import json
import sys
import threading
from unittest.mock import patch

import torch
import triton
import triton.language as tl

from mtp_plugin.ops.early_compile import CompileJob, record_launches
from tests.compiled.compiler import Compilations, absent_gpu
from tests.compiled.launches import compile_norms, compile_step_inputs


@triton.jit
def one_kernel(x_ptr):
    tl.store(x_ptr, 1)


def main() -> None:
    at_launch: list[str] = []
    of_other_thread: list[str] = []

    def listen(*, src, cache_hit, **_) -> None:
        if not cache_hit:
            at_launch.append(src.name)

    def launch() -> None:
        compile_step_inputs()
        compile_norms()

    def compile_one() -> None:
        one_kernel.warmup(torch.float32, grid=(1,))
        of_other_thread.extend(at_launch)

    compilations = Compilations(90)
    with patch.object(triton.knobs.compilation, "listener", listen):
        with absent_gpu(90), record_launches() as requests:
            launch()
            thread = threading.Thread(target=compile_one)
            thread.start()
            thread.join()
            empty = torch.empty(3).tolist()
        recorded = list(requests.values())
        at_launch.clear()
        job = CompileJob(recorded)
        job.wait()
        with compilations.of_launches():
            launch()
        repeated = CompileJob(recorded)
    report = {
        "errors": compilations.errors,
        "recorded": len(recorded),
        "of_other_thread": of_other_thread,
        "empty": empty,
        "compiled": sum(map(len, compilations.binaries.values())),
        "at_launch": at_launch,
        "repeated": "nothing to do" if repeated.is_done else "compiles",
    }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
