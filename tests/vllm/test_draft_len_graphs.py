"""CUDA graphs of every number of drafts, by vLLM's own choice of sizes; none is captured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mtp_plugin.hosts.vllm.scheduled_draft_len import schedule_of
from mtp_plugin.hosts.vllm.wrapping import GRAPHS, UNDRAFTED

pytest.importorskip("vllm")


def manager_of(num_drafts: int, most: int) -> SimpleNamespace:
    """vLLM's ``CudaGraphManager`` of the target, with what ``_init_candidates`` reads and sets."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.config.vllm import VllmConfig
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    spec = SimpleNamespace(
        num_speculative_tokens=num_drafts,
        num_speculative_tokens_per_batch_size=schedule_of(range(num_drafts + 1), most),
        uses_dynamic_speculative_decoding=lambda: True,
    )
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        cudagraph_capture_sizes=None,
        max_cudagraph_capture_size=None,
        post_init_cudagraph_sizes=lambda: None,
        pass_config=SimpleNamespace(enable_sp=False),
        compile_sizes=None,
    )
    config = SimpleNamespace(
        additional_config={"mtp_plugin": {"draft_len": "auto"}},
        model_config=SimpleNamespace(enforce_eager=False),
        scheduler_config=SimpleNamespace(max_num_seqs=most, max_num_batched_tokens=8192),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        compilation_config=compilation,
        speculative_config=spec,
        num_speculative_tokens=num_drafts,
        uniform_decode_query_len=num_drafts + 1,
        performance_mode="balanced",
    )
    VllmConfig._set_cudagraph_sizes(config)
    manager = SimpleNamespace(
        vllm_config=config,
        compilation_config=compilation,
        cudagraph_mode=compilation.cudagraph_mode,
        max_num_reqs=most,
        decode_query_len=num_drafts + 1,
        varlen_decode=False,
        lora_capture_cases=[0],
        _capture_descs={},
        _candidates={},
        _graphs_captured=True,
        _maybe_ubatch_twin=lambda _: None,
        _resolve_effective_loras=lambda number: number,
    )
    CudaGraphManager._init_candidates(manager)
    return manager


@pytest.mark.parametrize("most", [8, 16, 128])
@pytest.mark.parametrize("num_drafts", [1, 3, 5, 7])
def test_every_batch_has_a_graph_at_every_number_of_drafts(
    num_drafts: int, most: int, report
) -> None:
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    manager = manager_of(num_drafts, most)
    largest = manager.compilation_config.max_cudagraph_capture_size
    batches = [
        (size, size * each, each)
        for each in range(1, num_drafts + 2)
        for size in range(1, most + 1)
        if size * each <= largest - 8 * each  # vLLM captures no larger ones, and pads to 8 requests
        or size * each in (each, largest)
    ]

    def found() -> list[tuple[int, int]]:
        descs = [CudaGraphManager.dispatch(manager, *batch, 0) for batch in batches]
        return [
            (size, each - 1)
            for (size, _, each), desc in zip(batches, descs, strict=True)
            if desc.cg_mode.name != "FULL"
        ]

    def count() -> int:
        return sum(mode.name == "FULL" and len(d) for mode, d in manager._capture_descs.items())

    alone, captured = found(), count()
    arrange, capture = GRAPHS.values()  # what a worker calls in place of vLLM's methods
    arrange(CudaGraphManager._init_candidates, manager)
    report(
        f"{num_drafts} drafts, {most} requests: {count()} graphs, vLLM {captured}; without a graph "
        f"{len(found())} of {len(batches)}, vLLM {len(alone)}"
    )
    assert found() == []
    assert count() <= captured
    steps = {desc for descs in manager._candidates.values() for desc in descs}
    assert steps <= {desc for descs in manager._capture_descs.values() for desc in descs}

    def record(manager, forward):
        manager.graphs |= {
            desc: forward for descs in manager._capture_descs.values() for desc in descs
        }

    manager.graphs = {}
    capture(record, manager, lambda skip_sample=False: skip_sample)
    graphs = getattr(manager, UNDRAFTED)
    for size, num_tokens, each in batches:
        desc = CudaGraphManager.dispatch(manager, size, num_tokens, each, 0)
        assert graphs[desc]() == (each == 1)
