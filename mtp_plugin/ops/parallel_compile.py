"""Compile Triton kernels in several processes, before the process that launches them needs them.

Triton compiles a kernel at its first launch, one after the other. A dry run within
`record_launches` collects what would be compiled; a `CompileJob` compiles that into Triton's cache
on disk, without using the GPU, and the launches that follow find it there. What a job misses is
compiled at its first launch, as ever. A `CompileProcess` can start before the dry run, so that it
has imported what a job needs by then.

`main` runs in that process.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtp_plugin.errors import describe_error

_logger = logging.getLogger(__name__)

MAX_PROCESSES = 8
"""Compiling processes at most; further ones add little, as the longest compilations dominate."""
LEAST_REQUESTS = 8
"""Fewer kernels are compiled at their first launch: starting the processes would take longer."""
LONGEST_WAIT = 180.0
"""Seconds after the start of a job, from which on launches compile what is missing."""
BACKGROUND_NICENESS = 10
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class CompileRequest:
    """A kernel with the specialization of one launch."""

    name: str
    """Identifies source, specialization and options."""
    num_parameters: int
    content: bytes = field(repr=False)
    """Pickled arguments of `compile_request`."""

    @property
    def mark(self) -> str:
        """Name of the file that a job writes once the kernel is in the cache."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:32]


class _ZeroFilled(TorchDispatchMode):
    """Fill new tensors with zeros, as no kernel writes them and some are read as indices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        created = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _UNINITIALISED:
            created.zero_()
        return created


_UNINITIALISED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


_recording = threading.Lock()
_thread = threading.local()


def is_recording() -> bool:
    """Return whether this thread is within `record_launches`, where values are meaningless."""
    return getattr(_thread, "is_recording", False)


@contextmanager
def record_launches() -> Iterator[dict[str, CompileRequest]]:
    """Collect the kernels that this thread launches within, instead of compiling and running them.

    Operations of torch run, on zeros where a kernel would have written a new tensor. Only steps
    whose launches do not depend on values, as those of a CUDA graph, can run like this.

    Yields:
        Requests by their name, for kernels that are not loaded yet.
    """
    with _recording:  # one at a time changes Triton
        yield from _record_launches()


def _record_launches() -> Iterator[dict[str, CompileRequest]]:
    import triton
    from triton.compiler import CompiledKernel

    requests: dict[str, CompileRequest] = {}
    failures: list[str] = []
    run, launch = triton.JITFunction.run, CompiledKernel.__getitem__
    runtime = triton.knobs.runtime
    hook = runtime.jit_cache_hook

    def run_or_record(kernel: Any, *arguments: Any, **options: Any) -> Any:
        if is_recording():
            options["warmup"] = True  # compile, do not launch
        return run(kernel, *arguments, **options)

    def launch_or_skip(kernel: Any, grid: Any) -> Any:
        return (lambda *_: None) if is_recording() else launch(kernel, grid)

    def note(**given: Any) -> Any:
        if not is_recording():
            return hook(**given) if hook is not None else None
        try:
            request = _read_request(given["fn"], given["compile"])
        except Exception as error:  # a constant that only this process has, or another Triton
            failures.append(describe_error(error))
        else:
            requests[request.name] = request
        return True  # do not compile

    changes: list[tuple[Any, str, Any, Any]] = [
        (triton.JITFunction, "run", run_or_record, run),
        (CompiledKernel, "__getitem__", launch_or_skip, launch),
        (runtime, "jit_cache_hook", note, hook),
    ]
    _thread.is_recording = True
    try:
        for owner, name, replacement, _ in changes:
            setattr(owner, name, replacement)
        with _ZeroFilled():  # type: ignore[no-untyped-call]
            yield requests
    finally:
        _thread.is_recording = False
        for owner, name, _, original in changes:
            setattr(owner, name, original)
    if failures:
        _logger.warning(
            "%d kernels are compiled at their first launch: %s", len(failures), failures[0]
        )


def _read_request(function: Any, compiled: dict[str, Any]) -> CompileRequest:
    """Read the arguments of Triton's JIT hook."""
    import triton
    from triton.runtime.driver import driver

    target, kernel = driver.active.get_current_target(), function.jit_function
    options = json.loads(compiled["specialization_data"])["options"]
    arguments = (
        function.module,
        function.name,
        kernel.cache_key,
        compiled["signature"],
        compiled["constants"],
        compiled["configs"][0],
        {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()},
        (target.backend, target.arch, target.warp_size),
    )
    name = (
        f"{function.module}.{function.name} {kernel.cache_key} {compiled['key']} {target} "
        f"{triton.__version__}"
    )
    return CompileRequest(name, len(compiled["signature"]), pickle.dumps(arguments))


