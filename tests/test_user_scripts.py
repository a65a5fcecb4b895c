"""Scripts as users of other engines and researchers write them, on the bundled code model.

The loop over ``mtp_plugin.ops`` is in tests/ops/test_readme.py, ``vllm serve`` in tests/vllm/.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

import mtp_plugin
from mtp_plugin import CustomDrafter, CustomVerification, register_drafter, register_verification
from mtp_plugin.plugin import unregister_drafter, unregister_verification

CHECKPOINT = str(Path(__file__).parents[1] / "integration" / "tiny_model" / "checkpoint")
PROMPTS = ["class HTTPServer:\n", "import unittest\n"]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with mtp_plugin.LLM(CHECKPOINT, speculative_config=None) as llm:
        return [output.text for output in llm.generate(PROMPTS, greedy())]


def greedy() -> mtp_plugin.SamplingParams:
    return mtp_plugin.SamplingParams(max_tokens=16, temperature=0.0)


def test_script_of_a_tensorrt_llm_engineer(expected: list[str]) -> None:
    from mtp_plugin import LLM, CudaGraphConfig, KvCacheConfig, MTPDecodingConfig, SamplingParams

    llm = LLM(
        model=CHECKPOINT,
        backend="pytorch",
        tensor_parallel_size=1,
        max_batch_size=4,
        max_num_tokens=256,
        kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=0.3, enable_block_reuse=True),
        cuda_graph_config=CudaGraphConfig(enable_padding=True),
        stream_interval=20,
        speculative_config=MTPDecodingConfig(
            num_nextn_predict_layers=3, relaxed_topk=10, relaxed_delta=0.6
        ),
    )
    params = SamplingParams(max_tokens=16, temperature=0.0)
    outputs = llm.generate(PROMPTS, sampling_params=params)
    assert [output.outputs[0].text for output in outputs] == expected
    assert llm.generate_async(PROMPTS[0], params).result().outputs[0].text == expected[0]

    async def stream() -> list[str]:
        events = llm.generate_async(PROMPTS[0], params, streaming=True)
        last = [output.outputs[0].text async for output in events][-1]
        return [last, (await llm.generate_async(PROMPTS[1], params).aresult()).outputs[0].text]

    assert asyncio.run(stream()) == expected
    llm.shutdown()


def test_script_of_a_vllm_operator(expected: list[str]) -> None:
    from mtp_plugin import LLM, SamplingParams

    llm = LLM(
        model=CHECKPOINT,
        served_model_name="tiny",
        generation_config="vllm",
        additional_config={"mtp_plugin": {}},
        max_model_len=256,
        max_num_seqs=4,
        gpu_memory_utilization=0.3,
        enable_prefix_caching=True,
        compilation_config={"mode": 3},
        speculative_config={
            "method": "mtp",
            "num_speculative_tokens": 3,
            "rejection_sample_method": "standard",
            "draft_sample_method": "greedy",
        },
    )
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16))
    assert [output.outputs[0].text for output in outputs] == expected
    assert outputs[0].acceptance.acceptance_length > 1.5
    llm.shutdown()


class FirstOnly(CustomVerification):
    description = "accept at most the first draft"

    def num_accepted(
        self,
        logits: torch.Tensor,  # noqa: ARG002
        draft_tokens: torch.Tensor,
        target_tokens: torch.Tensor,
    ) -> torch.Tensor:
        return (draft_tokens[:, 0] == target_tokens[:, 0]).to(torch.int32)


class SecondLast(CustomDrafter):
    """Propose the last two tokens in turn."""

    def propose(self, tokens: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
        back = 2 - torch.arange(k, device=tokens.device) % 2
        return tokens.gather(1, (lengths.unsqueeze(1) - back).clamp(min=0))


def test_script_of_a_researcher_with_a_method_and_a_drafter(expected: list[str]) -> None:
    register_verification("first_only", FirstOnly())
    register_drafter("second_last", SecondLast())
    try:
        config = {
            "decoding_type": "second_last",
            "max_draft_len": 3,
            "mtp": {"verification": ["coupled", "first_only"]},
        }
        params = [
            mtp_plugin.SamplingParams(max_tokens=16, temperature=0.0, verification=name)
            for name in ("coupled", "first_only")
        ]
        with mtp_plugin.LLM(CHECKPOINT, speculative_config=config) as llm:
            outputs = llm.generate(PROMPTS, params)
    finally:
        unregister_verification("first_only")
        unregister_drafter("second_last")
    assert [output.text for output in outputs] == expected
    assert all(output.acceptance.num_drafted > 0 for output in outputs)
