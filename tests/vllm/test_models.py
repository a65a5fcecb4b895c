"""Models with latent attention (DeepSeek-V3, float32) and recurrent layers (Qwen3.5, bfloat16).

With dummy weights. vLLM's logits of both on the CPU depend on the number of rows of a batch, so
that output with and without drafts is compared where all logits are nearly equal, as vLLM's own
dummy weights give them; with wider weights the output equals that of vLLM without the package.
"""

from __future__ import annotations

import pytest

from tests.vllm.engines import MODELS
from tests.vllm.test_random_requests import assert_same_completion

pytest.importorskip("vllm")


def engines(*kinds):
    return [f"{name}_{kind}" for name in MODELS for kind in kinds]


@pytest.mark.engines(*engines("k0", "k2"))
@pytest.mark.parametrize("model", MODELS)
def test_drafts_do_not_change_the_output(results, model):
    with_drafts, without = results(f"{model}_k2"), results(f"{model}_k0")
    for phase in ("greedy", "sampled"):
        for got, expected in zip(
            with_drafts[phase]["outputs"], without[phase]["outputs"], strict=True
        ):
            assert got["tokens"] == expected["tokens"]
    assert with_drafts["sampled"]["counters"]["spec_decode_num_accepted_tokens"] > 0


@pytest.mark.engines(*engines("wide_k2", "without_package_k2"))
@pytest.mark.parametrize("model", MODELS)
def test_greedy_output_equals_that_of_vllm_without_the_package(results, model):
    ours, others = (results(f"{model}_{kind}_k2")["greedy"] for kind in ("wide", "without_package"))
    for got, expected in zip(ours["outputs"], others["outputs"], strict=True):
        assert_same_completion(got, expected)
    assert ours["counters"] == others["counters"]