def launches_kernels(device: torch.device) -> bool:
    """Return whether work on a device launches Triton kernels."""
    return device.type == "cuda" and find_spec("triton") is not None


@cache
def warn_of_failed_recording(error: str) -> None:
    """Log, once per error, that launches cannot be recorded, as with a Triton of other hooks."""
    _logger.warning("kernels are compiled in one process: %s", error)


class CompileProcess:
    """A process that imports what compiling needs, then compiles the kernels of one job.

    Raises:
        OSError: it cannot start.
    """

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TRITON_CACHE_DIR": str(_cache_folder()),
        }
        # it imports what this process imports: -m would put the working directory first, and
        # another version there would be compiled into this version's cache entries
        program = (
            f"import sys; sys.path[:] = {[str(path) for path in sys.path]}; "
            f"from {__name__} import main; main()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt is for this process
        )
        self._kill = weakref.finalize(self, _kill, self._process)

    @classmethod
    def start(cls) -> CompileProcess | None:
        """Start a process, or log why there is none."""
        # of a frozen program, the executable would start the program again
        if not sys.executable or getattr(sys, "frozen", False):
            return None
        try:
            return cls()
        except OSError as error:
            _logger.warning("kernels are compiled in one process: %s", error)
            return None

    @classmethod
    def start_ahead(cls) -> CompileProcess | None:
        """Start a process for a later job, if the cache has no kernels of an earlier one."""
        try:
            has_earlier = _marks_folder().exists()
        except Exception:  # no access to the cache, or another Triton: the job reports it
            return None
        return None if has_earlier else cls.start()

    def send(self, jobs: list[tuple[bytes, str]], *, background: bool) -> None:
        """Send kernels and the files that mark them as compiled; returns at once."""
        niceness = BACKGROUND_NICENESS if background else 0
        job = pickle.dumps((jobs, num_processes(), niceness))
        # the process reads it once it has imported what it needs
        threading.Thread(target=_write, args=(self._process.stdin, job), daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def wait(self, seconds: float) -> int:
        """Return the exit status.

        Raises:
            TimeoutExpired: see `subprocess.Popen.wait`.
        """
        return self._process.wait(seconds)

    def close(self) -> None:
        """End the process and those that it started."""
        self._kill()


def _write(pipe: Any, content: bytes) -> None:
    with suppress(BrokenPipeError), pipe:  # the process failed: see CompileJob.wait
        pipe.write(content)


class CompileJob:
    """Processes that compile requests, into the cache of this process.

    Args:
        requests: to compile; those with the most parameters, which take longest, come first.
        urgent: names of requests that half of the processes compile before the others.
        background: whether other processes have precedence.
        process: that was started ahead; None: start one if it is needed.
    """

    def __init__(
        self,
        requests: Sequence[CompileRequest],
        *,
        urgent: Container[str] = (),
        background: bool = False,
        process: CompileProcess | None = None,
    ) -> None:
        self._process: CompileProcess | None = None
        self._begin = time.monotonic()
        self._folder = _marks_folder() if requests else Path()
        missing = [request for request in requests if not self._is_marked(request)]
        if len(missing) >= LEAST_REQUESTS:
            self._process = process or CompileProcess.start()
        elif process is not None:
            process.close()
        if self._process is None:
            return
        missing.sort(key=lambda request: -request.num_parameters)
        longest, others = missing[: num_processes() // 2], missing[num_processes() // 2 :]
        others.sort(key=lambda request: request.name not in urgent)
        missing = longest + others
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _logger.warning("kernels are compiled in one process: %s", error)
            self.close()
        else:
            jobs = [(request.content, str(self._folder / request.mark)) for request in missing]
            self._process.send(jobs, background=background)

    def _is_marked(self, request: CompileRequest) -> bool:
        return (self._folder / request.mark).exists()

    @property
    def is_done(self) -> bool:
        """Whether everything was compiled, or is not waited for any longer."""
        return self._process is None or self._process.has_ended or self._seconds_left <= 0

    @property
    def _seconds_left(self) -> float:
        return self._begin + LONGEST_WAIT - time.monotonic()

    def wait_for(self, requests: Iterable[CompileRequest]) -> None:
        """Wait until these are compiled, at most as long as :meth:`wait`."""
        for request in requests:
            while not self.is_done and not self._is_marked(request):
                time.sleep(POLL_SECONDS)

    def wait(self) -> None:
        """Wait until everything is compiled, at most `LONGEST_WAIT` seconds after the start."""
        if self._process is None:
            return
        try:
            status = self._process.wait(max(self._seconds_left, 0))
        except subprocess.TimeoutExpired:
            status = None
        if status != 0:
            self.close()
            _logger.warning(
                "kernels are compiled in one process: the process that compiles them in parallel "
                "%s",
                f"took more than {LONGEST_WAIT:.0f} s"
                if status is None
                else f"ended with status {status}",
            )
        self._process = None

    def close(self) -> None:
        """End the processes; what they compiled stays in the cache."""
        if self._process is not None:
            self._process.close()
        self._process = None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started, unless it ended by itself."""
    if process.poll() != 0:  # of a process that was killed, others may go on
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()


def num_processes() -> int:
    """Return how many processes compile: one per core of this process, at most `MAX_PROCESSES`."""
    return min(len(os.sched_getaffinity(0)), MAX_PROCESSES)


def _cache_folder() -> Path:
    import triton

    return Path(triton.knobs.cache.dir)


def _marks_folder() -> Path:
    return _cache_folder() / "mtp_plugin-compiled"


# ---- the process of a job ------------------------------------------------------------------


def main() -> None:
    """Compile the job that is read from standard input."""
    _import_ahead()
    jobs, count, niceness = pickle.load(sys.stdin.buffer)
    os.nice(niceness)
    context = multiprocessing.get_context("fork")
    next_index = context.Value("i", 0)
    for content, _ in jobs:
        with suppress(Exception):
            importlib.import_module(pickle.loads(content)[0])  # once for all processes
    processes = [
        context.Process(target=_compile_all, args=(jobs, next_index))
        for _ in range(min(count, len(jobs)))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _import_ahead() -> None:
    """Import what most jobs need, before the job is known and for all processes."""
    root = Path(__file__).parents[1]
    for part in ("hosts/embedded", "ops"):
        for path in (root / part).rglob("*_triton.py"):
            name = ".".join(path.relative_to(root.parent).with_suffix("").parts)
            with suppress(Exception):
                importlib.import_module(name)
    with suppress(Exception):  # hashes the files of Triton, for its keys
        importlib.import_module("triton.runtime.cache").triton_key()


def _compile_all(jobs: list[tuple[bytes, str]], next_index: Any) -> None:
    """Compile what no other process has begun, and mark it."""
    while True:
        with next_index.get_lock():
            index = next_index.value
            next_index.value += 1
        if index >= len(jobs):
            return
        content, mark = jobs[index]
        with suppress(Exception):  # the launch raises it
            compile_request(content)
            Path(mark).touch()


def compile_request(content: bytes) -> None:
    """Compile the content of a `CompileRequest`, in a process that launches nothing."""
    import triton
    from triton.backends.compiler import GPUTarget

    module, name, cache_key, signature, constants, attributes, options, target = pickle.loads(
        content
    )
    kernel: Any = importlib.import_module(module)
    for part in name.split("."):
        kernel = getattr(kernel, part)
    # Triton's key of a source depends on which kernel a process has hashed first: of a function
    # that two kernels call, the global constants enter only the second one's key
    kernel.hash = cache_key
    _set_driver(target)
    kernel.create_binder()  # sets the class of its language, Triton's or Gluon's
    source = kernel.ASTSource(kernel, signature, constants, attributes)
    triton.compile(source, target=GPUTarget(*target), options=options)


def _set_driver(target: tuple[Any, ...]) -> None:
    """Set the functions of Triton's driver that compiling needs, without a device."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget(*target)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return device

    driver.set_active(Driver())
