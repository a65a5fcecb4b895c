"""Compile the launches of modules, without the interpreter, and print what became of them.

Usage: ``python -m tests.compiled 90 tests.compiled.launches``, the number being the compute
capability without its point. A module has functions ``compile_*``.
"""

from __future__ import annotations

import importlib
import json
import sys
import time

import triton

from mtp_plugin.ops.early_compile import record_launches
from tests.compiled.compiler import Compilations, absent_gpu, launched_kernels, missed_requests


def main(capability: str, *module_names: str) -> None:
    compilations = Compilations(int(capability))
    launches = {
        name: launch
        for module in map(importlib.import_module, module_names)
        for name, launch in vars(module).items()
        if name.startswith("compile_")
    }
    with absent_gpu(compilations.capability), record_launches() as requests:
        for name, launch in launches.items():
            if name != "compile_all":  # of kernels that are refused
                launch()
    seconds = {}
    for name, launch in launches.items():
        start = time.perf_counter()
        with compilations.of_launches():
            launch()
        seconds[name] = round(time.perf_counter() - start, 2)
    report = {
        "triton": triton.__version__,
        "binaries": {name: len(hashes) for name, hashes in compilations.binaries.items()},
        "errors": compilations.errors,
        "hooked": sorted(compilations.hooked),
        "contracted": sorted(compilations.contracted),
        "kernels": sorted(launched_kernels()),
        "requested": len(requests),
        "missed": missed_requests(list(requests.values())),
        "seconds": seconds,
    }
    sys.stdout.write(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
