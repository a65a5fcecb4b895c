"""Compile Triton kernels in other processes before they are launched, for all host engines.

Triton compiles a kernel at its first launch, one after the other. A `CompileJob` compiles kernels
into Triton's cache on disk, without using the GPU, and the launches that follow find them there.
What it misses is compiled at its first launch, as without a job. A file in the cache marks what was
compiled: without anything new, no process starts.

A dry run finds the kernels: in this process within `record_launches`, or, for a host engine that
has not set its device yet, in the process of the job, see `request_launches`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any

from mtp_plugin.errors import describe_error
from mtp_plugin.requests.columns import REQUEST_COLUMNS

_logger = logging.getLogger(__name__)

MAX_PROCESSES = 8
"""Compiling processes at most; further ones add little, as the longest compilations dominate."""
LEAST_KERNELS = 8
"""Fewer kernels are compiled at their first launch: starting the processes would take longer."""
LONGEST_WAIT = 180.0
"""Seconds that launches wait for a job; after that they compile what is missing."""
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class CompileRequest:
    """A kernel with the specialization of one launch, or launches that a job first runs dry."""

    name: str
    """Identifies source, specialization, options, target and Triton version."""
    num_parameters: int
    content: bytes = field(repr=False)
    """Pickled arguments of `_compile_kernel` or, of a dry run, `_find_kernels`."""
    is_dry_run: bool = False

    @property
    def mark(self) -> str:
        """Name of the file that a job writes once this is in the cache."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:32]


