"""Compile our kernels in other processes while vLLM loads its model.

On an empty Triton cache our sampling kernels take up to a minute each to compile. One process per
tiling compiles them for the worker's GPU, without using a GPU, so that the worker finds them in
Triton's cache.

``python -m mtp_plugin.hosts.vllm.precompile SPEC`` is such a process; SPEC is a `Launch` as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TILINGS = (1, 24, 34, 192, 265, 512)
"""The least numbers of rows from which the sampling kernels are tiled differently."""
VOCAB_PADDING = 64
"""vLLM pads the rows of logits to a multiple of this many columns."""
KERNELS = ("sample_scan_kernel", "sample_finish_kernel", "accept_kernel")
LONGEST_WAIT = 180.0
"""Seconds after which the worker compiles by itself what is missing."""


@dataclass(frozen=True)
class Launch:
    """Launches that one process compiles."""

    capability: int  # compute capability without its point
    dtype: str  # of the logits: bfloat16
    vocab: int
    rows: int
    num_drafts: int


class Precompilation:
    """Launches that processes of one rank compile, for all ranks of the host.

    Args:
        launches: to compile. starts: whether this rank starts the processes.
    """

    def __init__(self, launches: Sequence[Launch], *, starts: bool) -> None:
        self._folder = _cache_folder()
        self._processes: dict[str, subprocess.Popen[bytes] | None] = {}
        for launch in launches:
            text = json.dumps(asdict(launch))
            self._processes[text] = self._start(text) if starts else None

    def _start(self, launch: str) -> subprocess.Popen[bytes]:
        package = str(Path(__file__).parents[3])
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        env |= {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([package, *filter(None, [env.get("PYTHONPATH")])]),
            "TRITON_CACHE_DIR": str(self._folder),
        }
        return subprocess.Popen(
            [sys.executable, "-m", "mtp_plugin.hosts.vllm.precompile", launch],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def finish(self) -> float:
        """Wait for the processes; call it before the first launch.

        vLLM may have moved Triton's cache since: then the entries are copied.

        Returns:
            Seconds that this took.
        """
        start = time.monotonic()
        while time.monotonic() - start < LONGEST_WAIT:
            # a process that ended without its mark was killed
            done = [
                _end_of(self._folder, launch).exists()
                if process is None
                else process.poll() is not None
                for launch, process in self._processes.items()
            ]
            if all(done):
                break
            time.sleep(0.1)
        folder = _cache_folder()
        if folder != self._folder:
            for kernel in KERNELS:
                for file in self._folder.glob(f"*/__grp__{kernel}.json"):
                    entry = file.parent
                    shutil.copytree(entry, folder / entry.name, dirs_exist_ok=True)
        return time.monotonic() - start


_of_worker: Precompilation | None = None


def of_worker() -> Precompilation | None:
    """Return what this process started last; a worker has one engine."""
    return _of_worker


def start(vllm_config: Any, capability: int, *, is_first_rank: bool) -> None:
    """Start compiling for the logits of an engine, unprocessed and processed ones."""
    model, spec = vllm_config.model_config, vllm_config.speculative_config
    num_drafts = 0 if spec is None else spec.num_speculative_tokens
    most = vllm_config.scheduler_config.max_num_seqs * (num_drafts + 1)
    vocab = model.get_vocab_size()
    launches = [
        Launch(capability, dtype, vocab, rows, num_drafts)
        for dtype in dict.fromkeys((str(model.dtype).removeprefix("torch."), "float32"))
        for rows in TILINGS
        if rows <= most
    ]
    global _of_worker
    _of_worker = Precompilation(launches, starts=is_first_rank)


def _end_of(folder: Path, launch: str) -> Path:
    """A file that says that a launch was compiled, or could not be."""
    name = hashlib.sha256(launch.encode()).hexdigest()[:16]
    return folder / f"mtp_plugin-{name}.done"


def _cache_folder() -> Path:
    given = os.environ.get("TRITON_CACHE_DIR")
    return Path(given) if given else Path.home() / ".triton" / "cache"


def compile_launch(launch: Launch) -> None:
    """Compile the kernels of `row_ops.RowOps` for logits of one tiling, without a GPU."""
    import numpy as np
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel
    from triton.runtime.driver import driver

    from mtp_plugin.hosts.vllm.options import EngineSettings, VllmOptions
    from mtp_plugin.hosts.vllm.request_slots import RequestSlots
    from mtp_plugin.hosts.vllm.row_ops import RowOps, StepRows
    from mtp_plugin.ops import launching, programmatic_launch
    from mtp_plugin.ops.backend import Backend

    target = GPUTarget("cuda", launch.capability, 32)

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return target

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return device

    run = triton.JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, **options: Any) -> Any:
        return run(kernel, *arguments, **{**options, "warmup": True})

    driver.set_active(Driver())
    # in this process alone: launches compile, and CPU tensors count as those of the GPU
    changes: list[tuple[Any, str, Any]] = [
        (triton.JITFunction, "run", compile_only),
        (CompiledKernel, "__getitem__", lambda _self, _grid: lambda *_: None),
        (launching, "expect", lambda *_: None),
        (programmatic_launch, "_supports_pdl", lambda _device: launch.capability >= 90),
    ]
    for owner, name, replacement in changes:
        setattr(owner, name, replacement)

    device, rows = torch.device("cpu"), launch.rows
    width = launch.num_drafts + 1
    settings = EngineSettings(VllmOptions(), launch.num_drafts)
    ops = RowOps(RequestSlots(rows, device, settings), settings, Backend.TRITON, launch.vocab)
    padded = -(-launch.vocab // VOCAB_PADDING) * VOCAB_PADDING
    dtype = getattr(torch, launch.dtype)
    logits = torch.empty(rows * width, padded, dtype=dtype)[:, : launch.vocab]
    indices = torch.zeros(rows * width, dtype=torch.int32)
    positions = torch.zeros(rows * width, dtype=torch.int64)
    ops.sample(logits[:rows], indices[:rows], positions[:rows])
    if launch.num_drafts:
        starts = torch.arange(0, rows * width + 1, width, dtype=torch.int32)
        hosts = np.zeros(rows, dtype=np.int32)
        for count in (rows * width, rows * width - 1):  # uniform, ragged
            step = StepRows(
                logits[:count],
                drafts=indices[:count],
                positions=positions[:count],
                row_indices=indices[:count],
                offsets=indices[:count],
                cu_num_logits=starts,
                indices=indices[:rows],
                host_indices=hosts,
                seq_lens=indices[:rows],
                prefill_lens=indices[:rows],
            )
            ops.verify(step)


def main(launch: str) -> None:
    """Compile a `Launch` given as JSON; whatever happens, no worker waits for it any longer."""
    os.nice(5)
    try:
        compile_launch(Launch(**json.loads(launch)))
    finally:
        folder = _cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        _end_of(folder, launch).touch()


if __name__ == "__main__":
    main(sys.argv[1])
