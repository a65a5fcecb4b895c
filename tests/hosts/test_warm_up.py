"""No request waits until a kernel is compiled: what is compiled before has all of them."""

from __future__ import annotations

import pytest

from tests.no_interpreter import run_module

pytest.importorskip("triton")


@pytest.mark.parametrize("host", ["sglang", "vllm"])
def test_the_warm_up_launches_the_kernels_of_all_batches(host: str) -> None:
    engines = run_module(f"tests.hosts.{host}.launches")
    for name, launches in engines.items():
        assert launches["later"], name
        assert set(launches["later"]) <= set(launches["warm_up"]), name
    with_drafts = {kernel.split()[0].rpartition(".")[2] for kernel in engines["drafts"]["later"]}
    assert {"sample_finish_kernel", "accept_kernel"} <= with_drafts
