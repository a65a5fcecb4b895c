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


def engines(kind):
    return [f"{name}{kind}_k{k}" for name in MODELS for k in (0, 1, 2)]


def differing(first, second, phase):
    pairs = zip(first[phase]["outputs"], second[phase]["outputs"], strict=True)
    return sum(a["tokens"] != b["tokens"] for a, b in pairs)


@pytest.mark.engines(*engines(""))
@pytest.mark.parametrize("num_drafts", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_drafts_do_not_change_the_output(results, model, num_drafts):
    with_drafts, without = (results(f"{model}_k{k}") for k in (num_drafts, 0))
    for phase in ("greedy", "sampled"):
        assert differing(with_drafts, without, phase) == 0
    assert with_drafts["sampled"]["counters"]["spec_decode_num_accepted_tokens"] > 0


@pytest.mark.engines(*engines("_wide"), *engines("_without_package"))
@pytest.mark.parametrize("num_drafts", [0, 1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_greedy_output_equals_that_of_vllm_without_the_package(results, model, num_drafts):
    ours, others = (
        results(f"{model}_{kind}_k{num_drafts}")["greedy"] for kind in ("wide", "without_package")
    )
    for got, expected in zip(ours["outputs"], others["outputs"], strict=True):
        assert_same_completion(got, expected)
    assert ours["counters"] == others["counters"]


@pytest.mark.engines(*engines("_wide"), *engines("_without_package"))
@pytest.mark.parametrize("num_drafts", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_differences_with_wide_weights_are_reported(results, report, model, num_drafts):
    counts = [
        differing(results(f"{model}_{kind}_k{num_drafts}"), results(f"{model}_{kind}_k0"), phase)
        for kind, phase in (("wide", "greedy"), ("wide", "sampled"), ("without_package", "greedy"))
    ]
    report(
        f"{model}, K = {num_drafts} against 0, of 4 outputs: {counts[0]} greedy and {counts[1]} "
        f"sampled ones differ, {counts[2]} greedy ones of vLLM without the package"
    )
