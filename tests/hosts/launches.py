"""Which kernels a warm-up and later steps launch."""

from __future__ import annotations

from collections.abc import Callable

from mtp_plugin.ops.early_compile import record_launches
from tests.compiled.compiler import absent_gpu


def compare(warm_up: Callable[[], None], run_steps: Callable[[], None]) -> dict[str, list[str]]:
    """Return the kernels of both, on a Hopper GPU that is absent."""
    with absent_gpu(90):
        with record_launches() as before:
            warm_up()
        with record_launches() as later:
            run_steps()
    return {"warm_up": sorted(before), "later": sorted(later)}