def request_launches(
    function: Callable[..., None], *arguments: Any, capability: int
) -> CompileRequest:
    """Return a request for the kernels that a function launches on an NVIDIA GPU.

    Nothing is launched here, and no driver is initialised.

    Args:
        function: of a module; it launches kernels on CPU tensors, which count as the GPU's.
        capability: compute capability without its point.
    """
    import triton

    # the files of the kernels and their launches, and the indices that kernels have as constants
    ops = hashlib.sha256(repr(REQUEST_COLUMNS).encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        ops.update(path.read_bytes())
    launches = f"{function.__module__}.{function.__qualname__}{arguments} {capability}"
    name = f"{launches} {ops.hexdigest()} {triton.__version__}"
    return CompileRequest(name, 0, pickle.dumps((function, arguments, capability)), is_dry_run=True)


# ---- dry runs ------------------------------------------------------------------------------


def _zero_filled() -> AbstractContextManager[Any]:
    """Fill new tensors with zeros, as no kernel writes them and some are read as indices."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class ZeroFilled(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            created = func(*args, **(kwargs or {}))
            if func.overloadpacket.__name__ in _UNINITIALISED:
                created.zero_()
            return created

    return ZeroFilled()  # type: ignore[no-untyped-call]


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
    import triton
    from triton.compiler import CompiledKernel

    requests: dict[str, CompileRequest] = {}
    failures: list[str] = []
    with _recording, ExitStack() as undo:  # one at a time changes Triton
        run, launch = triton.JITFunction.run, CompiledKernel.__getitem__
        hook = triton.knobs.runtime.jit_cache_hook

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
            (_thread, "is_recording", True, False),
            (triton.JITFunction, "run", run_or_record, run),
            (CompiledKernel, "__getitem__", launch_or_skip, launch),
            (triton.knobs.runtime, "jit_cache_hook", note, hook),
        ]
        for owner, name, replacement, original in changes:
            undo.callback(setattr, owner, name, original)
            setattr(owner, name, replacement)
        undo.enter_context(_zero_filled())
        yield requests
    if failures:
        warn_of_compilation(f"{len(failures)} of them: {failures[0]}")


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


# ---- jobs ----------------------------------------------------------------------------------


class CompileJob:
    """Processes that compile requests into the cache of this process.

    Args:
        requests: to compile where they have no mark; those with the most parameters, which take
            longest, come first.
        urgent: names of requests that half of the processes compile before the others.
        niceness: of the processes.
        starts: False: another process of this machine compiles, and this one only waits.
    """

    def __init__(
        self,
        requests: Sequence[CompileRequest] = (),
        *,
        urgent: Set[str] = frozenset(),
        niceness: int = 0,
        starts: bool = True,
    ) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._awaited: Sequence[CompileRequest] = ()  # another process compiles them
        self._marks = _cache_folder() / "mtp_plugin-compiled" if requests else Path()
        self._dry_runs = [request for request in requests if request.is_dry_run]
        missing = [request for request in requests if not self._is_marked(request)]
        if not starts:
            self._awaited = missing
        elif len(missing) >= LEAST_KERNELS or any(request.is_dry_run for request in missing):
            self._start(missing, urgent, self._marks, num_processes(), niceness)

    def _start(self, *job: Any) -> None:
        # of a frozen program, the executable would start the program again
        if not sys.executable or getattr(sys, "frozen", False):
            return
        environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"} | {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TRITON_CACHE_DIR": str(self._marks.parent),
        }
        # it imports what this process imports: -m would put the working directory first, and
        # another version there would be compiled into this version's cache entries
        program = (
            f"import sys; sys.path[:] = {[str(path) for path in sys.path]}; "
            f"from {__name__} import main; main()"
        )
        try:
            self._marks.mkdir(parents=True, exist_ok=True)
            with TemporaryFile() as file:
                pickle.dump(job, file)
                file.seek(0)
                self._process = subprocess.Popen(
                    [sys.executable, "-c", program],
                    env=environment,
                    stdin=file,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # an interrupt is for this process
                )
        except OSError as error:
            warn_of_compilation(error)
        else:
            self._end = weakref.finalize(self, _end, self._process)

    def _is_marked(self, request: CompileRequest) -> bool:
        return os.path.exists(self._marks / request.mark)  # False without access

    @cached_property
    def _deadline(self) -> float:
        return time.monotonic() + LONGEST_WAIT  # since the first wait

    @property
    def is_done(self) -> bool:
        """Whether everything was compiled, or is not waited for any longer."""
        if self._process is None:
            has_ended = all(map(self._is_marked, self._awaited))
        else:
            has_ended = self._process.poll() is not None
        return has_ended or time.monotonic() >= self._deadline

    def wait_for(self, requests: Iterable[CompileRequest]) -> None:
        """Wait until these are compiled, at most as long as :meth:`wait`."""
        for request in requests:
            while not self.is_done and not self._is_marked(request):
                time.sleep(POLL_SECONDS)

    def wait(self) -> float:
        """Wait until everything is compiled, at most `LONGEST_WAIT` seconds since the first wait.

        Returns:
            Seconds that this took.
        """
        begin = time.monotonic()
        while not self.is_done:
            time.sleep(POLL_SECONDS)
        status = 0 if self._process is None else self._process.poll()
        if status is None:
            warn_of_compilation(f"the compiling process took more than {LONGEST_WAIT:.0f} s")
        elif status != 0:
            warn_of_compilation(f"the compiling process ended with status {status}")
        self.close()
        if self._dry_runs and (folder := _cache_folder()) != self._marks.parent:
            self._copy_entries(folder)
        return time.monotonic() - begin

    def close(self) -> None:
        """End the processes; what they compiled stays in the cache."""
        if self._process is not None:
            self._end()
        self._process, self._awaited = None, ()

    def _copy_entries(self, folder: Path) -> None:
        """Add the kernels of dry runs to the cache of this process, which vLLM has moved since."""
        marks = [self._marks / request.mark for request in self._dry_runs]
        for name in {name for mark in marks if mark.exists() for name in mark.read_text().split()}:
            for group in self._marks.parent.glob(f"*/__grp__{name}.json"):
                copy = folder / group.parent.name / group.name  # it has the paths of its files
                if not copy.exists():
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(group, copy)


def warn_of_compilation(reason: object) -> None:
    """Log that kernels are compiled at their first launch, and why."""
    _logger.warning("kernels are compiled at their first launch: %s", reason)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started, unless it ended by itself."""
    if process.poll() != 0:  # of a process that was killed, others may go on
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def num_processes() -> int:
    """Return how many processes compile: one per core of this process, at most `MAX_PROCESSES`."""
    return min(len(os.sched_getaffinity(0)), MAX_PROCESSES)


def _cache_folder() -> Path:
    import triton

    return Path(triton.knobs.cache.dir)


# ---- the process of a job ------------------------------------------------------------------


def main() -> None:
    """Compile the job in standard input."""
    requests, urgent, marks, count, niceness = pickle.load(sys.stdin.buffer)
    os.nice(niceness)
    _compile([request for request in requests if not request.is_dry_run], urgent, marks, count)
    for request in requests:
        if request.is_dry_run:
            found: list[CompileRequest] = []
            try:
                found = _find_kernels(*pickle.loads(request.content))
                _compile(found, set(), marks, count)
            finally:  # whatever happened, no process waits for it any longer
                names = {kernel.name.split()[0].rpartition(".")[2] for kernel in found}
                written = marks / f"{request.mark}.new"
                written.write_text(" ".join(names))
                written.replace(marks / request.mark)


def _find_kernels(
    function: Callable[..., None], arguments: tuple[Any, ...], capability: int
) -> list[CompileRequest]:
    """Run launches dry, see `request_launches`, in a process that launches nothing."""
    from mtp_plugin.ops import launching, programmatic_launch

    _set_driver(("cuda", capability, 32))
    launching.expect = lambda *_: None  # type: ignore[attr-defined]
    programmatic_launch._supports_pdl = lambda _: capability >= 90  # type: ignore[assignment]
    with record_launches() as requests:
        function(*arguments)
    return list(requests.values())


def _compile(requests: Sequence[CompileRequest], urgent: Set[str], marks: Path, count: int) -> None:
    """Compile requests in ``count`` processes, of which this is one."""
    for request in requests:
        with suppress(Exception):
            importlib.import_module(pickle.loads(request.content)[0])  # once for all processes
    with suppress(Exception):  # hashes the files of Triton, for its keys
        importlib.import_module("triton.runtime.cache").triton_key()
    context = multiprocessing.get_context("fork")
    arguments = _in_order(requests, urgent, count), marks, context.Value("i", 0)
    processes = [
        context.Process(target=_compile_next, args=arguments)
        for _ in range(min(count, len(requests)) - 1)
    ]
    for process in processes:
        process.start()
    _compile_next(*arguments)
    for process in processes:
        process.join()


def _in_order(
    requests: Sequence[CompileRequest], urgent: Set[str], count: int
) -> list[CompileRequest]:
    ordered = sorted(requests, key=lambda request: -request.num_parameters)
    longest, others = ordered[: count // 2], ordered[count // 2 :]
    return longest + sorted(others, key=lambda request: request.name not in urgent)


def _compile_next(requests: Sequence[CompileRequest], marks: Path, next_index: Any) -> None:
    """Compile what no other process has begun, and mark it."""
    while True:
        with next_index.get_lock():
            index = next_index.value
            next_index.value += 1
        if index >= len(requests):
            return
        mark = marks / requests[index].mark
        with suppress(Exception):  # the launch raises it
            if not mark.exists():
                _compile_kernel(*pickle.loads(requests[index].content))
                mark.touch()


def _compile_kernel(module: str, name: str, cache_key: str, *given: Any) -> None:
    """Compile the kernel of a `CompileRequest`, in a process that launches nothing."""
    import triton
    from triton.backends.compiler import GPUTarget

    signature, constants, attributes, options, target = given
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

    functions = SimpleNamespace(
        get_current_target=lambda: GPUTarget(*target),
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
    )
    driver.set_active(functions)
