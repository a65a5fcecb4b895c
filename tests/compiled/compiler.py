"""Compiles launches for a GPU that is not there.

Triton specializes and compiles by itself, as for a launch on that GPU; only its driver is
replaced, and launches do nothing.
"""

from __future__ import annotations

import importlib
import multiprocessing
import pickle
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

import mtp_plugin
from mtp_plugin.hosts.embedded.attention import triton as attention
from mtp_plugin.ops import early_compile, launching, programmatic_launch
from mtp_plugin.ops.early_compile import CompileRequest

HALF_FMA = re.compile(r"\bfma\.rn(\.\w+)*\.(bf16|f16)")
SHARED_BYTES = {90: 227 * 1024, 89: 99 * 1024}
"""Shared memory that a program can have, by compute capability: Hopper, and the least since
Ampere."""
OVERLAPPING = 90
"""Capability from which on launches overlap."""
HOPPER = 90
"""Capability for which prompt attention has a kernel of its own."""
ERROR_LINES = 5
"""Of an error message, which first quotes the kernel's source; the reason comes last."""


class AbsentDriver:
    """The driver functions that compiling needs."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


@contextmanager
def absent_gpu(capability: int) -> Iterator[None]:
    """Within, tensors count as tensors of a GPU, which is not there."""
    driver.set_active(AbsentDriver(capability))
    with ExitStack() as patches:
        for target, name, replacement in (
            (launching, "expect", lambda *_: None),
            (programmatic_launch, "_supports_pdl", lambda _: capability >= OVERLAPPING),
            (attention, "_widens", lambda _: False),
            (attention, "_is_hopper", lambda _: capability == HOPPER),
        ):
            patches.enter_context(patch.object(target, name, replacement))
        yield


class AbsentBinary:
    """Replaces a kernel that did not compile."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_: None


class Compilations:
    """What became of every launch, by the kernel's full name."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.binaries: dict[str, set[str]] = defaultdict(set)
        self.errors: dict[str, list[str]] = defaultdict(list)
        self.hooked: set[str] = set()
        """Kernels that Triton's JIT hook was called for."""
        self.contracted: set[str] = set()
        """Kernels in which a half-precision product and a sum became one instruction."""

    @contextmanager
    def of_launches(self) -> Iterator[None]:
        """Within, a launch of a kernel compiles it, as if its tensors were on the GPU."""
        launch = triton.JITFunction.run

        def run(kernel: Any, *arguments: Any, **options: Any) -> Any:
            name = full_name(kernel)
            # shows the kernel at which the compiler takes the whole process down
            sys.stderr.write(f"compiling {name}\n")
            sys.stderr.flush()
            try:
                binary = launch(kernel, *arguments, **{**options, "warmup": True})
            except Exception as error:  # whatever it is, it belongs to this kernel
                given = dict(zip(kernel.arg_names, arguments, strict=False)) | options
                self._fail(name, error, given)
                return AbsentBinary()
            most = SHARED_BYTES[self.capability]
            if binary.metadata.shared > most:
                self.errors[name].append(
                    f"{binary.metadata.shared} bytes of shared memory, there are {most}"
                )
            self.binaries[name].add(binary.hash)
            if HALF_FMA.search(binary.asm["ptx"]):
                self.contracted.add(name)
            return binary

        def hook(*, fn: Any, **_: Any) -> None:
            self.hooked.add(full_name(fn.jit_function))

        with absent_gpu(self.capability), ExitStack() as patches:
            for target, name, replacement in (
                (triton.JITFunction, "run", run),
                # as a profiler or vLLM's JIT monitor sets it: constants are then written as JSON
                (triton.knobs.runtime, "jit_cache_hook", hook),
                (CompiledKernel, "__getitem__", AbsentBinary.__getitem__),
            ):
                patches.enter_context(patch.object(target, name, replacement))
            yield

    def _fail(self, name: str, error: BaseException, given: dict[str, Any]) -> None:
        lines: list[str] = []
        cause: BaseException | None = error
        while cause is not None:  # the innermost first: it knows the reason
            first, *source = f"{type(cause).__name__}: {cause}".splitlines()
            lines = [first, *source[-ERROR_LINES:], *lines]
            cause = cause.__cause__
        values = [
            f"{key}={getattr(value, 'dtype', value)}"
            for key, value in given.items()
            if key not in ("grid", "warmup")
        ]
        self.errors[name].append("\n".join([*lines, f"given {', '.join(values)}"]))


def missed_requests(requests: Sequence[CompileRequest]) -> list[str]:
    """Kernels that a job would compile to other entries of the cache than their launches did.

    In a forked process, in which no kernel has been hashed before.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_compile_requests, args=(requests, sender))
    process.start()
    sender.close()
    missed: list[str] = receiver.recv()
    process.join()
    return missed


def _compile_requests(requests: Sequence[CompileRequest], sender: Any) -> None:
    missed = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            missed.append(src.name)

    for function in jit_functions():
        function.hash = None
        function.used_global_vals.clear()
    triton.knobs.compilation.listener = listen
    for request in reversed(requests):
        early_compile._compile_kernel(*pickle.loads(request.content))
    sender.send(missed)


def full_name(kernel: Any) -> str:
    """Module below the package, and function."""
    return f"{kernel.__module__.removeprefix('mtp_plugin.')}.{kernel.__name__}"


def launched_kernels() -> set[str]:
    """Jit functions of the package that no other one calls, so that somebody launches them."""
    functions = jit_functions()
    called: set[int] = set()
    for function in functions:
        names = function.fn.__code__.co_names
        used = (function.fn.__globals__.get(name) for name in names)
        called |= {id(value) for value in used if _is_jit(value)}
    return {full_name(function) for function in functions if id(function) not in called}


def jit_functions() -> list[Any]:
    """Jit functions of the package."""
    root = Path(mtp_plugin.__file__).parent
    functions: dict[int, Any] = {}
    for path in sorted(root.rglob("*.py")):
        if "@triton.jit" not in path.read_text():
            continue
        parts = path.relative_to(root.parent).with_suffix("").parts
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
        functions |= {id(value): value for value in vars(module).values() if _is_jit(value)}
    return list(functions.values())


def _is_jit(value: Any) -> bool:
    return isinstance(value, triton.JITFunction) and value.__module__.startswith("mtp_plugin.")
